"""Images from a Dockerfile, with a real daemon: built once, the same on both backends, with clear errors."""

import re
import threading
import time

import pytest

from agentrl.errors import SandboxError, SandboxTimeout, SandboxUnavailable, TaskError
from agentrl.records import SandboxSpec
from agentrl.sandbox import builds, docker_client, images, select_backend
from agentrl.sandbox.conformance import check_conformance
from tests.sandbox.test_silent_daemon import Relay, in_time

pytestmark = pytest.mark.docker
SPEC = SandboxSpec(image="environment", memory_mb=128, processes=16, disk_mb=16)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base image in the daemon, for machines without a registry."""
    folder = tmp_path_factory.mktemp("base") / "image"
    folder.mkdir()
    (folder / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    return images.ensure_docker_image(images.load_image(folder))


@pytest.fixture
def write(tmp_path, base, monkeypatch):
    """Writes a Dockerfile on top of the base, in a project with its own cache. The images are removed after the test."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "environment"
    folder.mkdir()
    built = []

    def write(*lines, start=None):
        (folder / "Dockerfile").write_text("\n".join([f"FROM {base}" if start is None else start, *lines]) + "\n")
        built.append(images.load_image(folder))
        return built[-1]

    yield write
    api = docker_client.client()
    for image in built:
        for tag in (image.tag, image.built_tag, f"{image.built_tag}-unchecked"):
            if builds.has_image(api, tag):
                api.remove_image(tag, force=True)


@pytest.fixture(params=["docker", pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)])
async def backend(request, tmp_path, write):
    output = []
    backend = select_backend(request.param, run_label="test", root=tmp_path, progress=output.append)
    backend.progress_lines = output
    yield backend
    await backend.close()


async def test_dockerfile_is_built_once_and_sandboxes_run_on_it(backend, write, tmp_path):
    (tmp_path / "environment" / "data.txt").write_text("from the context")
    write(
        "COPY data.txt /opt/data.txt",
        "RUN echo said by the step && echo made > /opt/made",
        "ENV X=1",
        'ENTRYPOINT ["false"]',
        "USER nobody",
    )
    await backend.prepare(SPEC)
    assert "said by the step" in backend.progress_lines and any(line.startswith("Step 2/6 : COPY") for line in backend.progress_lines)
    sandbox = await backend.open(SPEC)
    result = await sandbox.exec(["sh", "-c", "cat /opt/data.txt /opt/made; id -un; pwd"], timeout_s=60)
    assert result.stdout == "from the contextmade\nagent\n/home/agent\n", result
    await sandbox.close()
    second_backend, output = select_backend(backend.name, run_label="test", root=tmp_path, progress=lambda line: output.append(line)), []
    await second_backend.prepare(SPEC)
    await second_backend.close()
    assert output == []


async def test_sandbox_from_a_snapshot_has_the_folders_below_logs(backend, write):
    write("RUN mkdir -p /app && echo original > /app/file")
    first = await backend.open(SPEC)
    assert (await first.python("open('file', 'w').write('changed')", timeout_s=60)).ok
    second = await backend.open(SPEC, snapshot=await first.snapshot())
    result = await second.exec(["sh", "-c", "ls /logs && touch /logs/verifier/reward.txt && cat file"], timeout_s=60)
    assert result.stdout == "agent\nartifacts\nverifier\nchanged", result
    await first.close()
    await second.close()


async def test_volumes_and_health_checks_are_ignored(backend, write):
    write("VOLUME /data /home/agent", "HEALTHCHECK --interval=1s CMD touch /tmp/seen")
    await backend.prepare(SPEC)
    assert [(result.name, result.detail) for result in await check_conformance(backend, SPEC, only="read_only_root")] == [
        ("read_only_root", "")
    ]
    sandbox = await backend.open(SPEC)
    result = await sandbox.exec(["sh", "-c", "sleep 2.5; ls -A /tmp; touch /data/x"], timeout_s=60)
    assert result.stdout == "logs\n" and "touch" in result.stderr, result
    await sandbox.close()


@pytest.mark.parametrize(
    ("lines", "patterns"),
    [
        (
            ["# a comment", "", "RUN for n in 1 2 3; do \\", "    echo line $n; done; echo oh >&2; exit 3"],
            [r"Dockerfile, line 4 \(RUN for n in 1 2 3; do echo line", "non-zero code: 3", "    line 3", "    oh", "fix: .*docker build"],
        ),
        (["COPY none /x"], [r"line 2 \(COPY none /x\)", "file not found in build context"]),
        (["", "RNU true"], ["Dockerfile, line 3: the build failed", "unknown instruction: RNU"]),
        (["RUN --mount=type=cache,target=/x true"], [r"line 2", "requires BuildKit", "fix: .*classic builder"]),
        (
            ["RUN printf '#!/bin/sh\\nexit 1\\n' > /usr/local/bin/python3 && chmod +x /usr/local/bin/python3"],
            ["too old or does not start", r"python3 \(3\.9 or later\)", "fix: .*install"],
        ),
    ],
)
def test_failed_build_shows_the_line_and_the_last_output(write, lines, patterns):
    image = write(*lines)
    with pytest.raises(TaskError) as caught:
        images.ensure_docker_image(image)
    assert str(image.recipe.dockerfile) in str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), (pattern, str(caught.value))
    assert not builds.has_image(docker_client.client(), image.tag)


def test_missing_base_image(write):
    image = write("RUN true", start="FROM registry.invalid/none:1")
    with pytest.raises(TaskError, match=r"line 1 \(FROM registry.invalid/none:1\)(.|\n)*fix: check the name"):
        images.ensure_docker_image(image)


def test_image_without_python(write):
    image = write("COPY Dockerfile /", start="FROM scratch")
    with pytest.raises(TaskError, match=r"Dockerfile: the image has no python3; sandboxes need python3 \(3\.9 or later\)"):
        images.ensure_docker_image(image)


@pytest.mark.bubblewrap
async def test_without_a_daemon_bubblewrap_uses_the_cache_or_reports_what_is_missing(write, tmp_path, monkeypatch):
    write("RUN true")
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
        with pytest.raises(SandboxUnavailable, match=r"Dockerfile requires a Docker daemon(.|\n)*fix: start a daemon .*image\.toml"):
            await backend.prepare(SPEC)
    await backend.prepare(SPEC)
    await backend.close()
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
        other = select_backend("bubblewrap", run_label="test", root=tmp_path)
        sandbox = await other.open(SPEC)
        assert (await sandbox.python("print(1)", timeout_s=60)).ok
        await other.close()


def test_daemon_that_hangs_or_ends_during_a_build(write, tmp_path, monkeypatch):
    monkeypatch.setattr(docker_client, "LOOK_S", 0.5)
    real = docker_client.daemon_address()
    for ending in ("silent", "gone"):
        image = write(f"RUN echo {ending} {time.time()} && sleep 100")
        relay_path = tmp_path / f"{ending}.sock"
        relay = Relay(str(relay_path), real.removeprefix("unix://"))

        def break_daemon(line, relay=relay, ending=ending):
            if line.startswith(ending):
                threading.Timer(0.2, relay.close if ending == "gone" else lambda: setattr(relay, "silent", True)).start()

        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", f"unix://{relay_path}")
            with in_time(), pytest.raises(SandboxError, match="Docker daemon") as caught:
                images.ensure_built(image, break_daemon)
            assert isinstance(caught.value, SandboxTimeout) == (ending == "silent")
        relay.close()
