"""Files that are replaced whole or not at all, hashed, or kept as lines of JSON. The standard library alone, and no room's rules.

Errors are the operating system's own (`OSError`); who writes knows what they mean, and says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.base import untrusted_files

_MOST_OF_LINES = 4 << 30  # maximum bytes of a file of lines
_OPENED = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


@contextlib.contextmanager
def replace_file(path: Path, *, tag: str = "", durable: bool = False) -> Iterator[Path]:
    """A path beside `path` for the block to fill; what it wrote is then synced and takes the place of `path`.

    Whoever looks, also after a power cut, finds the old content or the new one, and no half of it. A block that fails leaves `path` as
    it was and nothing beside it.

    In a private folder the file is private, too (`is_private`).

    A device, a pipe or a process's own output, as /dev/stdout, is written to: nothing takes its place.

    Args:
        tag: tells the files of several writers apart that may replace `path` at once.
        durable: sync the folder, too, so that the new content survives a power cut from here on.
    """
    if _no_file(path):
        with tempfile.TemporaryDirectory() as work:
            yield (whole := Path(work) / "part")
            with whole.open("rb") as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        return
    part = path.with_name(f".{path.name}.{tag}.part" if tag else f".{path.name}.part")
    try:
        yield part
        if is_private(path.parent):
            part.chmod(part.stat().st_mode & 0o700)
        fsync_path(part)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def is_private(folder: Path) -> bool:
    """Whether only this user can access a folder."""
    return folder.is_dir() and not folder.stat().st_mode & 0o077


def make_private(folder: Path) -> None:
    """Removes the rights of group and others from a folder and everything below it, so that copies are private too."""
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # removed meanwhile
            if not path.is_symlink() and (mode := path.stat().st_mode) & 0o077:
                path.chmod(mode & 0o7700)


def _no_file(path: Path) -> bool:
    """Whether something is there that is neither file nor folder, or a link to what a process has open."""
    return path.absolute().parent in _OPENED or (path.exists() and not path.is_file() and not path.is_dir())


def write_atomically(path: Path, content: bytes | str, *, tag: str = "", durable: bool = False, private: bool = False) -> None:
    """Gives a file new content, whole or not at all; text is written as UTF-8. See `replace_file`.

    Args:
        private: only this user can read the file, independently of the umask and the folder.
    """
    with replace_file(path, tag=tag, durable=durable) as part:
        if private:
            part.unlink(missing_ok=True)
            part.touch(mode=0o600, exist_ok=False)
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def partial_folder(final: Path) -> Path:
    """An empty folder beside `final` to fill; what an interrupted attempt left there is removed."""
    part = final.with_name(f".{final.name}.part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def commit_folder(part: Path, final: Path) -> None:
    """Gives a filled `partial_folder` its final name, durably. A folder of that name is replaced, and removed only after that."""
    for path in sorted(part.rglob("*")):
        fsync_path(path)
    fsync_path(part)
    old = final.with_name(f".{final.name}.old")
    if old.exists():  # of an attempt that was interrupted right here
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    part.rename(final)
    fsync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Has a file's content, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_manifest(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every regular file below `folder`, in sorted order. Links are not followed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def json_line(value: Any) -> bytes:
    """A value as one line of JSON, with its end."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def append_lines(path: Path, lines: Iterable[bytes], *, durable: bool = False) -> None:
    """Adds lines, each with its end, to a file of them; one writer at a time. The file and its folder are made where they are missing.

    A torn last line, which a killed process may have left, is cut off first: the next line would be lost with it. With `durable` the
    lines survive a power cut from here on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_torn_line(path)
    new = not path.exists()
    with path.open("ab") as file:
        file.writelines(lines)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if new and durable:
        fsync_path(path.parent)


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file, without line ends; empty if the file is missing. Excludes an incomplete last line. Raises `ValueError` if the
    path is not a regular file."""
    try:
        return untrusted_files.read_bytes(path, most=_MOST_OF_LINES).split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def read_json_lines(path: Path) -> list[Any]:
    """The values of `complete_lines`. Raises `ValueError` for a line that is no JSON."""
    return [json.loads(line) for line in complete_lines(path)]


def remove_torn_line(path: Path) -> None:
    """Removes a last line without its end."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def tail_bytes(path: Path, *, most: int, start: int = 0) -> str:
    """The last `most` bytes of what a file holds from byte `start` on, as text; empty where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read(most).decode(errors="replace")
    except FileNotFoundError:
        return ""
