"""Frames to and from the host: `!II` = length of a JSON header and of a body, then both."""

from __future__ import annotations

import io
import json
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: each import costs every sandbox its start-up time
    from typing import Any, Protocol

    Request = dict[str, Any]
    Answer = tuple[dict[str, Any], bytes]

    class Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...


PREFIX = struct.Struct("!II")
MAX_HEADER = 4 << 20
READ_BYTES = 1 << 20


class Refused(Exception):
    """A request that cannot be done; `kind` is not_found, too_large, refused or busy."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Link:
    """The connection to the host."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; ends the process when the host has hung up."""
        parts = []
        while size:
            try:
                data = self.sock.recv(min(size, READ_BYTES))
            except ConnectionError:
                data = b""
            if not data:
                os._exit(0)
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def request(self) -> Request:
        """Next header; its body of `header["body"]` bytes is still to be read."""
        header_size, body_size = PREFIX.unpack(self.read(PREFIX.size))
        if header_size > MAX_HEADER:
            os._exit(1)
        header: Request = json.loads(self.read(header_size))
        header["body"] = body_size
        return header

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        try:
            self.sock.sendall(frame(header, body))
        except OSError:
            os._exit(0)


def frame(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), len(body)) + text + body


class Body(io.RawIOBase):
    """A request body read as a stream, never whole: the memory limit of a sandbox may be smaller than what is sent in."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.left = link, size

    def read(self, size: int = -1, /) -> bytes:
        data = self.link.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(data)
        return data

    def drain(self) -> None:
        while self.left:
            self.read(READ_BYTES)


class Sink(io.RawIOBase):
    """File object that sends what is written to it to the host, a frame at a time, up to a limit."""

    def __init__(self, link: Link, number: int, limit: int, too_large: str) -> None:
        self.link, self.number, self.left, self.too_large = link, number, limit, too_large

    def room_for(self, size: int) -> None:
        if size > self.left:
            raise Refused("too_large", self.too_large)

    def write(self, data: Any, /) -> int:
        self.room_for(len(data))
        self.left -= len(data)
        if data:
            self.link.send({"id": self.number, "ok": True, "more": True}, bytes(data))
        return len(data)
