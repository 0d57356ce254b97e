"""Atomic writes, hashes, and files of JSON lines. Errors of the operating system are raised as `OSError`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.base import untrusted_files
from agentrl.base.scratch import ScratchFolder
from agentrl.errors import StoreError

MANIFEST = "manifest.json"
"""Name of the file that contains the sha256 of every other file in its folder."""
_RETRY_S = 0.01
_MOST_OF_LINES = 4 << 30  # maximum bytes of a file of lines
_OPENED = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


@contextlib.contextmanager
def replace_file(path: Path, *, tag: str = "", durable: bool = False) -> Iterator[Path]:
    """Context that yields a temporary path, and replaces `path` with the file that the block wrote there.

    Readers see either the old or the new content, even after a power failure. If the block fails, `path` is unchanged. In a private folder
    (`is_private`) the file becomes private. A device, a pipe or a path such as /dev/stdout is not replaced; the content is written to it.

    Args:
        tag: distinguishes writers that may replace `path` at the same time.
        durable: also sync the folder, so that after the block the new content survives a power failure.
    """
    if _no_file(path):
        with ScratchFolder() as work:
            yield (complete := work / "part")
            with complete.open("rb") as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        return
    part = path.with_name(f".{path.name}.{tag}.part" if tag else f".{path.name}.part")
    part.unlink(missing_ok=True)  # in a third-party folder it could be a link to one of the user's files
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


def wait_for_lock(handle: int, how: int, *, within_s: float) -> bool:
    """Locks an open file (flock). Returns False if a different process holds the lock for the next `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)


def is_private(folder: Path) -> bool:
    """Whether a folder exists and denies all access to its group and to others."""
    return folder.is_dir() and not folder.stat().st_mode & 0o077


def make_private(folder: Path) -> None:
    """Removes the permissions of the group and of others from a folder and everything below it."""
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # the file was removed meanwhile
            if not path.is_symlink() and (mode := path.stat().st_mode) & 0o077:
                path.chmod(mode & 0o7700)


def _no_file(path: Path) -> bool:
    """Whether the path is a device, a pipe, or a link to an open file of a process."""
    return path.absolute().parent in _OPENED or (path.exists() and not path.is_file() and not path.is_dir())


def write_atomically(path: Path, content: bytes | str, *, tag: str = "", durable: bool = False, private: bool = False) -> None:
    """Replaces the content of a file atomically; text is written as UTF-8. See `replace_file`.

    Args:
        private: make the file readable by this user only, regardless of the umask and the folder.
    """
    with replace_file(path, tag=tag, durable=durable) as part:
        if private:
            part.unlink(missing_ok=True)
            part.touch(mode=0o600, exist_ok=False)
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def partial_folder(final: Path) -> Path:
    """Returns a new, empty temporary folder next to `final`. First removes the folder that an interrupted attempt left."""
    part = final.with_name(f".{final.name}.part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def commit_folder(part: Path, final: Path) -> None:
    """Renames a filled `partial_folder` to its final name, durably. An existing folder is renamed first, so if the process is killed in
    between, no folder `final` exists."""
    for path in sorted(part.rglob("*")):
        fsync_path(path)
    fsync_path(part)
    old = final.with_name(f".{final.name}.old")
    if old.exists():  # an interrupted attempt left it
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    part.rename(final)
    fsync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Syncs the content of a file or the entries of a folder to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """Returns the sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_manifest(folder: Path) -> dict[str, str]:
    """Returns relative path -> sha256 for every regular file below `folder`, sorted by path. Does not follow links."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def numbered_folders(folder: Path) -> list[Path]:
    """Returns the folders in `folder` whose names are numbers, in ascending order; empty if `folder` is missing.

    Sorting by name would be wrong from number 1,000,000 on, because names are padded to only six digits.
    """
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()), key=lambda path: int(path.name))


def has_intact_files(folder: Path) -> bool:
    """Whether the files in a folder are exactly those in its manifest, which is written last. False if there is no valid manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return False
    actual = folder_manifest(folder)
    actual.pop(MANIFEST, None)
    return bool(actual == manifest)


def json_line(value: Any) -> bytes:
    """Returns a value as one line of JSON, including the line break. Raises `UnicodeEncodeError` for half a surrogate pair."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def append_lines(path: Path, lines: Iterable[bytes], *, durable: bool = False) -> None:
    """Appends lines, which must include line breaks, to a file. Creates the file and its folder if needed. Supports one writer at a time.

    First removes an incomplete last line, which a killed process may have left. If `durable` is True, the lines survive a power failure.
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
    """Returns the lines of a file, without line breaks; empty if the file is missing. Excludes an incomplete last line.

    Raises `ValueError` if the path is a device or a pipe, or if the file is larger than 4 GiB.
    """
    try:
        return untrusted_files.read_bytes(path, most=_MOST_OF_LINES).split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def read_json_lines(path: Path, *keys: str) -> list[Any]:
    """Returns the values in a file of JSON lines. Raises `StoreError` for a line that is not JSON or, if `keys` are given, is not an object
    with these keys, and the errors of `complete_lines`."""
    values = list[Any]()
    for number, line in enumerate(complete_lines(path), 1):
        try:
            values.append(json.loads(line))
            if keys and not (isinstance(values[-1], dict) and values[-1].keys() >= {*keys}):
                raise ValueError(f"it is not an object with {' and '.join(keys)}")
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise StoreError(
                f"line {number} of {path} is damaged: {why}\n  fix: restore the file from a copy, or delete the line"
            ) from None
    return values


def remove_torn_line(path: Path) -> None:
    """Removes an incomplete last line. Does nothing if the file is missing."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def tail_bytes(path: Path, *, most: int, start: int = 0) -> str:
    """Returns the last `most` bytes of a file after byte `start`, as text; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read(most).decode(errors="replace")
    except FileNotFoundError:
        return ""
