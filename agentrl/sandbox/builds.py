"""Images from a `Dockerfile`: built by this machine's Docker daemon, checked, and exported as a file tree on request.

The build runs with the daemon's defaults, as `docker build` does: a Dockerfile is as trusted as a recipe. The builder is the
daemon's classic one, which supports neither `RUN --mount` nor here-documents.
"""

from __future__ import annotations

import contextlib
import queue
import re
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from agentrl.errors import SandboxError, SandboxUnavailable, TaskError
from agentrl.sandbox import cancellation, docker_client, layout
from agentrl.sandbox.build_context import BuildContext, dockerfile_steps
from agentrl.sandbox.inside.users import ENVIRONMENT
from agentrl.sandbox.lease import lease, sandbox_name

BUILD_S = 900.0
LOOK_S = 5.0
"""How long the daemon may be silent during a build before it is checked."""
CHECK_S = 60.0
LAST_LINES = 12
MOUNT_POINTS = ("home/agent", "agentrl", "proc", "sys", "dev", "tmp")
_STEP = re.compile(r"Step (\d+)/\d+ : ")
_PARSE_ERROR = re.compile(r"dockerfile parse error (?:on )?line (\d+): (.*)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PYTHON = ["python3", "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]

Progress = Callable[[str], None]


def ensure_built(tag: str, context: BuildContext, progress: Progress) -> None:
    """Builds the image `tag` of this context unless the daemon has it; it must have a python3 that the exec server runs on. Blocking.

    Raises `TaskError` (file, line, last output) when it does not build, `SandboxUnavailable` without a daemon,
    `SandboxTimeout` or `SandboxError` when the daemon hangs or goes away.
    """
    state = docker_client.daemon_state()
    if state == "silent":
        raise docker_client.silent_daemon_error()
    if state == "absent":
        raise SandboxUnavailable(
            f"{context.dockerfile} must be built by a Docker daemon, and none answers at {docker_client.daemon_address()}",
            fix="start one (python -m agentrl.sandbox.daemon start, as root), or write an image.toml beside the Dockerfile",
        )
    with _daemon(CHECK_S) as api:
        if has_image(api, tag):
            return
        progress(f"building {context.dockerfile}")
        fresh = f"{tag}-unchecked"
        _build(fresh, context, progress)
        check_python(api, fresh, str(context.dockerfile))
        layout.lay_out_image(api, fresh, context.dockerfile, BUILD_S)
        api.tag(fresh, *tag.split(":"))
        api.remove_image(fresh)


def usable_as_is(tag: str) -> bool:
    """Whether sandboxes can start from the image as it is: not with volumes (extra disks) or a health check (an extra program)."""
    with _daemon(CHECK_S) as api:
        config = api.inspect_image(tag)["Config"] or {}
    return not config.get("Volumes") and not config.get("Healthcheck")


def export(tag: str, target: Path) -> None:
    """Writes the file tree of an image to `target`, as a tar archive in which a sandbox's mount points exist. Blocking."""
    with _daemon(BUILD_S) as api, _container(api, {"Image": tag, "Entrypoint": ["/none"]}) as name, open(target, "wb") as file:
        for piece in api.export(name):
            file.write(piece)
    with tarfile.open(target, "a") as archive:
        present = {member.rstrip("/") for member in archive.getnames()}
        for path in MOUNT_POINTS:
            _add(archive, present, path, tarfile.DIRTYPE)
        _add(archive, present, "etc/passwd", tarfile.REGTYPE)


def check_python(api: docker.APIClient, tag: str, source: str) -> None:
    """Raises `TaskError` naming `source` when the image has no python3 (3.9 or later) where the exec server looks for one."""
    problem = ""
    host = {"NetworkMode": "none", "CapDrop": ["ALL"], "ReadonlyRootfs": True, "LogConfig": {"Type": "none", "Config": {}}}
    path = [f"PATH={ENVIRONMENT['PATH']}"]
    with _container(
        api, {"Image": tag, "Entrypoint": _PYTHON, "User": "0:0", "Env": path, "NetworkDisabled": True, "HostConfig": host}
    ) as name:
        try:
            api.start(name)
        except APIError as error:
            if "executable file" not in str(error) and "no such file" not in str(error).lower():
                raise
            problem = "holds no python3"
        else:
            status = api.wait(name, timeout=CHECK_S)["StatusCode"]
            problem = "" if status == 0 else f"holds a python3 that is too old or does not start (status {status})"
    if problem:
        raise TaskError(
            f"{source}: the image {problem}; sandboxes need python3, 3.9 or later, on {ENVIRONMENT['PATH']}",
            fix="install it in the image, such as with RUN apt-get update && apt-get install -y python3",
        )


def has_image(api: docker.APIClient, tag: str) -> bool:
    try:
        api.inspect_image(tag)
    except ImageNotFound:
        return False
    return True


@contextlib.contextmanager
def _daemon(patience_s: float) -> Iterator[docker.APIClient]:
    """A new connection to the daemon, whose errors are raised as ours."""
    try:
        api = docker.APIClient(base_url=docker_client.daemon_address(), version=docker_client.API_VERSION, timeout=patience_s)
        try:
            yield api
        finally:
            api.close()
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise docker_client.daemon_error(error) from error


@contextlib.contextmanager
def _container(api: docker.APIClient, config: dict[str, Any]) -> Iterator[str]:
    """A container that is removed at the end with its volumes; its lease tells the reaper whose it is."""
    name = sandbox_name()
    api.create_container_from_config(
        {**config, "Labels": {docker_client.LABEL_RUN: "image check", docker_client.LABEL_LEASE: lease()}}, name=name
    )
    try:
        yield name
    finally:
        with contextlib.suppress(NotFound):
            api.remove_container(name, force=True, v=True)


def _add(archive: tarfile.TarFile, present: set[str], path: str, kind: bytes) -> None:
    if path in present or f"./{path}" in present:
        return
    parent = path.rpartition("/")[0]
    if parent:
        _add(archive, present, parent, tarfile.DIRTYPE)
    member = tarfile.TarInfo(path)
    member.type, member.mode = kind, 0o755 if kind == tarfile.DIRTYPE else 0o644
    archive.addfile(member)
    present.add(path)


# The build ------------------------------------------------------------------------------------------------------------


def _build(tag: str, context: BuildContext, progress: Progress) -> None:
    """Has the daemon build the image, and shows its output line by line."""
    step = 0
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        for item in _messages(tag, context):
            if "error" in item:
                raise _failure(context, step, str(item["error"]), last)
            for line in _ESCAPES.sub("", str(item.get("stream") or "")).splitlines():
                shown = "".join(character if character.isprintable() else " " for character in line).rstrip()
                if match := _STEP.match(shown):
                    step = int(match[1])
                    last.clear()
                if shown:
                    last.append(shown)
                    progress(shown)
    except APIError as error:  # refused before the first step
        if error.status_code != requests.codes.bad_request:
            raise
        raise _failure(context, 0, str(error.explanation), last) from None


def _failure(context: BuildContext, step: int, said: str, last: deque[str]) -> TaskError:
    """The error for a Dockerfile that does not build: the line, the daemon's message, and the last output."""
    steps = dockerfile_steps(context.dockerfile.read_text(errors="replace"))
    parse = _PARSE_ERROR.search(said)
    if parse is not None:
        where, said = f", line {parse[1]}", parse[2]
    else:
        where = f", line {steps[step - 1][0]} ({steps[step - 1][1][:200]})" if 0 < step <= len(steps) else ""
    fix = f"correct it; docker build {context.folder} shows the same"
    if 0 < step <= len(steps) and steps[step - 1][1][:5].upper() == "FROM ":
        fix = "check the name; where no registry answers, load the base image into the daemon first (docker load, docker import)"
    if "BuildKit" in said:
        fix = "write the step without BuildKit's options: images are built by the daemon's classic builder"
    output = "".join(f"\n    {line}" for line in last)
    return TaskError(f"{context.dockerfile}{where} does not build: {said.strip()}{output}", fix=fix)


def _messages(tag: str, context: BuildContext) -> Iterator[dict[str, Any]]:
    """The daemon's messages during a build. A thread reads them, so that a silent daemon can be told from a slow step."""
    messages: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
    abandoned = threading.Event()
    threading.Thread(target=_listen, args=(tag, context, messages, abandoned), name="docker build", daemon=True).start()
    deadline = time.monotonic() + BUILD_S
    try:
        while True:
            cancellation.raise_if_cancelled()
            if time.monotonic() > deadline:
                raise TaskError(
                    f"{context.dockerfile} did not build in {BUILD_S:.0f} s", fix="shorten the build, or build a base image for it"
                )
            try:
                item = messages.get(timeout=LOOK_S)
            except queue.Empty:
                _check_daemon()
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        abandoned.set()


def _check_daemon() -> None:
    """Raises a typed error when the daemon has hung or gone."""
    state = docker_client.daemon_state()
    if state == "silent":
        raise docker_client.silent_daemon_error()
    if state == "absent":
        raise SandboxError(f"the Docker daemon at {docker_client.daemon_address()} went away during a build")


def _listen(tag: str, context: BuildContext, messages: queue.SimpleQueue[Any], abandoned: threading.Event) -> None:
    """Passes on the daemon's messages and any error; closing the connection ends the build."""
    try:
        api = docker.APIClient(base_url=docker_client.daemon_address(), version=docker_client.API_VERSION, timeout=BUILD_S)
        with contextlib.closing(api), context.archive() as archive:
            options = {"custom_context": True, "rm": True, "forcerm": True, "decode": True, "timeout": BUILD_S}
            for item in api.build(fileobj=archive, tag=tag, **options):
                if abandoned.is_set():
                    return
                messages.put(item)
        messages.put(None)
    except Exception as error:  # raised where it is read
        messages.put(error)
