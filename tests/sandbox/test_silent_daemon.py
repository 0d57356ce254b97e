"""A Docker daemon that accepts connections and does not answer: every operation raises a typed error in time."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError, SandboxTimeout, SandboxUnavailable
from agentrl.records import SandboxSpec
from agentrl.sandbox import (
    DockerBackend,
    bubblewrap,
    docker,
    docker_client,
    images,
    list_open,
    open_sandboxes,
    prune,
    select_backend,
    waiting,
)
from tests.commands import agentrl

SPEC = SandboxSpec(image="image")
ALONE = replace(SPEC, runtime="runc")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    return tmp_path


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """A socket in place of the daemon, which accepts connections and never answers."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "silent.sock"))
        daemon.listen(64)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/silent.sock")
        yield daemon


@contextlib.contextmanager
def in_time(seconds=45):
    """Checks that our own timeouts apply, which add up to less than 20 s; the library's is 60 s or none."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.mark.slow
def test_selecting_a_backend(silent, root):
    with in_time(), pytest.raises(SandboxUnavailable, match=r"accepts connections but does not answer(.|\n)*fix: .*restart docker"):
        select_backend("docker", run_label="test", root=root)


@pytest.mark.bubblewrap
async def test_run_with_bubblewrap_does_not_need_the_daemon(silent, root, caplog):
    with in_time(), caplog.at_level(logging.WARNING):
        pool = await open_sandboxes(SandboxConfig(backend="auto"), warm=0, run_label="test", root=root)
        assert pool.name == "bubblewrap" and "accepts connections but does not answer" in caplog.text
        await pool.close()


@pytest.mark.slow
def test_listing_and_removing(silent):
    for operation in (list_open, prune):
        with in_time(), pytest.raises(SandboxTimeout, match="accepts connections but does not answer"):
            operation()


def test_remote_daemon_is_not_used(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with in_time():
        list_open()


@pytest.mark.parametrize("problem", ["", "bwrap is missing"])
def test_auto_does_not_use_a_remote_daemon(problem, root, monkeypatch, caplog):
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    monkeypatch.setattr(bubblewrap, "unavailable_reason", lambda: problem)
    if problem:
        with pytest.raises(
            SandboxUnavailable, match=r"tcp://192\.0\.2\.1:2375 is not a daemon on this machine, and bubblewrap does not work: bwrap"
        ):
            select_backend("auto", run_label="test", root=root)
    else:
        assert select_backend("auto", run_label="test", root=root).name == "bubblewrap"
    assert "DOCKER_HOST=tcp://192.0.2.1:2375 is not a daemon on this machine; trying bubblewrap" in caplog.text
    with pytest.raises(SandboxUnavailable, match="fix: unset DOCKER_HOST"):
        select_backend("docker", run_label="test", root=root)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"])
def test_stalled_pull_ends(reply, silent, root, monkeypatch):
    monkeypatch.setattr(images, "_PULL_S", 0.3)

    def answer():
        link, _ = silent.accept()
        with link:
            link.recv(65536)
            link.sendall(reply)
            ended.wait(60.0)

    ended, lines = threading.Event(), []
    threading.Thread(target=answer, daemon=True).start()
    with in_time(20):
        assert not images._pulled(images.load_image(root / "image"), "python:3.11-slim", lines.append)
    ended.set()
    assert "cannot pull python:3.11-slim" in lines[-1] and "imed out" in lines[-1], lines


async def test_stalled_pull_is_cancelled(silent):
    ended = threading.Event()

    def pull():
        with contextlib.suppress(SandboxError):
            images._pull("python:3.11-slim")
        ended.set()

    with pytest.raises(TimeoutError), waiting.propagate_cancellation():
        async with asyncio.timeout(0.2):
            await asyncio.to_thread(pull)
    assert await asyncio.to_thread(ended.wait, 20.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["ls", "prune"])
def test_the_commands(silent, command):
    completed = agentrl("sandbox", command)
    assert completed.returncode == 1 and "does not answer" in completed.stderr and "Traceback" not in completed.stderr


@pytest.mark.slow
def test_the_doctor(silent):
    completed = agentrl("doctor", "--json")
    (check,) = [check for check in json.loads(completed.stdout) if check["name"] == "Docker"]
    assert not check["ok"] and "accepts connections but does not answer" in check["detail"] and "restart" in check["fix"]


async def test_preparing_opening_and_closing(silent, root, monkeypatch):
    monkeypatch.setattr(images, "PREPARE_S", 1.0)
    backend = DockerBackend(run_label="test", root=root)
    for operation in (backend.prepare, backend.open):
        with in_time(), pytest.raises(SandboxTimeout):
            await operation(SPEC)
    with in_time():
        await backend.close()


async def test_error_names_the_time_limit_that_passed(silent, root, monkeypatch):
    monkeypatch.setattr(docker_client, "QUICK_S", 1.0)
    backend = DockerBackend(run_label="test", root=root)
    with in_time(), pytest.raises(SandboxTimeout, match=r"did not answer in time: .*timeout=1\.0"):
        await backend._discard("agentrl-x-0")
    await backend.close()


# A daemon that stops answering later ----------------------------------------------------------------------------------


class Relay:
    """Relays the connections to the real daemon. While `silent`, it forwards nothing."""

    def __init__(self, path, daemon):
        self.silent = False
        self._daemon = daemon
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._links = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._daemon)
                self._links += [link, far]
                for ends in ((link, far), (far, link)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.silent:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


@pytest.mark.docker
async def test_daemon_that_hangs_while_sandboxes_are_open(root, tmp_path, monkeypatch):
    real = docker_client.daemon_address()
    relay = Relay(str(tmp_path / "relay.sock"), real.removeprefix("unix://"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/relay.sock")
    backend = DockerBackend(run_label="test", root=root)
    try:
        await backend.prepare(ALONE)
        good, doomed, shared = await backend.open(ALONE), await backend.open(ALONE), await backend.open(SPEC)
        relay.silent = True
        for module, name, seconds in ((docker, "LEAVING_S", 1.0), (docker_client, "QUICK_S", 1.5), (docker, "UNDO_S", 1.0)):
            monkeypatch.setattr(module, name, seconds)  # only now, so that the daemon that answers has its full time
        assert (await good.python("print(1)", timeout_s=60)).ok  # open sandboxes need no daemon
        with in_time(), pytest.raises(SandboxTimeout, match=r"in 2\.0 s"):
            await backend.open(ALONE, timeout_s=2.0)
        with in_time():
            await (await backend.open(SPEC)).close()  # in the existing container
            await shared.close()
            await good.close()
        os.kill(await asyncio.to_thread(pid_of, doomed.id, real), 19)  # its server does not end, so only the daemon could kill it
        with in_time():
            await doomed.close()
        with in_time(), pytest.raises(SandboxError):
            await backend.close()
    finally:
        relay.close()
        monkeypatch.undo()
        monkeypatch.setenv("DOCKER_HOST", real)
        for name in docker_client.containers(f"{docker_client.LABEL_RUN}=test"):
            docker_client.remove(name)


def pid_of(name, address):
    import docker as library

    return library.APIClient(base_url=address, version="1.41").inspect_container(name)["State"]["Pid"]
