"""Archives of the working directory: simple tar (POSIX.1-1988 headers, pax records for long names), written and read as a stream.

They contain regular files, folders, links and hard links. The standard library's `tarfile` takes longer to import than most archives
take to write, and is lenient by design. What is read here is hostile: anything that this module does not write is rejected.
"""

from __future__ import annotations

from agentrl.sandbox.inside.wire import READ_BYTES, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Readable, Sink

FIELD = 100
"""Bytes of a header for a name, and for a link's target."""
MAX_SIZE = 0o77777777777
FILE, HARD_LINK, LINK, FOLDER_ENTRY = b"0", b"1", b"2", b"5"
_LONG_NAME = b"x"
_BLOCK = 512
_MAX_LONG_NAMES = 1 << 16  # bytes of pax records: a path of the maximum depth with the longest names, and a link's target
_OWNERS = b"0000000\0" * 2
_MAGIC = b"ustar\00000"


class Entry:
    """An entry: name, kind, permission bits, seconds since 1970, bytes of content, and a link's target."""

    def __init__(self, name: bytes, kind: bytes, mode: int = 0o777, mtime: int = 0, size: int = 0, target: bytes = b"") -> None:
        self.name, self.kind, self.mode, self.mtime, self.size, self.target = name, kind, mode, mtime, size, target


class ArchiveWriter:
    """Sends an archive to the host in pieces of `READ_BYTES`. Raises `Refused` if it becomes larger than `sink` allows."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.buffer = bytearray()

    def room_for(self, size: int) -> None:
        """Raises `Refused` if `size` more bytes do not fit, before any of them is read."""
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
        """Pads a content of `size` bytes to whole blocks."""
        self.buffer += bytes(-size % _BLOCK)

    def last(self) -> bytes:
        """The end of the archive, which the caller sends."""
        self.buffer += bytes(2 * _BLOCK)
        self.sink.room_for(len(self.buffer))
        return bytes(self.buffer)


def header_of(entry: Entry) -> bytes:
    """The blocks before an entry's content."""
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
    """A pax record, which starts with its own length."""
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
    """Reads an archive from a stream. Raises `Refused` for anything that `ArchiveWriter` does not write."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.ahead, self.at = b"", 0  # bytes read from the source, and the position in them
        self.left = 0  # of the current entry's content
        self.padding = 0

    def next(self) -> Entry | None:
        """The next entry, whose content `read` then returns. None at the end."""
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
        """Up to `size` bytes of the entry's content; none at its end."""
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
        """The entry in the next block. None for the block of zeros at the end."""
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
