"""Describes folders as lists of chunks with checksums, so that two hosts can compare a folder and transfer its missing chunks.

A folder of a run (`versions/000012`, `checkpoints/000012`) is described by its files, each with the sha256 of every `CHUNK` bytes. A chunk
can come from any host, because the receiver checks it. An arriving folder is named `.000012.part` until it contains every chunk. If the
transfer is killed at any point, the next attempt checks the chunks in the folder and transfers only the missing ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import commit_folder
from agentrl.records.fields import Record

CHUNK = 1 << 20
"""Bytes in a chunk; the last chunk of a file may be shorter."""
KINDS = ("versions", "checkpoints")
"""Folders of a run that contain the numbered folders that hosts exchange."""
JUDGES = "judges"
"""Kind of the judges' model folders. On other hosts their path is `judges/NAME`."""
MAX_FILES = 4096
"""Maximum number of files in one folder."""
MAX_CHUNKS = 1 << 22
"""Maximum number of chunks in one folder (4 TiB in total)."""
_RECORDS = frozenset({"version.json"})  # state of the driver's registry, not part of a version's files
_PART = re.compile(r"[^\s.\\-][^\\]{0,199}")  # at most 255 bytes; file names such as `my notes (1).md` occur in model folders
_NUMBER = re.compile(r"[0-9]{6,9}")
_JUDGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_DEPTH = 4
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChunks(Record):
    """A file: its path in the folder, its size in bytes, and the sha256 (hex) of each chunk. Raises `ValueError` for an invalid path, such
    as one with a leading dot or more than four parts, or if the checksums do not match the size."""

    name: str
    size: int
    chunks: tuple[str, ...]

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        parts = self.name.split("/")
        named = all(_PART.fullmatch(part) and part.isprintable() and len(part.encode()) < 256 for part in parts)
        if len(parts) > _DEPTH or not named or self.name in _RECORDS:
            raise ValueError(f"{self.name[:200]!a} is not a valid file name in a version or checkpoint")
        if self.size < 0 or len(self.chunks) != -(-self.size // CHUNK) or not all(_SHA256.fullmatch(sha256) for sha256 in self.chunks):
            raise ValueError(f"{self.name}: the checksums ({len(self.chunks)}) are malformed or do not match {self.size} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderListing(Record):
    """The files of a folder, sorted by name."""

    files: tuple[FileChunks, ...]

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        names = [file.name for file in self.files]
        if names != sorted(set(names)) or len(names) > MAX_FILES or sum(len(file.chunks) for file in self.files) > MAX_CHUNKS:
            raise ValueError(f"a folder must have at most {MAX_FILES} files, sorted by name")
        folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in names) for end in range(1, len(parts))}
        if both := folders & set(names):
            raise ValueError(f"{min(both)} is both a file and a folder")

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(file.size for file in self.files)


def folder_path(root: Path, kind: str, number: str) -> Path:
    """Returns the path of a numbered folder of the run in `root`. Raises `ValueError` for an invalid kind or name, or if `root/KIND` is a
    symbolic link."""
    if kind not in KINDS or not _NUMBER.fullmatch(number):
        raise ValueError(f"{kind[:40]!a}/{number[:40]!a} is not a version or a checkpoint")
    parent = root / kind
    if parent.is_symlink():
        raise ValueError(f"{parent} is a link")
    return parent / number


def fetched_path(root: Path, kind: str, name: str) -> Path:
    """Returns the path of a fetched folder in a mirror: a numbered folder or a judge's model. Raises `ValueError` if the name is
    invalid."""
    return root / JUDGES / name if kind == JUDGES and _JUDGE.fullmatch(name) else folder_path(root, kind, name)


def numbered_folders(root: Path, kind: str) -> list[str]:
    """Returns the names of a run's complete folders of a kind, in ascending order. A version that contains only its record is excluded.
    Raises `ValueError` for an invalid kind."""
    if kind not in KINDS:
        raise ValueError(f"{kind[:40]!a} is not one of {', '.join(KINDS)}")
    with contextlib.suppress(FileNotFoundError):
        entries = [entry for entry in os.scandir(root / kind) if _NUMBER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
        return sorted((entry.name for entry in entries if any(_visible(Path(entry.path)))), key=int)
    return []


class ChunkIndex:
    """Checksums of the files on this host, and the location of each chunk. A file is hashed again only if it has changed. Thread-safe."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[tuple[int, ...], FileChunks]] = {}  # path -> its status, its chunks
        self._slots: dict[str, tuple[Path, int]] = {}  # sha256 -> file, offset
        self._hashing: dict[Path, threading.Lock] = {}  # several mirrors may request a new version at once
        self._lock = threading.Lock()

    def list_folder(self, folder: Path, *, links: bool = False) -> FolderListing:
        """Returns the files in a folder. Excludes hidden files and, unless `links` is set, symbolic links. Raises `FileNotFoundError` if
        there is no such folder, and `ValueError` if it has too many files or a file name that `FileChunks` rejects."""
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise FileNotFoundError(str(folder))
        paths = {path.relative_to(folder).as_posix(): path for path in _visible(folder, links=links)}
        return FolderListing(files=tuple(self.file(paths[name], name) for name in sorted(paths)))

    def file(self, path: Path, name: str) -> FileChunks:
        """Returns the chunks of the file at `path`, whose name in its folder is `name`. Raises `OSError` if the file cannot be read."""
        with self._lock:
            hashing = self._hashing.setdefault(path, threading.Lock())
        with hashing, path.open("rb") as file:
            status = _status(os.fstat(file.fileno()))
            with self._lock:
                known = self._files.get(path)
            if known is not None and known[0] == status and known[1].name == name:
                return known[1]
            digests, size = [], 0
            while data := file.read(CHUNK):
                digests.append(hashlib.sha256(data).hexdigest())
                size += len(data)
            chunks = FileChunks(name=name, size=size, chunks=tuple(digests))
            self.remember(path, chunks, status)
        return chunks

    def remember(self, path: Path, chunks: FileChunks, status: tuple[int, ...]) -> None:
        """Records the chunks of the file at `path`, and the file status for which they are valid."""
        with self._lock:
            self._files[path] = status, chunks
            for number, digest in enumerate(chunks.chunks):
                self._slots[digest] = path, number * CHUNK

    def add(self, sha256: str, path: Path, offset: int) -> None:
        """Records where a chunk was written."""
        with self._lock:
            self._slots[sha256] = path, offset

    def has(self, sha256: str) -> bool:
        """Whether the index contains the location of a chunk on this host. Does not read the file, so the
        chunk may have disappeared."""
        with self._lock:
            return sha256 in self._slots

    def read(self, sha256: str) -> bytes | None:
        """Returns a chunk; None if this host does not have it or no longer has it."""
        with self._lock:
            slot = self._slots.get(sha256)
        if slot is None:
            return None
        with contextlib.suppress(OSError), slot[0].open("rb") as file:
            file.seek(slot[1])
            data = file.read(CHUNK)
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
        with self._lock:
            self._slots.pop(sha256, None)
        return None

    def forget(self, folder: Path) -> None:
        """Removes all entries for files below a folder."""
        with self._lock:
            self._files = {path: known for path, known in self._files.items() if not path.is_relative_to(folder)}
            self._slots = {digest: slot for digest, slot in self._slots.items() if not slot[0].is_relative_to(folder)}
            self._hashing = {path: lock for path, lock in self._hashing.items() if not path.is_relative_to(folder)}


class ArrivingFolder:
    """A folder that arrives in chunks and is renamed to its final name when all chunks have arrived. Thread-safe.

    Args:
        final: the path of the complete folder. Files in an earlier folder with this path are not transferred again.
    """

    def __init__(self, final: Path, listing: FolderListing, index: ChunkIndex) -> None:
        self.final, self.listing, self._index = final, listing, index
        self.part = final.with_name(f".{final.name}.part")
        self._lock = threading.Condition()
        self._writing, self._closed = 0, False
        self._slots: dict[str, list[tuple[Path, int]]] = {}  # missing chunk -> files and offsets that need it
        self.unchanged = self._has_final()
        if not self.unchanged:
            self._begin()

    @property
    def missing(self) -> tuple[str, ...]:
        """Checksums of the missing chunks, in the order of the files."""
        with self._lock:
            return tuple(self._slots)

    @property
    def missing_bytes(self) -> int:
        """Upper bound on the disk space for the missing chunks, in bytes; a chunk may occur several times. The bound exceeds the required
        space by less than `CHUNK` bytes per file, because the last chunk may be shorter."""
        with self._lock:
            return sum(len(slots) for slots in self._slots.values()) * CHUNK

    def write(self, sha256: str, data: bytes) -> None:
        """Writes a chunk to every file that needs it. Raises `ValueError` if the data does not match the checksum or the folder is closed,
        and `OSError` if the data cannot be written."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{len(data)} bytes do not have the checksum {sha256[:12]}...")
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.final.name} no longer accepts chunks")
            self._writing += 1
            slots = self._slots.get(sha256, [])
        try:
            for path, offset in slots:
                _write_at(path, data, offset)
                self._index.add(sha256, path, offset)
            with self._lock:
                self._slots.pop(sha256, None)
        finally:
            with self._lock:
                self._writing -= 1
                self._lock.notify_all()

    def close(self) -> None:
        """Rejects further chunks and waits until the current writes have finished. Keeps the chunks for the next attempt. Idempotent."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._writing)

    def commit(self) -> None:
        """Renames the complete folder to its final name, durably. Raises `ValueError` if chunks are missing. Idempotent."""
        if self.unchanged:
            return
        if missing := len(self.missing):
            raise ValueError(f"{self.final.name} is not complete: {missing} chunks are missing")
        commit_folder(self.part, self.final)
        self._index.forget(self.part)
        for file in self.listing.files:
            path = self.final / file.name
            self._index.remember(path, file, _status(path.stat()))
        self.unchanged = True

    def _has_final(self) -> bool:
        """Whether the final folder contains all files in the listing. If so, deletes the files that are not in the
        listing."""
        wanted = {file.name: file for file in self.listing.files}
        try:
            present = {path.relative_to(self.final).as_posix(): path for path in _visible(self.final)}
            if not wanted.keys() <= present.keys() or any(self._index.file(present[name], name) != one for name, one in wanted.items()):
                return False
            for name in present.keys() - wanted.keys():
                present[name].unlink()
            return True
        except (OSError, ValueError):
            return False

    def _begin(self) -> None:
        if self.part.is_symlink() or (self.part.exists() and not self.part.is_dir()):
            self.part.unlink()
        self.part.mkdir(parents=True, exist_ok=True)
        self._drop_others()
        for file in self.listing.files:
            path = self.part / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() and self._is_final(file):
                _link_or_copy(self.final / file.name, path)
            missing = list(self._missing_of(file, path))
            if missing and path.exists() and path.stat().st_nlink > 1:  # a damaged file from the earlier folder
                path.unlink()
                missing = list(range(len(file.chunks)))
            path.touch()
            os.truncate(path, min(path.stat().st_size, file.size))
            for number in missing:
                self._slots.setdefault(file.chunks[number], []).append((path, number * CHUNK))

    def _drop_others(self) -> None:
        """Removes files and folders that an earlier attempt left and that are not in the listing."""
        files = {file.name for file in self.listing.files}
        folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in files) for end in range(1, len(parts))}
        for path in sorted(self.part.rglob("*"), reverse=True):
            name = path.relative_to(self.part).as_posix()
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder and name not in folders:
                shutil.rmtree(path)
            elif not is_folder and (name not in files or path.is_symlink() or not path.is_file()):
                path.unlink()

    def _is_final(self, one: FileChunks) -> bool:
        with contextlib.suppress(OSError, ValueError):
            path = self.final / one.name
            return not path.is_symlink() and self._index.file(path, one.name) == one
        return False

    def _missing_of(self, one: FileChunks, path: Path) -> Iterator[int]:
        if not path.exists():
            yield from range(len(one.chunks))
            return
        with path.open("rb") as file:
            for number, sha256 in enumerate(one.chunks):
                data = file.read(min(CHUNK, one.size - number * CHUNK))
                if hashlib.sha256(data).hexdigest() != sha256:
                    yield number
                else:
                    self._index.add(sha256, path, number * CHUNK)


def drop_folders(root: Path, kind: str, names: Iterable[str]) -> None:
    """Deletes numbered folders of a run. Renames each folder before it deletes the files. Ignores missing folders, and files that cannot be
    deleted."""
    for name in names:
        path = folder_path(root, kind, name)
        doomed = path.with_name(f".{name}.gone")
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def checkpoints_to_drop(names: Sequence[str], keep: int, spare: Iterable[int]) -> list[str]:
    """Returns the checkpoints to delete: all of `names` (in ascending order) except the last `keep` (at least 1) and those whose number is
    in `spare`."""
    spared = set(spare)
    return [name for name in names[:-keep] if int(name) not in spared]


def _visible(folder: Path, *, links: bool = False) -> Iterator[Path]:
    """Yields the regular files below a folder that are not hidden. `links`: whether to yield symbolic links to files too, because a model
    cache may consist of links."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts) or (len(parts) == 1 and parts[0] in _RECORDS):
            continue
        if stat.S_ISREG(path.lstat().st_mode) or (links and path.is_file()):
            yield path


def _status(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _write_at(path: Path, data: bytes, offset: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        while data:
            count = os.pwrite(handle, data, offset)
            data, offset = data[count:], offset + count
    finally:
        os.close(handle)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)
