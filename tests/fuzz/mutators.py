"""Mutations that keep inputs well-formed, like the inputs of a hostile sender and unlike random noise.

A mutator takes any bytes and a source of randomness, and returns other bytes. It never fails: it returns inputs of an unknown form
unchanged.
"""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

Mutator = Callable[[bytes, Random], bytes]

LARGEST = 1 << 16
"""Bytes of the largest inputs."""
_HOLE = "\ue000hole\ue000"
_DEEPEST = 40  # levels of JSON that are walked; deeper ones are changed as text

ODD_JSON: Sequence[str] = (
    *("null", "true", "false", "0", "-1", "1", "1.0", "-0.0", "1e999", "-1e999", "5e-324", "NaN", "Infinity", "-Infinity"),
    *("2147483648", "4294967296", "9223372036854775808", "18446744073709551616", "-9223372036854775809", "9" * 400, "1" * 5000),
    *(
        '""',
        '"\\ud83d"',
        '"\\udc80"',
        '"\\u0000"',
        '"\\ue000"',
        '"\\u2028"',
        '"<|im_end|>"',
        '"../x"',
        '"a/b"',
        '"/"',
        '"."',
        '"' + "x" * 3000 + '"',
    ),
    *("[]", "{}", "[[]]", '[""]', "[null]", '{"a":1}', '{"":{}}', '{"a":1,"a":2}', '{"\\ud800":1}'),
    *(
        "[" * 60 + "]" * 60,
        "[" * 300 + "]" * 300,
        "[" * 2000 + "]" * 2000,
        '{"a":' * 300 + "1" + "}" * 300,
        '{"a":' * 2000 + "1" + "}" * 2000,
    ),
    *("[" * depth + "]" * depth for depth in range(900, 1000, 5)),  # which Python can just read, but perhaps not print
)
"""JSON values at the limits of what readers accept."""
_ODD_TOML = (
    *(b"0", b"-1", b"1e999", b"nan", b"inf", b"true", b'""', b"[]", b"{}", b'["a"]', b"9223372036854775808", b"1979-05-27", b"9" * 5000),
    *(b'"\\u0000"', b'"\\ud7ff"', b'"../x"', b'"' + b"x" * 3000 + b'"', b"[" * 2000 + b"]" * 2000, b"{a=" * 300 + b"1" + b"}" * 300),
)
_TAR_KINDS = b"0\x001234567LKxgSNDMV\xff"
_TAR_PARTS = ((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (329, 8), (337, 8), (345, 155))


def json_text(data: bytes, chance: Random) -> bytes:
    """JSON with one change: another value, a key removed or renamed, an entry doubled, or a value copied from elsewhere."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    slots: list[tuple[Any, Any]] = []
    _walk(value, slots, 0)
    if not slots:
        return chance.choice(ODD_JSON).encode()
    container, key = chance.choice(slots)
    raw = chance.choice(ODD_JSON)
    kind = chance.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1:
        other, other_key = chance.choice(slots)
        raw = _dump(other[other_key]) if _has(other, other_key) else raw
        container[key] = _HOLE
    elif kind == 2 and isinstance(container, list):
        container[key:key] = [container[key]] * chance.choice((1, 1, 2, 50))
    elif kind == 2 and isinstance(container, dict):
        container[chance.choice((key + "x", "", "\ud800", "id", "__class__"))] = container.pop(key)
    else:
        container[key] = _HOLE
    return _dump(value).replace(json.dumps(_HOLE), raw, 1).encode("utf-8", "surrogatepass")


def _walk(value: Any, slots: list[tuple[Any, Any]], depth: int) -> None:
    if isinstance(value, dict | list) and depth < _DEEPEST:
        for key in value if isinstance(value, dict) else range(min(len(value), 200)):
            slots.append((value, key))
            _walk(value[key], slots, depth + 1)


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return "0"


def json_in(opening: bytes, closing: bytes) -> Mutator:
    """Text with JSON between two marks, as in tool calls."""
    pattern = re.compile(re.escape(opening) + rb"(.*?)" + re.escape(closing), re.DOTALL)

    def mutate(data: bytes, chance: Random) -> bytes:
        matches = list(pattern.finditer(data))
        if not matches or chance.random() < 0.1:
            return splice(data, opening * chance.choice((1, 3)), chance)
        match = chance.choice(matches)
        if chance.random() < 0.1:
            return data[: match.end()] + match[0] + data[match.end() :]
        return data[: match.start(1)] + json_text(match[1], chance) + data[match.end(1) :]

    return mutate


def toml(data: bytes, chance: Random) -> bytes:
    """TOML with one line doubled, dropped, moved, or with another value."""
    rows = data.split(b"\n")
    at = chance.randrange(len(rows))
    name, equals, _ = rows[at].partition(b"=")
    if equals and chance.random() < 0.6:
        rows[at] = name + b"= " + chance.choice(_ODD_TOML)
        return b"\n".join(rows)
    return lines(data, chance)


def lines(data: bytes, chance: Random, end: bytes = b"\n") -> bytes:
    """Text with one line doubled, dropped, moved or joined to the next."""
    rows = data.split(end)
    at, to = chance.randrange(len(rows)), chance.randrange(len(rows))
    kind = chance.randrange(4)
    if kind == 0:
        rows[at:at] = [rows[at]] * chance.choice((1, 1, 2, 100))
    elif kind == 1:
        del rows[at]
    elif kind == 2:
        rows.insert(to, rows.pop(at))
    else:
        rows[at : at + 2] = [b" ".join(rows[at : at + 2])]
    return end.join(rows)


def head_lines(data: bytes, chance: Random) -> bytes:
    """As `lines`, with the line ends of HTTP."""
    return lines(data, chance, b"\r\n")


def tar(data: bytes, chance: Random) -> bytes:
    """A tar archive with one header field changed and its checksum corrected, or one member doubled, dropped or moved."""
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    heads = [at for at, block in enumerate(blocks) if len(block) == 512 and block[257:262] == b"ustar"]
    if not heads:
        return data
    at = chance.choice(heads)
    size = 1 + (_octal(blocks[at][124:136]) + 511) // 512
    member = blocks[at : at + size]
    kind = chance.randrange(6)
    if kind == 0:
        blocks[at:at] = member
    elif kind == 1:
        del blocks[at : at + size]
    elif kind == 2:
        del blocks[at : at + size]
        to = chance.choice(heads)
        blocks[to:to] = member
    else:
        blocks[at] = _changed_head(blocks[at], chance)
    return b"".join(blocks)


def _changed_head(block: bytes, chance: Random) -> bytes:
    start, size = chance.choice(_TAR_PARTS)
    odd = (
        b"../" * 60,
        b"/etc/x",
        b"a/../b",
        b"\xff\xfe",
        b"",
        b"." * 100,
        b"a/" * 60,
        b"7" * 12,
        b"\x80" + b"\xff" * 11,
        b"-1",
        b"link/file",
    )
    text = bytes([chance.choice(_TAR_KINDS)]) if size == 1 else chance.choice(odd)
    filled = block[:start] + text[:size].ljust(size, b"\0") + block[start + size :]
    blank = filled[:148] + b" " * 8 + filled[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def _octal(text: bytes) -> int:
    try:
        return min(int(text.strip(b"\0 ") or b"0", 8), LARGEST)
    except ValueError:
        return 0


def frames(data: bytes, chance: Random) -> bytes:
    """Frames (`!II`, header, body) with one header changed as JSON, one wrong length, or one frame doubled or dropped."""
    parsed: list[tuple[bytes, bytes]] = []
    at = 0
    while at + 8 <= len(data):
        header, body = struct.unpack_from("!II", data, at)
        if at + 8 + header + body > len(data):
            break
        parsed.append((data[at + 8 : at + 8 + header], data[at + 8 + header : at + 8 + header + body]))
        at += 8 + header + body
    if not parsed:
        return data
    index, kind = chance.randrange(len(parsed)), chance.randrange(5)
    if kind == 0:
        parsed.insert(index, parsed[index])
    elif kind == 1:
        del parsed[index]
    elif kind == 2:
        parsed[index] = (parsed[index][0], parsed[index][1][: chance.choice((0, 1, 100))])
    else:
        parsed[index] = (json_text(parsed[index][0], chance), parsed[index][1])
    packed = b"".join(struct.pack("!II", len(header), len(body)) + header + body for header, body in parsed)
    if chance.random() < 0.1:
        field = chance.randrange(2) * 4
        packed = packed[:field] + struct.pack("!I", chance.choice((0, 1, 16384, 16385, 0x7FFFFFFF, 0xFFFFFFFF))) + packed[field + 4 :]
    return packed + data[at:]


def safetensors(data: bytes, chance: Random) -> bytes:
    """A length (`<Q`), JSON and bytes, with the JSON changed and the length right, or wrong."""
    if len(data) < 8:
        return data
    (length,) = struct.unpack_from("<Q", data)
    header, rest = data[8 : 8 + min(length, LARGEST)], data[8 + min(length, LARGEST) :]
    header = json_text(header, chance)
    length = len(header) if chance.random() < 0.9 else chance.choice((0, len(header) - 1, 1 << 32, 1 << 63, (1 << 64) - 1))
    return struct.pack("<Q", max(0, length)) + header + rest


def labelled(kinds: Mapping[str, Mutator | None]) -> Mutator:
    """Inputs whose first line names one of `kinds`: the rest is changed by that kind's mutator, sometimes the line itself."""
    names = list(kinds)

    def mutate(data: bytes, chance: Random) -> bytes:
        label, body = split(data)
        if label not in kinds or chance.random() < 0.02:
            return join(chance.choice(names), body)
        inner = kinds[label]
        return join(label, inner(body, chance) if inner is not None else splice(body, b"", chance))

    return mutate


def split(data: bytes) -> tuple[str, bytes]:
    """(first line, rest) of a labelled input."""
    label, _, body = data.partition(b"\n")
    return label.decode("latin-1"), body


def join(label: str, body: bytes) -> bytes:
    """A labelled input."""
    return label.encode("latin-1") + b"\n" + body


def splice(data: bytes, word: bytes, chance: Random) -> bytes:
    """`word`, or a part of the input, inserted at another position."""
    if not word:
        start = chance.randrange(len(data) + 1)
        word = data[start : start + chance.randrange(1, 64)]
    at = chance.randrange(len(data) + 1)
    return data[:at] + word + data[at:]


def swell(data: bytes, chance: Random) -> bytes:
    """Repeats one part of the input up to the largest size, to reveal work that is not linear."""
    if not data:
        return data
    start = chance.randrange(len(data))
    chunk = data[start : start + chance.choice((1, 2, 3, 7, 11, 12, 24, 64))]
    count = (LARGEST - len(data)) // len(chunk)
    return data[:start] + chunk * max(1, count) + data[start + len(chunk) * chance.randrange(2) :]


def archive(members: Sequence[tuple[str, bytes, bytes]]) -> bytes:
    """A tar archive of (name, type, content or link target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar_file:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                member.linkname = content.decode("utf-8", "surrogateescape")
                tar_file.addfile(member)
            else:
                member.size = len(content)
                tar_file.addfile(member, io.BytesIO(content))
    return out.getvalue().rstrip(b"\0") + bytes(1024)  # two empty blocks end an archive; tarfile's padding would only make inputs large
