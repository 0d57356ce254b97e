"""Images from a `Dockerfile`: built by this machine's Docker daemon, checked, and exported as a file tree if needed.

A build uses the daemon's defaults, like `docker build`: a Dockerfile is as trusted as a recipe. The builder is the daemon's classic
one, which supports neither `RUN --mount` nor here-documents. All functions block.
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
from docker.errors import APIError, ImageNotFound, NotFound

from agentrl.errors import SandboxError, SandboxUnavailable, TaskError
from agentrl.sandbox import docker_client, layout, waiting
from agentrl.sandbox.build_context import BuildContext, dockerfile_steps
from agentrl.sandbox.inside.users import ENVIRONMENT
from agentrl.sandbox.lease import lease, sandbox_name

BUILD_S = 900.0
LOOK_S = 5.0
"""How long the daemon may be silent during a build before it is pinged."""
MOUNT_POINTS = ("home/agent", "agentrl", "proc", "sys", "dev", "tmp")
_CHECK_S = 60.0
_OUTPUT_LINES = 12
_STEP = re.compile(r"Step (\d+)/\d+ : ")
_PARSE_ERROR = re.compile(r"dockerfile parse error (?:on )?line (\d+): (.*)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PYTHON = ["python3", "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]

Progress = Callable[[str], None]


def ensure_built(tag: str, context: BuildContext, progress: Progress) -> None:
    """Builds the image `tag` unless the daemon has it.

    Raises `TaskError` (file, line, last output) if it does not build or has no python3 for the exec server, `SandboxUnavailable`
    without a daemon, and `SandboxTimeout` or `SandboxError` if the daemon hangs or ends.
    """
    state = docker_client.daemon_state()
    if state == "silent":
        raise docker_client.silent_daemon_error()
    if state == "absent":
        raise SandboxUnavailable(
            f"{context.dockerfile} must be built by a Docker daemon, and none answers at {docker_client.daemon_address()}",
            fix="start one (python -m agentrl.sandbox.daemon start, as root), or write an image.toml next to the Dockerfile",
        )
    with docker_client.connection(_CHECK_S) as api:
        if has_image(api, tag):
            return
        progress(f"building {context.dockerfile}")
        unchecked = f"{tag}-unchecked"
        _build(unchecked, context, progress)
        check_python(api, unchecked, str(context.dockerfile))
        layout.lay_out_image(api, unchecked, context.dockerfile, BUILD_S)
        api.tag(unchecked, *tag.split(":"))
        api.remove_image(unchecked)


def usable_as_is(tag: str) -> bool:
    """Whether sandboxes can start from the image as it is: it has no volumes (extra disks) and no health check (an extra program)."""
    with docker_client.connection(_CHECK_S) as api:
        config = api.inspect_image(tag)["Config"] or {}
    return not config.get("Volumes") and not config.get("Healthcheck")


def export(tag: str, target: Path) -> None:
    """Writes the file tree of an image to `target` as a tar archive, and adds the mount points of a sandbox."""
    config = {"Image": tag, "Entrypoint": ["/none"]}
    with docker_client.connection(BUILD_S) as api, _container(api, config) as name, open(target, "wb") as file:
        file.writelines(api.export(name))
    with tarfile.open(target, "a") as archive:
        present = {member.rstrip("/") for member in archive.getnames()}
        for path in MOUNT_POINTS:
            _add(archive, present, path, tarfile.DIRTYPE)
        _add(archive, present, "etc/passwd", tarfile.REGTYPE)


def check_python(api: docker.APIClient, tag: str, source: str) -> None:
    """Raises `TaskError` with `source` if the image has no python3 (3.9 or later) on the exec server's search path."""
    problem = ""
    config = {
        "Image": tag,
        "Entrypoint": _PYTHON,
        "User": "0:0",
        "Env": [f"PATH={ENVIRONMENT['PATH']}"],
        "NetworkDisabled": True,
        "HostConfig": {"NetworkMode": "none", "CapDrop": ["ALL"], "ReadonlyRootfs": True, "LogConfig": {"Type": "none", "Config": {}}},
    }
    with _container(api, config) as name:
        try:
            api.start(name)
        except APIError as error:
            if "executable file" not in str(error) and "no such file" not in str(error).lower():
                raise
            problem = "has no python3"
        else:
            status = api.wait(name, timeout=_CHECK_S)["StatusCode"]
            problem = "" if status == 0 else f"has a python3 that is too old or does not start (status {status})"
    if problem:
        raise TaskError(
            f"{source}: the image {problem}; sandboxes need python3, 3.9 or later, on {ENVIRONMENT['PATH']}",
            fix="install it in the image, such as with RUN apt-get update && apt-get install -y python3",
        )


def has_image(api: docker.APIClient, tag: str) -> bool:
    """Whether the daemon has the image."""
    try:
        api.inspect_image(tag)
    except ImageNotFound:
        return False
    return True


@contextlib.contextmanager
def _container(api: docker.APIClient, config: dict[str, Any]) -> Iterator[str]:
    """A container for the block, removed with its volumes. It has a lease, so that the reaper can remove it too."""
    name = sandbox_name()
    labels = {docker_client.LABEL_RUN: "image check", docker_client.LABEL_LEASE: lease()}
    api.create_container_from_config({**config, "Labels": labels}, name=name)
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


def _build(tag: str, context: BuildContext, progress: Progress) -> None:
    """Has the daemon build the image, and passes each line of output to `progress`."""
    step = 0
    tail: deque[str] = deque(maxlen=_OUTPUT_LINES)
    try:
        for message in _messages(tag, context):
            if "error" in message:
                raise _failure(context, step, str(message["error"]), tail)
            for line in _ESCAPES.sub("", str(message.get("stream") or "")).splitlines():
                text = "".join(character if character.isprintable() else " " for character in line).rstrip()
                if match := _STEP.match(text):
                    step = int(match[1])
                    tail.clear()
                if text:
                    tail.append(text)
                    progress(text)
    except APIError as error:  # rejected before the first step
        if error.status_code != requests.codes.bad_request:
            raise
        raise _failure(context, 0, str(error.explanation), tail) from None


def _failure(context: BuildContext, step: int, message: str, output: deque[str]) -> TaskError:
    """The error for a Dockerfile that does not build: the line, the daemon's message, and the last output."""
    steps = dockerfile_steps(context.dockerfile.read_text(errors="replace"))
    where, instruction = "", ""
    if parse := _PARSE_ERROR.search(message):
        where, message = f", line {parse[1]}", parse[2]
    elif 0 < step <= len(steps):
        number, instruction = steps[step - 1]
        where = f", line {number} ({instruction[:200]})"
    fix = f"correct it; docker build {context.folder} shows the same"
    if "BuildKit" in message:
        fix = "write the step without BuildKit's options: the daemon's classic builder builds the images"
    elif instruction[:5].upper() == "FROM ":
        fix = "check the name; if no registry answers, load the base image into the daemon first (docker load, docker import)"
    lines = "".join(f"\n    {line}" for line in output)
    return TaskError(f"{context.dockerfile}{where} does not build: {message.strip()}{lines}", fix=fix)


def _messages(tag: str, context: BuildContext) -> Iterator[dict[str, Any]]:
    """The daemon's messages during a build. A thread reads them, so that a hung daemon can be distinguished from a slow step."""
    messages: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
    abandoned = threading.Event()
    threading.Thread(target=_read_messages, args=(tag, context, messages, abandoned), name="docker build", daemon=True).start()
    deadline = time.monotonic() + BUILD_S
    try:
        while True:
            waiting.raise_if_cancelled()
            if time.monotonic() > deadline:
                raise TaskError(f"{context.dockerfile} did not build in {BUILD_S:.0f} s", fix="shorten the build, or use a base image")
            try:
                message = messages.get(timeout=LOOK_S)
            except queue.Empty:
                state = docker_client.daemon_state()
                if state == "silent":
                    raise docker_client.silent_daemon_error() from None
                if state == "absent":
                    raise SandboxError(f"the Docker daemon at {docker_client.daemon_address()} ended during a build") from None
                continue
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            yield message
    finally:
        abandoned.set()


def _read_messages(tag: str, context: BuildContext, messages: queue.SimpleQueue[Any], abandoned: threading.Event) -> None:
    """Puts the daemon's messages, and any error, into `messages`. Closing the connection ends the build."""
    try:
        api = docker.APIClient(base_url=docker_client.daemon_address(), version=docker_client.API_VERSION, timeout=BUILD_S)
        with contextlib.closing(api), context.archive() as archive:
            options = {"custom_context": True, "rm": True, "forcerm": True, "decode": True, "timeout": BUILD_S}
            for message in api.build(fileobj=archive, tag=tag, **options):
                if abandoned.is_set():
                    return
                messages.put(message)
        messages.put(None)
    except Exception as error:  # raised by the reader
        messages.put(error)
