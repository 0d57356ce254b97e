"""Archives of the working directory: tar in its simplest form (POSIX.1-1988 headers, pax records for long names), written and read
as a stream. Regular files, folders, links as links, and several names of one file as such; what else lies there is left out.

Modules of the standard library do this too; but importing `tarfile` alone takes longer than most archives do, and it is built to be
lenient. What is read here is hostile: anything else than what is written here is refused.
"""

from __future__ import annotations

from agentrl.sandbox.inside.wire import READ_BYTES, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Readable, Sink


BLOCK = 512
FIELD = 100
"""Bytes that a header has for a name, and for what a link leads to."""
MOST_SIZE = 0o77777777777
LONG_NAME, FILE, HARD_LINK, LINK, FOLDER_ENTRY = b"x", b"0", b"1", b"2", b"5"
MAX_LONG_NAMES = 1 << 16
"""Bytes of pax records before one entry: a path of the deepest folder, with the longest names, and a link's target."""
END = bytes(BLOCK)
OWNERS = b"0000000\0" * 2
MAGIC = b"ustar\00000"


class Entry:
    """One entry: name, kind, permission bits, seconds since 1970, bytes of content, and where a link leads."""

    def __init__(self, name: bytes, kind: bytes, mode: int = 0o777, mtime: int = 0, size: int = 0, target: bytes = b"") -> None:
        self.name, self.kind, self.mode, self.mtime, self.size, self.target = name, kind, mode, mtime, size, target


# Writing --------------------------------------------------------------------------------------------------------------


class ArchiveOut:
    """An archive on its way to the host, in pieces of `READ_BYTES`. Raises `Refused` when it becomes larger than `sink` takes."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.waiting = bytearray()

    def room_for(self, size: int) -> None:
        """Raises `Refused` when that much more cannot be sent, before any of it is read."""
        self.sink.room_for(min(size, MOST_SIZE) + len(self.waiting))

    def begin(self, entry: Entry) -> None:
        self.waiting += header_of(entry)
        self.pass_on()

    def add(self, data: bytes) -> None:
        self.waiting += data
        self.pass_on()

    def fill(self, size: int) -> None:
        """Ends a content of `size` bytes on a whole block."""
        self.waiting += bytes(-size % BLOCK)

    def pass_on(self) -> None:
        if len(self.waiting) >= READ_BYTES:
            self.sink.write(self.waiting)
            self.waiting.clear()

    def last(self) -> bytes:
        """The end of the archive, which is still to be sent."""
        self.waiting += bytes(2 * BLOCK)
        self.sink.room_for(len(self.waiting))
        return bytes(self.waiting)


def header_of(entry: Entry) -> bytes:
    """The blocks before an entry's content."""
    records = b""
    if len(entry.name) > FIELD:
        records += record(b"path", entry.name)
    if len(entry.target) > FIELD:
        records += record(b"linkpath", entry.target)
    if not records:
        return block_of(entry)
    records = record(b"hdrcharset", b"BINARY") + records
    return block_of(Entry(b"long", LONG_NAME, size=len(records))) + records + bytes(-len(records) % BLOCK) + block_of(entry)


def record(key: bytes, value: bytes) -> bytes:
    """A pax record, which begins with its own length."""
    length = rest = len(key) + len(value) + 3
    while length != rest + len(str(length)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def block_of(entry: Entry) -> bytes:
    before = b"%s%07o\0%s%011o\0%011o\0" % (entry.name[:FIELD].ljust(FIELD, b"\0"), entry.mode, OWNERS, entry.size, entry.mtime)
    after = b"%s%s%s" % (entry.kind, entry.target[:FIELD].ljust(FIELD, b"\0"), MAGIC)
    total = sum(before) + sum(after) + 8 * 32  # the checksum itself counts as blanks
    return (b"%s%06o\0 %s" % (before, total, after)).ljust(BLOCK, b"\0")


# Reading --------------------------------------------------------------------------------------------------------------


class ArchiveIn:
    """The entries of an archive as a stream. Raises `Refused` for what is no archive of ours."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.ahead, self.at = b"", 0  # read already, in large pieces, and how far it is used up
        self.left = 0  # of the content of the entry in hand
        self.padding = 0

    def next(self) -> Entry | None:
        """The entry after this one, whose content `read` then gives; None at the end."""
        while self.left:
            self.read(READ_BYTES)
        self.exactly(self.padding)
        self.padding = 0
        names: dict[bytes, bytes] = {}
        entry = self.block()
        if entry is not None and entry.kind == LONG_NAME:
            names = self.long_names(entry.size)
            entry = self.block()
        if entry is None:
            if names:
                raise wrong("it ends before an entry")
            return None
        entry.name, entry.target = names.get(b"path", entry.name), names.get(b"linkpath", entry.target)
        if b"\0" in entry.name or b"\0" in entry.target:
            raise wrong("a zero byte in a name")
        if max(entry.size, entry.mtime) > MOST_SIZE:
            raise wrong("a number longer than they are written")
        if entry.kind not in (FILE, HARD_LINK, LINK, FOLDER_ENTRY):
            raise wrong(f"an entry of kind {entry.kind!r}")
        if entry.size and entry.kind != FILE:
            raise wrong("content of what is no file")
        self.left, self.padding = entry.size, -entry.size % BLOCK
        return entry

    def read(self, size: int) -> bytes:
        """The next bytes of the entry's content, `size` at most; nothing behind the last one."""
        data = self.exactly(min(size, self.left))
        self.left -= len(data)
        return data

    def exactly(self, size: int) -> bytes:
        while len(self.ahead) - self.at < size:
            more = self.source.read(READ_BYTES)
            if not more:
                raise wrong("it ends early")
            self.ahead, self.at = self.ahead[self.at :] + more, 0
        self.at += size
        return self.ahead[self.at - size : self.at]

    def block(self) -> Entry | None:
        """An entry as its block has it; None for the block of zeros at the end."""
        data = self.exactly(BLOCK)
        if data == END:
            return None
        if sum(data[:148]) + sum(data[156:]) + 8 * 32 != octal(data[148:156]) or data[257:265] != MAGIC:
            raise wrong("a block that is no header")
        return Entry(
            upto_zero(data[:100]), data[156:157], octal(data[100:108]), octal(data[136:148]), octal(data[124:136]), upto_zero(data[157:257])
        )

    def long_names(self, size: int) -> dict[bytes, bytes]:
        if size > MAX_LONG_NAMES:
            raise wrong("a name without end")
        data = self.exactly(size)
        self.exactly(-size % BLOCK)
        found: dict[bytes, bytes] = {}
        while data:
            digits, _, _ = data[:8].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            key, equals, value = data[len(digits) + 1 : max(length - 1, 0)].partition(b"=")
            if not equals or length > len(data) or data[length - 1 : length] != b"\n":
                raise wrong("a name that is not written as one")
            found[key] = value
            data = data[length:]
        return found


def octal(field: bytes) -> int:
    digits = field.rstrip(b"\0 ")
    if digits and not (digits.isdigit() and max(digits) < 56):
        raise wrong("a number that is none")
    return int(digits or b"0", 8)


def upto_zero(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def wrong(why: str) -> Refused:
    return Refused("refused", f"not an archive of a working directory: {why}")
