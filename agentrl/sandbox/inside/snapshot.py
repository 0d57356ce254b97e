"""Snapshots: the working directory as an archive, and back.

A snapshot succeeds whatever an agent does to its files, unless it exceeds the limits on bytes, entries, depth or time. So an agent cannot
prevent it with a mode or a name (the system call filter refuses leases, which block readers). Programs are stopped meanwhile, but one
after the other, so an entry may have changed or disappeared since its folder was read.

Files and folders are opened by name in an open folder, never by path and never through a link: the time is linear in any tree, and
nothing leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time

from agentrl.sandbox.inside.archive import FILE, FOLDER_ENTRY, HARD_LINK, LINK, MAX_SIZE, ArchiveReader, ArchiveWriter, Entry
from agentrl.sandbox.inside.files import FOLDER, MAX_DEPTH, FolderPath, write_file
from agentrl.sandbox.inside.users import HOME
from agentrl.sandbox.inside.wire import READ_BYTES, Refused, Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.sandbox.inside.wire import Answer, Body, Link, Request

MAX_ENTRIES = 20000
SNAPSHOT_S = 20.0
"""Time limit of packing. The host waits longer, so that it gets the error."""
_READABLE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES)  # an entry that has changed since its folder was read
_PERMISSIONS = 0o777
_NEW_FOLDER = 0o755


def send_snapshot(link: Link, request: Request, body: Body) -> Answer:
    """Sends the working directory. The caller must have stopped every program."""
    sink = Sink(link, request["id"], request["max_bytes"], "the working directory is larger than a snapshot may be")
    packer = Packer(ArchiveWriter(sink))
    packer.pack(os.open(HOME, FOLDER))
    return {"more": False}, packer.out.last()


def restore_snapshot(link: Link, request: Request, body: Body) -> Answer:
    """Unpacks a snapshot into the working directory."""
    unpack(ArchiveReader(body), HOME)
    return {}, b""


class Packer:
    """Writes a tree to an archive."""

    def __init__(self, out: ArchiveWriter) -> None:
        self.out = out
        self.entries = 0
        self.names: dict[tuple[int, int], bytes] = {}  # first name of each file with several
        self.deadline = time.monotonic() + SNAPSHOT_S

    def pack(self, folder: int, path: bytes = b"", level: int = 0) -> None:
        """Adds the contents of the open `folder`, and closes it. `path` is empty or ends with a slash."""
        try:
            for entry in self.listing(folder, level):
                self._check_time()
                name = path + os.fsencode(entry.name)
                if entry.is_symlink():
                    self._add_link(folder, entry.name, name)
                elif entry.is_dir(follow_symlinks=False):
                    self._add_folder(folder, entry.name, name, level)
                elif entry.is_file(follow_symlinks=False):
                    self._add_file(folder, entry.name, name)
        finally:
            os.close(folder)

    def listing(self, folder: int, level: int) -> list[os.DirEntry[str]]:
        """The entries of a folder, by name. Raises `Refused` beyond the limits."""
        with os.scandir(folder) as scan:
            entries = list(itertools.islice(scan, MAX_ENTRIES - self.entries + 1))
        self.entries += len(entries)
        if self.entries > MAX_ENTRIES:
            raise Refused("too_large", f"the working directory contains more than {MAX_ENTRIES} entries")
        if entries and level == MAX_DEPTH:
            raise Refused("too_large", f"the working directory is nested more than {MAX_DEPTH} deep")
        return sorted(entries, key=lambda entry: entry.name)

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise Refused("too_large", f"the working directory cannot be packed in {SNAPSHOT_S:.0f} s")

    def _add_link(self, folder: int, name: str, path: bytes) -> None:
        try:
            target = os.fsencode(os.readlink(name, dir_fd=folder))
        except OSError as error:
            if error.errno in (*_GONE, errno.EINVAL):
                return
            raise
        self.out.begin(Entry(path, LINK, target=target))

    def _add_folder(self, folder: int, name: str, path: bytes, level: int) -> None:
        with _opened(folder, name, FOLDER, stat.S_IRUSR | stat.S_IXUSR) as (inner, info):
            if info is not None:
                self.out.begin(Entry(path + b"/", FOLDER_ENTRY, info.st_mode & _PERMISSIONS, _mtime(info)))
                self.pack(os.dup(inner), path + b"/", level + 1)

    def _add_file(self, folder: int, name: str, path: bytes) -> None:
        with _opened(folder, name, _READABLE, stat.S_IRUSR) as (fd, info):
            if info is None or not stat.S_ISREG(info.st_mode):
                return
            first = self.names.setdefault((info.st_dev, info.st_ino), path) if info.st_nlink > 1 else path
            if first is not path:
                self.out.begin(Entry(path, HARD_LINK, target=first))
                return
            self.out.room_for(info.st_size)
            self.out.begin(Entry(path, FILE, info.st_mode & _PERMISSIONS, _mtime(info), info.st_size))
            left = info.st_size
            while left:
                self._check_time()
                data = os.read(fd, min(left, READ_BYTES)) or bytes(min(left, READ_BYTES))  # zeros if the file has shrunk
                self.out.add(data)
                left -= len(data)
            self.out.fill(info.st_size)


@contextlib.contextmanager
def _opened(folder: int, name: str, flags: int, needed: int) -> Iterator[tuple[int, os.stat_result | None]]:
    """(descriptor, status) of an entry; (-1, None) if it is gone. Its owner has the mode bits `needed` during the block."""
    try:
        fd, info = _open_anyway(folder, name, flags, needed)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        yield -1, None
        return
    try:
        yield fd, info
    finally:
        if info.st_mode & needed != needed:
            os.fchmod(fd, stat.S_IMODE(info.st_mode))
        os.close(fd)


def _open_anyway(folder: int, name: str, flags: int, needed: int) -> tuple[int, os.stat_result]:
    """(descriptor, status before) of a file or folder, with the mode bits `needed` added, which the caller removes."""
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        pass
    else:
        info = os.fstat(fd)
        if info.st_mode & needed != needed:
            os.fchmod(fd, stat.S_IMODE(info.st_mode) | needed)
        return fd, info
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)  # needs no right, and stays the same entry
    try:
        info = os.fstat(handle)
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        mode, path = stat.S_IMODE(info.st_mode), f"/proc/self/fd/{handle}"
        os.chmod(path, mode | needed)
        try:
            return os.open(path, flags & ~os.O_NOFOLLOW), info
        except BaseException:
            os.chmod(path, mode)
            raise
    finally:
        os.close(handle)


def _mtime(info: os.stat_result) -> int:
    return min(max(int(info.st_mtime), 0), MAX_SIZE)


def unpack(archive: ArchiveReader, top: str) -> None:
    """Unpacks `archive` into the folder `top`. Raises `Refused` if it is invalid, does not fit, or leads out of the folder."""
    unfinished: list[tuple[str, Entry]] = []
    count = 0
    with FolderPath(top) as folders, FolderPath(top) as sources:
        while (entry := archive.next()) is not None:
            count += 1
            if count > MAX_ENTRIES:
                raise Refused("too_large", f"the archive contains more than {MAX_ENTRIES} entries")
            path = os.fsdecode(entry.name)
            if entry.kind == FOLDER_ENTRY:
                path = path[:-1] if path.endswith("/") else path
                unfinished.append((path, entry))
            _create(entry, archive, *folders.parent(path, create=True), sources)
        for path, entry in reversed(unfinished):  # the mode may close a folder, so its contents come first
            folder, name = folders.parent(path)
            inner = os.open(name, FOLDER, dir_fd=folder)
            try:
                os.utime(inner, (entry.mtime, entry.mtime))
                if entry.mode & _PERMISSIONS != _NEW_FOLDER:
                    os.fchmod(inner, entry.mode & _PERMISSIONS)
            finally:
                os.close(inner)


def _create(entry: Entry, archive: ArchiveReader, folder: int, name: str, sources: FolderPath) -> None:
    """Creates what `entry` describes as `name` in the open `folder`."""
    if entry.kind == FOLDER_ENTRY:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _NEW_FOLDER, dir_fd=folder)
    elif entry.kind == LINK:
        os.symlink(os.fsdecode(entry.target), name, dir_fd=folder)
    elif entry.kind == HARD_LINK:
        first, first_name = sources.parent(os.fsdecode(entry.target))
        os.link(first_name, name, src_dir_fd=first, dst_dir_fd=folder, follow_symlinks=False)
    else:
        write_file(folder, name, archive, entry.size, entry.mode & _PERMISSIONS, entry.mtime)
