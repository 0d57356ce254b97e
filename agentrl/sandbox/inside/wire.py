"""Frames to and from the host. A frame is `!II` (length of a JSON header, length of a body), the header and the body."""

from __future__ import annotations

import json
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time, because each import adds to the start-up time of every sandbox
    from typing import Any, Protocol

    Request = dict[str, Any]
    Answer = tuple[dict[str, Any], bytes]

    class Readable(Protocol):
        """A source of bytes."""

        def read(self, size: int, /) -> bytes:
            """Returns up to `size` bytes; empty at the end."""


PREFIX = struct.Struct("!II")
READ_BYTES = 1 << 20
_MAX_HEADER = 4 << 20


class Refused(Exception):
    """A request that the server refuses; `kind` is not_found, too_large, refused, busy or failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_exactly(fd: int, size: int) -> bytes:
    """Returns the next `size` bytes from a descriptor. Exits this process if the other end, which also belongs to agentrl, has been
    closed."""
    pieces = []
    while size:
        try:
            data = os.read(fd, min(size, READ_BYTES))
        except ConnectionError:
            data = b""
        if not data:
            os._exit(0)
        pieces.append(data)
        size -= len(data)
    return b"".join(pieces)


class Link:
    """The connection to the host. This process exits when the host closes the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self.sock.fileno()

    def read(self, size: int) -> bytes:
        """Returns exactly `size` bytes."""
        return read_exactly(self.sock.fileno(), size)

    def request(self) -> Request:
        """Returns the header of the next request. The body of `header["body"]` bytes must be read afterwards. Exits this process if the
        header is too long."""
        header_size, body_size = PREFIX.unpack(self.read(PREFIX.size))
        if header_size > _MAX_HEADER:
            os._exit(1)
        header: Request = json.loads(self.read(header_size))
        header["body"] = body_size
        return header

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Sends a frame."""
        try:
            self.sock.sendall(frame(header, body))
        except OSError:
            os._exit(0)


def frame(header: dict[str, Any], body: bytes) -> bytes:
    """Returns a frame as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), len(body)) + text + body


class Body:
    """A request body as a stream. The body is read in pieces, because it may be larger than the sandbox's memory."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.left = link, size

    def read(self, size: int = -1, /) -> bytes:
        """Returns up to `size` bytes of the body; by default all remaining bytes."""
        data = self.link.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(data)
        return data

    def drain(self) -> None:
        """Discards the rest."""
        while self.left:
            self.read(READ_BYTES)


class Sink:
    """A stream that sends data to the host, one frame per write. Raises `Refused` if more than `limit` bytes are written."""

    def __init__(self, link: Link, number: int, limit: int, too_large: str) -> None:
        self.link, self.number, self.left, self.too_large = link, number, limit, too_large

    def room_for(self, size: int) -> None:
        """Raises `Refused` if `size` more bytes would exceed the limit."""
        if size > self.left:
            raise Refused("too_large", self.too_large)

    def write(self, data: bytes | bytearray) -> None:
        """Sends `data`, which is not empty."""
        self.room_for(len(data))
        self.left -= len(data)
        self.link.send({"id": self.number, "ok": True, "more": True}, bytes(data))
