"""Builds images from Dockerfiles with this machine's Docker daemon, checks them, and exports them as file trees if needed.

A build uses the daemon's defaults, like `docker build`: a Dockerfile is trusted as much as a recipe. Builds use the daemon's classic
builder, which supports neither `RUN --mount` nor here-documents. All functions block.

The build context is the folder with the Dockerfile. The archive for the daemon contains regular files, folders and links (never followed),
but no owners or times, and no files that `.dockerignore` lists. The hash of the archive is the image's key. The hash covers the name of a
base image, not its content: if the tag in `FROM` moves, the image that was built first stays in use. Pin a digest (`FROM
debian@sha256:...`) to avoid that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import docker
import requests
from docker.errors import APIError, ImageNotFound, NotFound
from docker.utils.build import PatternMatcher
from pydantic import BaseModel, ConfigDict

from agentrl.errors import SandboxError, SandboxUnavailable, TaskError
from agentrl.sandbox import docker_client, layout
from agentrl.sandbox.inside.users import ENVIRONMENT
from agentrl.sandbox.lease import lease, sandbox_name

DOCKERFILE = "Dockerfile"
LAYOUT = 2
"""Increment it when the build process changes, so that images from the old process are not used."""
MAX_BYTES = 256 << 20
MAX_ENTRIES = 20_000
_MAX_DEPTH = 64
_PIECE_BYTES = 1 << 20
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # not the task's fault
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.*)")
BUILD_S = 900.0
MOUNT_POINTS = ("home/agent", "agentrl", "proc", "sys", "dev", "tmp")
_CHECK_S = 60.0
_OUTPUT_LINES = 12
_STEP = re.compile(r"Step (\d+)/\d+ : ")
_PARSE_ERROR = re.compile(r"dockerfile parse error (?:on )?line (\d+): (.*)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PYTHON = ["python3", "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]

Progress = Callable[[str], None]


class BuildContext(BaseModel):
    """A build context: `read_build_context(Path("tasks/one/environment"))`."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    key: str
    """sha256 (first 16 hex digits) of everything sent to the daemon."""

    @property
    def dockerfile(self) -> Path:
        """Path of the Dockerfile."""
        return self.folder / DOCKERFILE

    @contextlib.contextmanager
    def archive(self) -> Iterator[IO[bytes]]:
        """Yields the context as a tar archive in a temporary file. Raises `TaskError` if the folder has changed since it was read, or can
        no longer be read, and `SandboxError` if the archive cannot be written."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(_temporary_file())
                with tarfile.open(fileobj=file, mode="w") as archive:
                    key = _pack(self.folder, archive)
                file.seek(0)
            except OSError as error:
                raise _not_written(self.folder, error) from error
            if key != self.key:
                raise TaskError(f"{self.folder} changed while its image was being built", fix="retry when the folder no longer changes")
            yield file


def read_build_context(folder: Path) -> BuildContext:
    """Returns the build context in `folder`. Raises `TaskError` if the folder cannot be read, is invalid, or exceeds a limit, and
    `SandboxError` if no descriptor or memory is free."""
    return BuildContext(folder=folder, key=_pack(folder, None))


def dockerfile_steps(text: str) -> list[tuple[int, str]]:
    """Returns a list of (line number, instruction), one for each step of a Dockerfile, in the daemon's order."""
    lines = text.splitlines()
    escape = _escape(lines)
    steps: list[tuple[int, list[str]]] = []
    continued = False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        more = text.endswith(escape)
        text = text[:-1].rstrip() if more else text
        if continued:
            steps[-1][1].append(text)
        else:
            steps.append((number, [text]))
        continued = more
    return [(number, " ".join(pieces).strip()) for number, pieces in steps]


def _escape(lines: list[str]) -> str:
    """Returns the character that continues a line: a backslash, unless a parser directive at the top sets a different character."""
    for line in lines:
        directive = _DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape" and directive[2] in ("`", "\\"):
            return directive[2]
    return "\\"


def _pack(folder: Path, archive: tarfile.TarFile | None) -> str:
    """Returns the key of a build context. If `archive` is not None, writes the context to `archive`."""
    path = folder / DOCKERFILE
    if not path.is_file() or path.is_symlink():
        raise TaskError(f"{path} is not a regular file", fix="replace it with a regular file")
    digest = hashlib.sha256(f"agentrl build context {LAYOUT}\0".encode())
    left = MAX_BYTES
    try:
        for name, entry in _entries(folder):
            member = _member(folder, name, entry)
            with _opened(entry) as file:
                member.size = os.fstat(file.fileno()).st_size if member.isreg() else 0
                left -= member.size
                if left < 0:
                    raise TaskError(f"{folder} contains more than {MAX_BYTES >> 20} MiB", fix=_ignore(folder))
                kind = f"{member.name}\0{member.type!r}\0{member.mode}\0{member.linkname}\0{member.size}\0"
                digest.update(kind.encode("utf-8", "surrogateescape") + _content_digest(file, member.size))
                if archive is not None:
                    file.seek(0)
                    _write(folder, archive, member, file)
    except OSError as error:
        message = f"cannot read {error.filename or folder}: {error.strerror or error}"
        raise SandboxError(message) if error.errno in _EXHAUSTED else TaskError(message) from None
    return digest.hexdigest()[:16]


def _write(folder: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, file: BufferedReader) -> None:
    try:
        archive.addfile(member, file)
    except OSError as error:
        if error.errno is None:  # from `tarfile`: the task's file has become shorter
            raise
        raise _not_written(folder, error) from error


@contextlib.contextmanager
def _temporary_file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(prefix="agentrl-context-") as file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):  # `close` writes the rest of the data, for which the disk may be full
                file.close()


def _not_written(folder: Path, error: OSError) -> SandboxError:
    return SandboxError(f"cannot write the build context of {folder} to a temporary file: {error.strerror or error}")


def _member(folder: Path, name: str, entry: os.DirEntry[str]) -> tarfile.TarInfo:
    """Returns the archive member for an entry of the context. The caller sets the size."""
    member = tarfile.TarInfo(name)
    mode = entry.stat(follow_symlinks=False).st_mode
    member.mode = 0o755 if mode & 0o111 else 0o644
    if stat.S_ISLNK(mode):
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.readlink(entry.path), 0o777
    elif stat.S_ISDIR(mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    elif not stat.S_ISREG(mode):
        raise TaskError(f"{entry.path} is not a file, a folder or a link", fix=f"remove it, or {_ignore(folder)}")
    return member


def _opened(entry: os.DirEntry[str]) -> BufferedReader:
    """Opens a regular file without following a link. Returns an empty file if the entry is a folder or a link."""
    if not entry.is_file(follow_symlinks=False):
        return open(os.devnull, "rb")
    return open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _content_digest(file: BufferedReader, size: int) -> bytes:
    """Returns the sha256 of the first `size` bytes of a file. Only these bytes are archived, because the file may grow in the meantime."""
    digest = hashlib.sha256()
    while size and (data := file.read(min(_PIECE_BYTES, size))):
        digest.update(data)
        size -= len(data)
    return digest.digest()


def _ignore(folder: Path) -> str:
    return f"list the files that the image does not need in {folder / '.dockerignore'}"


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yields (path in the folder, entry) for everything in the context, in a fixed order, folders before their contents."""
    ignored = _ignored(folder)
    count = 0
    pending = [""]
    while pending:
        parent = pending.pop()
        if parent.count("/") > _MAX_DEPTH:
            raise TaskError(f"{folder / parent} is nested more than {_MAX_DEPTH} levels deep")
        with os.scandir(folder / parent) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            path = parent + entry.name
            if entry.is_dir(follow_symlinks=False):
                pending.append(path + "/")  # a later `!` pattern may include files in an ignored folder
            if path != DOCKERFILE and ignored.matches(path):
                continue
            count += 1
            if count > MAX_ENTRIES:
                raise TaskError(f"{folder} contains more than {MAX_ENTRIES} entries", fix=_ignore(folder))
            yield path, entry


def _ignored(folder: Path) -> PatternMatcher:
    path = folder / ".dockerignore"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() and not path.is_symlink() else []
    ignored = PatternMatcher([line.strip() for line in lines if line.strip() and not line.startswith("#")])
    try:
        ignored.matches("x")  # compiles each pattern
    except re.error as error:
        raise TaskError(f"{path} contains an invalid pattern: {error}", fix="write ranges in order, such as [a-z]") from None
    return ignored


# Builds ---------------------------------------------------------------------------------------------------------------


def ensure_built(tag: str, context: BuildContext, progress: Progress) -> None:
    """Builds the image `tag` if the daemon does not have it.

    Raises `TaskError` if the build fails (the message has the file, the line and the last output), the image has no python3 for the exec
    server, or its ENV or WORKDIR cannot be applied; `SandboxUnavailable` if there is no daemon; and `SandboxTimeout` or `SandboxError` if
    the daemon hangs or exits, or the caller is cancelled.
    """
    if not docker_client.reachable():
        raise SandboxUnavailable(
            f"the build of {context.dockerfile} requires a Docker daemon, but none answers at {docker_client.daemon_address()}",
            fix="start a daemon (python -m agentrl.sandbox.daemon start, as root), or write an image.toml next to the Dockerfile",
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
    """Whether sandboxes can start from the image without an export: the image has no volumes (extra disks) and no health check (an extra
    program)."""
    with docker_client.connection(_CHECK_S) as api:
        config = api.inspect_image(tag)["Config"] or {}
    return not config.get("Volumes") and not config.get("Healthcheck")


def export(tag: str, target: Path) -> None:
    """Writes the file tree of an image to `target` as a tar archive, and adds a sandbox's missing mount points. Raises `SandboxError` if
    the daemon fails."""
    config = {"Image": tag, "Entrypoint": ["/none"]}
    with docker_client.connection(BUILD_S) as api, _container(api, config) as name, open(target, "wb") as file:
        file.writelines(api.export(name))
    with tarfile.open(target, "a") as archive:
        present = {member.rstrip("/") for member in archive.getnames()}
        for path in MOUNT_POINTS:
            _add(archive, present, path, tarfile.DIRTYPE)
        _add(archive, present, "etc/passwd", tarfile.REGTYPE)


def check_python(api: docker.APIClient, tag: str, source: str) -> None:
    """Raises `TaskError`, which names `source`, if the image has no python3 (3.9 or later) on the exec server's search path, or if it does
    not start."""
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
            f"{source}: the image {problem}; sandboxes need python3 (3.9 or later) in {ENVIRONMENT['PATH']}",
            fix="install python3 in the image, for example with RUN apt-get update && apt-get install -y python3",
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
    """Creates a container and yields its name. Removes the container and its volumes after the block.

    The container's label contains the lease of this process. If this process dies before the removal, the next call of `cleanup.prune`
    recognizes the container by this lease and removes it.
    """
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
    """Builds the image with the daemon, and passes each line of output to `progress`. Raises `TaskError` if the build fails."""
    step = 0
    tail: deque[str] = deque(maxlen=_OUTPUT_LINES)
    try:
        late = TaskError(
            f"the build of {context.dockerfile} did not finish within {BUILD_S:.0f} s",
            fix="shorten the build, or use a prebuilt base image",
        )
        for message in docker_client.daemon_messages(
            partial(_request_build, tag=tag, context=context), what="build", timeout_s=BUILD_S, late=late
        ):
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
    """Returns the error for a failed build: the line of the Dockerfile, the daemon's message, and the last output."""
    steps = dockerfile_steps(context.dockerfile.read_text(errors="replace"))
    where, instruction = "", ""
    if parse := _PARSE_ERROR.search(message):
        where, message = f", line {parse[1]}", parse[2]
    elif 0 < step <= len(steps):
        number, instruction = steps[step - 1]
        where = f", line {number} ({instruction[:200]})"
    fix = f"correct the Dockerfile; `docker build {context.folder}` shows the same error"
    if "BuildKit" in message:
        fix = "remove the BuildKit options from this step, because the daemon's classic builder builds the images"
    elif instruction[:5].upper() == "FROM ":
        fix = "check the name of the base image; if no registry answers, load the image into the daemon first (docker load, docker import)"
    lines = "".join(f"\n    {line}" for line in output)
    return TaskError(f"{context.dockerfile}{where}: the build failed: {message.strip()}{lines}", fix=fix)


def _request_build(api: docker.APIClient, *, tag: str, context: BuildContext) -> Iterator[dict[str, Any]]:
    with context.archive() as archive:
        options = {"custom_context": True, "rm": True, "forcerm": True, "decode": True, "timeout": BUILD_S}
        yield from api.build(fileobj=archive, tag=tag, **options)
