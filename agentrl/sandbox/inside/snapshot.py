"""Snapshots: the working directory as an archive, and back.

Whatever an agent has made of its files, a snapshot of them succeeds, unless it is too large: more bytes, entries, levels or seconds
than a snapshot may have. So an agent cannot opt out of being captured by a mode or a name (leases, which keep readers waiting, are
refused by the filter of system calls). Its programs stand still meanwhile, but come to that one by one, so that what was seen a
moment ago may be gone, or something else.

Files and folders are opened by name in a folder that is open, never by a path and never through a link: time is linear, however
deep the tree, and nothing leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time

from agentrl.sandbox.inside.archive import FILE, FOLDER_ENTRY, HARD_LINK, LINK, MOST_SIZE, ArchiveIn, ArchiveOut, Entry
from agentrl.sandbox.inside.files import FOLDER, MAX_DEPTH, FolderPath, write_file
from agentrl.sandbox.inside.users import HOME
from agentrl.sandbox.inside.wire import READ_BYTES, Refused, Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.sandbox.inside.wire import Answer, Body, Link, Request


MAX_ENTRIES = 20000
SNAPSHOT_S = 20.0
"""How long packing may take; the host waits longer, so that it hears of it."""
READABLE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES)
"""What opening says of an entry that has gone, become something else, or been closed once more, since the folder was read."""
PERMISSIONS = 0o777
FRESH_FOLDER = 0o755


def send_snapshot(link: Link, request: Request, body: Body) -> Answer:
    """The caller has stopped every program."""
    sink = Sink(link, request["id"], request["max_bytes"], "the working directory is larger than a snapshot may be")
    packer = Packer(ArchiveOut(sink))
    packer.pack(os.open(HOME, FOLDER))
    return {"more": False}, packer.out.last()


def take_snapshot(link: Link, request: Request, body: Body) -> Answer:
    unpack(ArchiveIn(body), HOME)
    return {}, b""


# Packing --------------------------------------------------------------------------------------------------------------


class Packer:
    """Writes a tree to an archive."""

    def __init__(self, out: ArchiveOut) -> None:
        self.out = out
        self.entries = 0
        self.names: dict[tuple[int, int], bytes] = {}  # of files that have several, the first one packed
        self.deadline = time.monotonic() + SNAPSHOT_S

    def pack(self, folder: int, path: bytes = b"", level: int = 0) -> None:
        """Adds what is in the open `folder`, which is closed then; `path` is empty, or ends with a slash."""
        try:
            for entry in self.found(folder, level):
                self.in_time()
                name = path + os.fsencode(entry.name)
                if entry.is_symlink():
                    self.add_link(folder, entry.name, name)
                elif entry.is_dir(follow_symlinks=False):
                    self.add_folder(folder, entry.name, name, level)
                elif entry.is_file(follow_symlinks=False):
                    self.add_file(folder, entry.name, name)
        finally:
            os.close(folder)

    def found(self, folder: int, level: int) -> list[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            found = list(itertools.islice(entries, MAX_ENTRIES - self.entries + 1))
        self.entries += len(found)
        if self.entries > MAX_ENTRIES:
            raise Refused("too_large", f"the working directory holds more than {MAX_ENTRIES} entries")
        if found and level == MAX_DEPTH:
            raise Refused("too_large", f"the working directory is nested more than {MAX_DEPTH} deep")
        return sorted(found, key=lambda entry: entry.name)

    def in_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise Refused("too_large", f"the working directory cannot be packed in {SNAPSHOT_S:.0f} s")

    def add_link(self, folder: int, name: str, path: bytes) -> None:
        try:
            target = os.fsencode(os.readlink(name, dir_fd=folder))
        except OSError as error:
            if error.errno in (*GONE, errno.EINVAL):
                return
            raise
        self.out.begin(Entry(path, LINK, target=target))

    def add_folder(self, folder: int, name: str, path: bytes, level: int) -> None:
        with self.opened(folder, name, FOLDER, stat.S_IRUSR | stat.S_IXUSR) as (inner, info):
            if info is not None:
                self.out.begin(Entry(path + b"/", FOLDER_ENTRY, info.st_mode & PERMISSIONS, mtime_of(info)))
                self.pack(os.dup(inner), path + b"/", level + 1)

    def add_file(self, folder: int, name: str, path: bytes) -> None:
        with self.opened(folder, name, READABLE, stat.S_IRUSR) as (fd, info):
            if info is None or not stat.S_ISREG(info.st_mode):
                return
            first = self.names.setdefault((info.st_dev, info.st_ino), path) if info.st_nlink > 1 else path
            if first is not path:
                self.out.begin(Entry(path, HARD_LINK, target=first))
                return
            self.out.room_for(info.st_size)
            self.out.begin(Entry(path, FILE, info.st_mode & PERMISSIONS, mtime_of(info), info.st_size))
            self.add_content(fd, info.st_size)

    def add_content(self, fd: int, size: int) -> None:
        """Exactly `size` bytes, as the header says: of a file that shrinks meanwhile, zeros."""
        left = size
        while left:
            self.in_time()
            data = os.read(fd, min(left, READ_BYTES)) or bytes(min(left, READ_BYTES))
            self.out.add(data)
            left -= len(data)
        self.out.fill(size)

    @contextlib.contextmanager
    def opened(self, folder: int, name: str, flags: int, needed: int) -> Iterator[tuple[int, os.stat_result | None]]:
        """(descriptor, what it is) of an entry, whatever its mode; (-1, None) when it has gone."""
        try:
            fd, info = open_anyhow(folder, name, flags, needed)
        except OSError as error:
            if error.errno not in GONE:
                raise
            yield -1, None
            return
        try:
            yield fd, info
        finally:
            if info.st_mode & needed != needed:
                os.fchmod(fd, stat.S_IMODE(info.st_mode))
            os.close(fd)


def open_anyhow(folder: int, name: str, flags: int, needed: int) -> tuple[int, os.stat_result]:
    """(descriptor, what it was) of a file or folder. Its owner gets the rights `needed` where it lacks them; the caller takes them back."""
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        return open_closed(folder, name, flags, needed)
    info = os.fstat(fd)
    if info.st_mode & needed != needed:
        os.fchmod(fd, stat.S_IMODE(info.st_mode) | needed)
    return fd, info


def open_closed(folder: int, name: str, flags: int, needed: int) -> tuple[int, os.stat_result]:
    """`open_anyhow` for what its owner may not read: through a handle that needs no right, so that it is one and the same throughout."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
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


def mtime_of(info: os.stat_result) -> int:
    return min(max(int(info.st_mtime), 0), MOST_SIZE)


# Unpacking ------------------------------------------------------------------------------------------------------------


def unpack(archive: ArchiveIn, top: str) -> None:
    """Makes what `archive` holds in the folder `top`. Raises `Refused` for what is no archive, has no room, or leads out of it."""
    made: list[tuple[str, Entry]] = []  # folders
    count = 0
    with FolderPath(top) as folders, FolderPath(top) as sources:
        while (entry := archive.next()) is not None:
            count += 1
            if count > MAX_ENTRIES:
                raise Refused("too_large", f"the archive holds more than {MAX_ENTRIES} entries")
            path = os.fsdecode(entry.name)
            if entry.kind == FOLDER_ENTRY:
                path = path[:-1] if path.endswith("/") else path
                made.append((path, entry))
            make(entry, archive, *folders.parent(path, create=True), sources)
        for path, entry in reversed(made):  # whatever lies in one is there before it is closed
            finish_folder(entry, *folders.parent(path))


def make(entry: Entry, archive: ArchiveIn, folder: int, name: str, sources: FolderPath) -> None:
    """What `entry` is, as `name` in the open `folder`."""
    if entry.kind == FOLDER_ENTRY:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, FRESH_FOLDER, dir_fd=folder)
    elif entry.kind == LINK:
        os.symlink(os.fsdecode(entry.target), name, dir_fd=folder)
    elif entry.kind == HARD_LINK:
        first, first_name = sources.parent(os.fsdecode(entry.target))
        os.link(first_name, name, src_dir_fd=first, dst_dir_fd=folder, follow_symlinks=False)
    else:
        write_file(folder, name, archive, entry.size, entry.mode & PERMISSIONS, entry.mtime)


def finish_folder(entry: Entry, folder: int, name: str) -> None:
    inner = os.open(name, FOLDER, dir_fd=folder)
    try:
        os.utime(inner, (entry.mtime, entry.mtime))
        if entry.mode & PERMISSIONS != FRESH_FOLDER:
            os.fchmod(inner, entry.mode & PERMISSIONS)
    finally:
        os.close(inner)
