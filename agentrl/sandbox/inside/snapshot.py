"""Snapshots: packs the working directory into an archive, and unpacks archives.

A snapshot fails only if the files exceed the limits on bytes, entries, depth or time. An agent cannot prevent a snapshot with a file's mode
or name (the system call filter refuses leases, which block readers). Programs are stopped during a snapshot, but one after the other, so an
entry may have changed or disappeared since its folder was read.

Files and folders are opened by name in an open folder, never by path and never through a link. So the time is linear in the size of the
tree, and no entry leads out of the tree.

An archive is a simple tar file (POSIX.1-1988 headers, pax records for long names), written and read as a stream. An archive contains
regular files, folders, links and hard links. The standard library's `tarfile` takes longer to import than most archives take to write, and
is lenient by design. Archives that are read are untrusted: this module rejects headers and entries of kinds that it would not write.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time

from agentrl.sandbox.inside.files import FOLDER, MAX_DEPTH, FolderPath, write_file
from agentrl.sandbox.inside.users import HOME
from agentrl.sandbox.inside.wire import READ_BYTES, Refused, Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.sandbox.inside.wire import Answer, Body, Link, Readable, Request

MAX_ENTRIES = 20000
SNAPSHOT_S = 20.0
"""Time limit for packing. The host waits for longer than this, so that it receives the error."""
_READABLE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES)  # the entry changed after its folder was read
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
        self.names: dict[tuple[int, int], bytes] = {}  # first name of each file that has several names
        self.deadline = time.monotonic() + SNAPSHOT_S

    def pack(self, folder: int, path: bytes = b"", level: int = 0) -> None:
        """Adds the contents of the open folder `folder` to the archive, and closes the folder. `path` is empty or ends with a slash."""
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
        """Returns the entries of a folder, sorted by name. Raises `Refused` if the limit on entries or depth is exceeded."""
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
    """Yields (descriptor, status) of an entry, or (-1, None) if the entry was removed or replaced. During the block, the owner of the entry
    has the mode bits `needed`."""
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
    """Opens a file or folder after adding the mode bits `needed`, which the caller removes. Returns (descriptor, status before the
    change)."""
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        pass
    else:
        info = os.fstat(fd)
        if info.st_mode & needed != needed:
            os.fchmod(fd, stat.S_IMODE(info.st_mode) | needed)
        return fd, info
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)  # needs no permission, and stays the same entry
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
    """Unpacks `archive` into the folder `top`. Raises `Refused` if the archive is invalid, does not fit, or contains a path that leads out
    of the folder, and `OSError` if an entry cannot be created, for example because it exists."""
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
        for path, entry in reversed(unfinished):  # the mode may make a folder inaccessible, so its contents come first
            folder, name = folders.parent(path)
            inner = os.open(name, FOLDER, dir_fd=folder)
            try:
                os.utime(inner, (entry.mtime, entry.mtime))
                if entry.mode & _PERMISSIONS != _NEW_FOLDER:
                    os.fchmod(inner, entry.mode & _PERMISSIONS)
            finally:
                os.close(inner)


def _create(entry: Entry, archive: ArchiveReader, folder: int, name: str, sources: FolderPath) -> None:
    if entry.kind == FOLDER_ENTRY:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _NEW_FOLDER, dir_fd=folder)
    elif entry.kind == LINK:
        os.symlink(os.fsdecode(entry.target), name, dir_fd=folder)
    elif entry.kind == HARD_LINK:
        target = os.fsdecode(entry.target)
        try:
            first, first_name = sources.parent(target)
            os.link(first_name, name, src_dir_fd=first, dst_dir_fd=folder, follow_symlinks=False)
        except (Refused, FileNotFoundError):
            raise _invalid(f"a hard link to {target!r}, which is not a file in the archive") from None
    else:
        write_file(folder, name, archive, entry.size, entry.mode & _PERMISSIONS, entry.mtime)


# Archives -------------------------------------------------------------------------------------------------------------

FIELD = 100
"""Number of bytes in a header for a name, and for a link's target."""
MAX_SIZE = 0o77777777777
FILE, HARD_LINK, LINK, FOLDER_ENTRY = b"0", b"1", b"2", b"5"
_LONG_NAME = b"x"
_BLOCK = 512
_MAX_LONG_NAMES = 1 << 16  # bytes of pax records: a path of the maximum depth with the longest names, and a link's target
_OWNERS = b"0000000\0" * 2
_MAGIC = b"ustar\00000"


class Entry:
    """An entry of an archive: name, kind, permission bits, modification time in seconds since 1970, content size in bytes, and link
    target."""

    def __init__(self, name: bytes, kind: bytes, mode: int = 0o777, mtime: int = 0, size: int = 0, target: bytes = b"") -> None:
        self.name, self.kind, self.mode, self.mtime, self.size, self.target = name, kind, mode, mtime, size, target


class ArchiveWriter:
    """Sends an archive to the host in pieces of at least `READ_BYTES`. Raises `Refused` if the archive becomes larger than `sink`
    allows."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.buffer = bytearray()

    def room_for(self, size: int) -> None:
        """Raises `Refused` if `size` more bytes do not fit into the archive. Called before these bytes are read."""
        self.sink.room_for(min(size, MAX_SIZE) + len(self.buffer))

    def begin(self, entry: Entry) -> None:
        """Writes the header of an entry."""
        self.add(header_of(entry))

    def add(self, data: bytes) -> None:
        """Writes a part of the entry's content."""
        self.buffer += data
        if len(self.buffer) >= READ_BYTES:
            self.sink.write(self.buffer)
            self.buffer.clear()

    def fill(self, size: int) -> None:
        """Pads content of `size` bytes to whole blocks."""
        self.buffer += bytes(-size % _BLOCK)

    def last(self) -> bytes:
        """Returns the end of the archive, which the caller sends."""
        self.buffer += bytes(2 * _BLOCK)
        self.sink.room_for(len(self.buffer))
        return bytes(self.buffer)


def header_of(entry: Entry) -> bytes:
    """Returns the header blocks that precede the content of an entry."""
    records = b""
    if len(entry.name) > FIELD:
        records += _record(b"path", entry.name)
    if len(entry.target) > FIELD:
        records += _record(b"linkpath", entry.target)
    if not records:
        return _block_of(entry)
    records = _record(b"hdrcharset", b"BINARY") + records
    return _block_of(Entry(b"long", _LONG_NAME, size=len(records))) + records + bytes(-len(records) % _BLOCK) + _block_of(entry)


def _record(key: bytes, value: bytes) -> bytes:
    """Returns a pax record, which starts with its own length."""
    length = rest = len(key) + len(value) + 3
    while length != rest + len(str(length)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _block_of(entry: Entry) -> bytes:
    before = b"%s%07o\0%s%011o\0%011o\0" % (entry.name[:FIELD].ljust(FIELD, b"\0"), entry.mode, _OWNERS, entry.size, entry.mtime)
    after = b"%s%s%s" % (entry.kind, entry.target[:FIELD].ljust(FIELD, b"\0"), _MAGIC)
    total = sum(before) + sum(after) + 8 * 32  # the checksum field counts as blanks
    return (b"%s%06o\0 %s" % (before, total, after)).ljust(_BLOCK, b"\0")


class ArchiveReader:
    """Reads an archive from a stream. Raises `Refused` for headers and entries of kinds that `ArchiveWriter` does not write."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.ahead, self.at = b"", 0  # bytes read from the source, and the position in them
        self.left = 0  # of the current entry's content
        self.padding = 0

    def next(self) -> Entry | None:
        """Returns the next entry, whose content `read` then returns; None at the end of the archive."""
        while self.left:
            self.read(READ_BYTES)
        self._exactly(self.padding)
        self.padding = 0
        names: dict[bytes, bytes] = {}
        entry = self._header()
        if entry is not None and entry.kind == _LONG_NAME:
            names = self._long_names(entry.size)
            entry = self._header()
            if entry is None:
                raise _invalid("it ends before an entry")
        if entry is None:
            return None
        entry.name, entry.target = names.get(b"path", entry.name), names.get(b"linkpath", entry.target)
        if b"\0" in entry.name or b"\0" in entry.target:
            raise _invalid("a zero byte in a name")
        if max(entry.size, entry.mtime) > MAX_SIZE:
            raise _invalid("a number that is too long")
        if entry.kind not in (FILE, HARD_LINK, LINK, FOLDER_ENTRY):
            raise _invalid(f"an entry of kind {entry.kind!r}")
        if entry.size and entry.kind != FILE:
            raise _invalid("content of an entry that is not a file")
        self.left, self.padding = entry.size, -entry.size % _BLOCK
        return entry

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes of the entry's content; empty at the end of the content."""
        data = self._exactly(min(size, self.left))
        self.left -= len(data)
        return data

    def _exactly(self, size: int) -> bytes:
        while len(self.ahead) - self.at < size:
            more = self.source.read(READ_BYTES)
            if not more:
                raise _invalid("it ends early")
            self.ahead, self.at = self.ahead[self.at :] + more, 0
        self.at += size
        return self.ahead[self.at - size : self.at]

    def _header(self) -> Entry | None:
        """Returns the entry in the next block; None for the block of zeros at the end of the archive."""
        data = self._exactly(_BLOCK)
        if data == bytes(_BLOCK):
            return None
        if sum(data[:148]) + sum(data[156:]) + 8 * 32 != _octal(data[148:156]) or data[257:265] != _MAGIC:
            raise _invalid("a block that is not a header")
        name, target = data[:100].partition(b"\0")[0], data[157:257].partition(b"\0")[0]
        return Entry(name, data[156:157], _octal(data[100:108]), _octal(data[136:148]), _octal(data[124:136]), target)

    def _long_names(self, size: int) -> dict[bytes, bytes]:
        if size > _MAX_LONG_NAMES:
            raise _invalid("a name that is too long")
        data = self._exactly(size)
        self._exactly(-size % _BLOCK)
        records: dict[bytes, bytes] = {}
        while data:
            digits, _, _ = data[:8].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            key, equals, value = data[len(digits) + 1 : max(length - 1, 0)].partition(b"=")
            if not equals or length > len(data) or data[length - 1 : length] != b"\n":
                raise _invalid("a malformed record of a name")
            records[key] = value
            data = data[length:]
        return records


def _octal(field: bytes) -> int:
    digits = field.rstrip(b"\0 ")
    if digits and not (digits.isdigit() and max(digits) < 56):
        raise _invalid("a malformed number")
    return int(digits or b"0", 8)


def _invalid(reason: str) -> Refused:
    return Refused("refused", f"not an archive of a working directory: {reason}")
