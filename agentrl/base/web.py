"""URLs of third-party web servers, and bounded reading of their responses: bodies and server-sent events."""

from __future__ import annotations

import asyncio
import ssl
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.errors import UserError

if TYPE_CHECKING:
    import httpx

_MOST_PIECES = 4096  # maximum number of small pieces in a response
_FULL_PIECE = 64  # a piece of fewer bytes is small
_PIECES_AT_ONCE = 64


def validate_url(url: str) -> str:
    """Returns the URL unchanged. Raises `UserError` if it is not an http(s) URL with a host, or has a user, password, query or fragment."""
    try:
        parts = urlsplit(url)
        is_endpoint = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        is_endpoint = False
    if not is_endpoint or parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            "an endpoint's url must be http(s)://HOST/PATH without a user, a password or a query",
            fix='write a url such as "https://api.example.org/v1", and set key_env to the environment variable that contains the key',
        )
    return url


async def bounded_body(response: httpx.Response, most: int) -> bytes:
    """Reads at most `most + 1` bytes of a response body. The additional byte shows the caller that the body is too large.

    Raises `httpx.RemoteProtocolError` for a response in very many small pieces, because handling a piece takes a fixed time, whatever its
    size.
    """
    import httpx

    parts, size = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > most:
            break
        if len(parts) > _MOST_PIECES + size // _FULL_PIECE:
            raise httpx.RemoteProtocolError(f"the response arrives in pieces of {size // len(parts)} bytes")
        if len(parts) % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)  # buffered pieces are read without waiting; let other tasks run
    return b"".join(parts)[: most + 1]


@cache
def certificates() -> ssl.SSLContext:
    """Returns a TLS context with the system's trusted certificates. The context is cached, because loading the certificates takes longer
    than most calls."""
    return ssl.create_default_context()


class Events:
    """Splits a stream into server-sent events, in time linear in its length, for pieces of any size."""

    def __init__(self) -> None:
        self._incomplete = bytearray()

    @property
    def held(self) -> int:
        """The number of bytes received so far of an event that is not complete."""
        return len(self._incomplete)

    def feed(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the name (`message` if none is given) and the data of each event that ends in this piece. Skips comments."""
        seen = max(0, len(self._incomplete) - 3)
        self._incomplete += piece
        if b"\n\n" not in self._incomplete[seen:].replace(b"\r\n", b"\n"):
            return []
        *events, rest = bytes(self._incomplete).replace(b"\r\n", b"\n").split(b"\n\n")
        self._incomplete = bytearray(rest)
        lines = ([line for line in event.split(b"\n") if line.strip() and not line.startswith(b":")] for event in events)
        return [_event(fields) for fields in lines if fields]


def _event(lines: list[bytes]) -> tuple[bytes, bytes]:
    names = [line[6:].strip() for line in lines if line.startswith(b"event:")]
    return (names or [b"message"])[-1], b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
