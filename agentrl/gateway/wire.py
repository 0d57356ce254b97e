"""HTTP details of the gateway: keys, bodies, the check of the Host and Origin headers, and an id for every request."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from agentrl.gateway.connections import HALF_CLOSED
from agentrl.gateway.request import MAX_BODY, RequestError, read_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

REQUEST_ID = "agentrl.request_id"
"""Key under which a request's ASGI scope contains the request's id."""
_ID_HEADERS = (b"x-request-id", b"request-id")  # headers of OpenAI and Anthropic
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 47}  # the `wbits` argument of zlib
_PRIVATE = (".localhost", ".local", ".internal")  # names that are never public
_FIX = {
    "host": "Send requests to the address in OPENAI_BASE_URL or ANTHROPIC_BASE_URL, to another IP address of that machine, or to a local"
    " name: without dots, or ending in .localhost, .local or .internal.",
    "origin": "Send no Origin header, or one with an IP address or a local name.",
}
_AUTHORITY = re.compile(r"(?:https?://)?(\[[0-9A-Fa-f:.]*\]|[^:/@]*)(?::[0-9]*)?")


class Identified:
    """Wraps an ASGI application: adds the request's id to the response, and closes a connection whose client has closed its sending
    side."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope[REQUEST_ID] = f"req_{secrets.token_hex(12)}"

        async def identified(message: Any) -> None:
            if message["type"] == "http.response.start":
                closes = [(b"connection", b"close")] if scope.get(HALF_CLOSED) else []
                ids = [(header, name.encode()) for header in _ID_HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *ids, *closes]}
            await send(message)

        await self._app(scope, receive, identified)


def check_source(headers: Mapping[str, str]) -> None:
    """Raises `RequestError` if the Host or Origin header of a request may contain a public internet name.

    A web page can make its own domain name resolve to this machine (DNS rebinding). Clients must reach the gateway by an IP address, a
    single-label name or a private name.
    """
    for header in ("host", "origin"):
        value = headers.get(header)
        if value is not None and not _is_local(value):
            problem = f"The {header.title()} of this request, {value[:100]!a}, may be a public internet name, which is never accepted."
            raise RequestError("wrong_host", f"{problem} {_FIX[header]}")


def _is_local(authority: str) -> bool:
    match = _AUTHORITY.fullmatch(authority)
    if match is None or (host := match[1].rstrip(".").lower()) == "null":
        return False
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE)
    return True


def key_of(headers: Mapping[str, str]) -> str:
    """Returns the API key of a request; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key else headers.get("x-api-key", "")


def is_key(received: str, key: str) -> bool:
    """Returns whether a request's key is correct. The time of the comparison does not depend on how many characters of the key are
    correct."""
    return hmac.compare_digest(*(sha256(text.encode("utf-8", "replace")).digest() for text in (received, key)))


class RequestSlots:
    """Bounds the number of requests that a server accepts at a time, including waiting requests."""

    def __init__(self) -> None:
        self._used = 0

    @asynccontextmanager
    async def use(self, *, most: int, within_s: float) -> AsyncIterator[None]:
        """Holds one of the `most` slots while the block runs. Raises `RequestError` if `most` slots are taken, and `TimeoutError` in the
        block after `within_s` seconds."""
        if self._used >= most:
            raise RequestError("too_many", "The server is busy: try again in a few seconds.")
        self._used += 1
        try:
            async with asyncio.timeout(within_s):
                yield
        finally:
            self._used -= 1


def is_retry(headers: Mapping[str, str]) -> bool:
    """Returns whether a request is a retry by an OpenAI or Anthropic SDK. These SDKs count their attempts in a header."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


async def body_of(request: Request, within_s: float) -> Any:
    """Returns the JSON value in a request's body. Raises the errors of `bytes_of`, and `RequestError` if the body is not JSON."""
    return read_json(await bytes_of(request, within_s))


async def bytes_of(request: Request, within_s: float, *, most: int = MAX_BODY) -> bytes:
    """Returns the decompressed body of a request. Raises `RequestError` if the body is too long, cannot be decompressed,
    or does not arrive within `within_s` seconds."""
    from starlette.requests import ClientDisconnect

    pieces, size = [], 0
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise RequestError("too_large", f"The request has {declared[:20]} bytes; the maximum is {most}.")
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise RequestError("too_large", f"The request has more than {most} bytes.")
                pieces.append(piece)
    except TimeoutError:
        raise RequestError("invalid", f"The request did not arrive within {within_s:g} s.") from None
    except ClientDisconnect:
        raise RequestError("invalid", "The client has disconnected.") from None
    return _decoded(b"".join(pieces), request.headers.get("content-encoding", ""), most)


def _decoded(content: bytes, encoding: str, most: int) -> bytes:
    """Returns the decompressed body. Raises `RequestError` if the body is invalid or has more than `most` bytes."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return content
    if name not in _ENCODINGS:
        raise RequestError("encoding", f"Content-Encoding {encoding[:100]!a} is not supported: send gzip, deflate, or none.")
    decoder = zlib.decompressobj(_ENCODINGS[name])
    try:
        plain = decoder.decompress(content, most + 1)
    except zlib.error:
        raise RequestError("invalid", f"The body is not valid {name}.") from None
    if len(plain) > most:
        raise RequestError("too_large", f"The request has more than {most} bytes.")
    if not decoder.eof or decoder.unused_data:
        raise RequestError("invalid", f"The body is not exactly one complete {name} stream.")
    return plain


async def watch(request: Request, disconnected: asyncio.Event) -> None:
    """Sets `disconnected` when the client closes its connection or its sending side."""
    while not request.scope.get(HALF_CLOSED):
        if (await request.receive())["type"] == "http.disconnect":
            break
    disconnected.set()


def json_response(body: Any, status: int = 200) -> Response:
    """Returns a response with a JSON body."""
    from starlette.responses import Response

    return Response(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), status, media_type="application/json")


def event_bytes(name: str, data: Any) -> bytes:
    """Returns one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return ((f"event: {name}\n" if name else "") + f"data: {text}\n\n").encode("utf-8", "replace")
