"""Messages between a driver and a cell, exchanged before a connection carries the bytes of one exec server.

- First, the cell sends 32 random bytes.
- Then the driver sends 32 random bytes, the HMAC-SHA256 of "driver" and both values under the key, and a request.
- Finally, the cell sends the HMAC-SHA256 of "cell" and both values under the key, and a reply.

Each side proves that it has the key without sending the key. Requests and replies are JSON objects of at most 64 KiB, each preceded by its
length. The connection is not encrypted: use a private network.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError, UserError
from agentrl.records import SandboxSpec, codec
from agentrl.records.fields import Record
from agentrl.sandbox import server_code

PORT = 7423
NONCE_BYTES = PROOF_BYTES = 32
MAX_MESSAGE = 64 << 10
MAX_PROGRAM = 1 << 20
"""Maximum size of a replacement for the exec server. Only the attack suite sends one."""
SHORTEST_KEY = 16
"""Minimum number of characters of a key."""
_LENGTH = struct.Struct("!I")
_SILENCE_S = 30
"""After this time without any packet from the other machine, the kernel closes a connection on either side."""

Message = Mapping[str, Any]


class CellProtocolError(SandboxError):
    """The other end does not have the key or does not use this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest(Record):
    """A driver's request for a sandbox."""

    code: str  # `code_version` of the driver
    spec: SandboxSpec  # `image` is the key of a stored image
    program_bytes: int = 0  # size of the replacement for the exec server that follows the request

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.program_bytes <= MAX_PROGRAM:
            raise ValueError(f"program_bytes must be from 0 to {MAX_PROGRAM}")

    @classmethod
    def parse(cls, message: Message) -> OpenRequest:
        """Returns the request in a message. Raises `ValueError` if the message is not a valid request."""
        return codec.from_json(cls, json.dumps(message))


def parse_address(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Returns (host, port) from `HOST:PORT`, in which an IPv6 address may be in brackets. Raises `UserError` if the text does not have this
    form, or if the port is not from `least_port` to 65535."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not least_port <= int(port) < 65536:
        raise UserError(f"{text[:100]!r} is not the address of a cell", fix=f"use HOST:PORT, such as cells:{PORT}")
    return host, int(port)


def code_version() -> str:
    """Returns the hash of the exec server's code, which must be the same in the driver and in the cell."""
    return hashlib.sha256(server_code.source().encode()).hexdigest()


def prepare_socket(sock: socket.socket) -> None:
    """Sets socket options: the kernel closes the connection if the other machine is lost, and sends small messages without delay."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _SILENCE_S // 3),
        (socket.TCP_KEEPINTVL, _SILENCE_S // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Returns the next `size` bytes and reads no more. Raises `CellProtocolError` if the connection is closed earlier."""
    data = b""
    while len(data) < size:
        piece = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not piece:
            raise CellProtocolError("the connection ended")
        data += piece
    return data


async def receive(sock: socket.socket) -> dict[str, Any]:
    """Returns the next message. Raises `CellProtocolError` if the message is invalid or the connection is closed. The caller sets the
    deadline."""
    (size,) = _LENGTH.unpack(await receive_exactly(sock, _LENGTH.size))
    if size > MAX_MESSAGE:
        raise CellProtocolError(f"a message has {size} bytes; at most {MAX_MESSAGE} are allowed")
    try:
        message = json.loads(await receive_exactly(sock, size))
    except (ValueError, RecursionError):
        raise CellProtocolError("a message is not JSON") from None
    if type(message) is not dict:
        raise CellProtocolError("a message is not a JSON object")
    return message


def packed(message: Message) -> bytes:
    """Returns the bytes of a message. Raises `SandboxError` if the message is too large."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE:
        raise SandboxError(f"a request to a cell has {len(data)} bytes; at most {MAX_MESSAGE} are allowed")
    return _LENGTH.pack(len(data)) + data


async def admit(sock: socket.socket, key: bytes) -> tuple[dict[str, Any], bytes]:
    """In the cell: returns (request of a driver that has the key, proof for the reply). Raises `CellProtocolError` if the driver does not
    have the key, sends an invalid request, or closes the connection. The caller sets the deadline."""
    own = secrets.token_bytes(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(sock, own)
    other = await receive_exactly(sock, NONCE_BYTES)
    proof = await receive_exactly(sock, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"driver", own, other)):
        raise CellProtocolError("the other end does not have the key")
    return await receive(sock), _proof(key, b"cell", own, other)


async def greeting(sock: socket.socket) -> bytes:
    """In the driver: returns the cell's random bytes, which arrive before the driver sends a request. The caller sets the deadline."""
    return await receive_exactly(sock, NONCE_BYTES)


async def request(sock: socket.socket, key: bytes, other: bytes, message: Message, body: bytes = b"") -> dict[str, Any]:
    """In the driver: sends a request after the cell's greeting `other`, and returns the reply.

    Raises `CellProtocolError` if the cell closes the connection, does not have the key, or sends an invalid reply, `SandboxError` if the
    message is too large, and `OSError` if the connection is lost.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(sock, own + _proof(key, b"driver", other, own) + packed(message) + body)
    try:
        proof = await receive_exactly(sock, PROOF_BYTES)
    except (ConnectionError, CellProtocolError):
        raise CellProtocolError("the cell closed the connection: it has a different key, or has stopped") from None
    if not hmac.compare_digest(proof, _proof(key, b"cell", other, own)):
        raise CellProtocolError("the cell does not have the key")
    return await receive(sock)


def _proof(key: bytes, side: bytes, of_cell: bytes, of_driver: bytes) -> bytes:
    return hmac.digest(key, side + of_cell + of_driver, hashlib.sha256)
