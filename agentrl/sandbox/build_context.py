"""Build contexts: the files of a folder with a `Dockerfile`, bounded, and identified by a hash of their content.

The archive for the daemon contains regular files, folders and links (never followed), without owners and times, and without what
`.dockerignore` lists. Its hash is the image's key. The hash covers the name of a base image, not its content: if the tag in `FROM`
moves, the image that was built first stays in use. Pin a digest (`FROM debian@sha256:...`) to avoid that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

from docker.utils.build import PatternMatcher
from pydantic import BaseModel, ConfigDict

from agentrl.errors import TaskError

DOCKERFILE = "Dockerfile"
LAYOUT = 2
"""Increment when the way such images are built changes, so that old ones are not used."""
MAX_BYTES = 256 << 20
MAX_ENTRIES = 20_000
_MAX_DEPTH = 64
_PIECE_BYTES = 1 << 20
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.*)")


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
        """The context as a tar archive in a temporary file. Raises `TaskError` if the folder has changed since it was read."""
        with tempfile.TemporaryFile(prefix="agentrl-context-") as file:
            if _pack(self.folder, file) != self.key:
                raise TaskError(f"{self.folder} changed while its image was being built", fix="start again once nothing changes it")
            file.seek(0)
            yield file


def read_build_context(folder: Path) -> BuildContext:
    """The build context in `folder`. Raises `TaskError` with the file and the bound that it exceeds."""
    return BuildContext(folder=folder, key=_pack(folder, None))


def dockerfile_steps(text: str) -> list[tuple[int, str]]:
    """(line number, instruction) of each step of a Dockerfile, in the daemon's order."""
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
    """The character that continues a line: a backslash, unless a parser directive at the top sets another one."""
    for line in lines:
        directive = _DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape" and directive[2] in ("`", "\\"):
            return directive[2]
    return "\\"


def _pack(folder: Path, target: IO[bytes] | None) -> str:
    """Returns the key of a context. Writes the archive to `target`, if given."""
    path = folder / DOCKERFILE
    if not path.is_file() or path.is_symlink():
        raise TaskError(f"{path} is not a regular file", fix="replace it by a regular file")
    digest = hashlib.sha256(f"agentrl build context {LAYOUT}\0".encode())
    left = MAX_BYTES
    try:
        with contextlib.ExitStack() as stack:
            archive = stack.enter_context(tarfile.open(fileobj=target, mode="w")) if target is not None else None
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
                        archive.addfile(member, file)
    except OSError as error:
        raise TaskError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()[:16]


def _member(folder: Path, name: str, entry: os.DirEntry[str]) -> tarfile.TarInfo:
    """The archive member for an entry, without its size."""
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
    """A regular file, opened without following a link; an empty one for a folder or a link."""
    if not entry.is_file(follow_symlinks=False):
        return open(os.devnull, "rb")
    return open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _content_digest(file: BufferedReader, size: int) -> bytes:
    """sha256 of the first `size` bytes, the ones that are archived; a file may grow meanwhile."""
    digest = hashlib.sha256()
    while size and (data := file.read(min(_PIECE_BYTES, size))):
        digest.update(data)
        size -= len(data)
    return digest.digest()


def _ignore(folder: Path) -> str:
    return f"list what the image does not need in {folder / '.dockerignore'}"


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(path in the folder, entry) of everything in the context, in a fixed order, folders before their contents."""
    ignored = _ignored(folder)
    count = 0
    pending = [""]
    while pending:
        parent = pending.pop()
        if parent.count("/") > _MAX_DEPTH:
            raise TaskError(f"{folder / parent} is nested more than {_MAX_DEPTH} deep")
        with os.scandir(folder / parent) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            path = parent + entry.name
            if entry.is_dir(follow_symlinks=False):
                pending.append(path + "/")  # a later `!` pattern may include files of an ignored folder
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
