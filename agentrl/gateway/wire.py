"""Requests and answers of the gateway as HTTP: keys, bodies, who may ask from where, and an id for every request."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.gateway.asked import MAX_BODY, Refused, read_json
from agentrl.gateway.connections import HALF_CLOSED

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

REQUEST_ID = "agentrl.request_id"
"""In the scope of a request."""
_ID_HEADERS = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 47}  # how zlib is to take them
_PRIVATE = (".localhost", ".local", ".internal")  # names that are never public
_AUTHORITY = re.compile(r"(?:https?://)?(\[[0-9A-Fa-f:.]*\]|[^:/@]*)(?::[0-9]*)?")


class Identified:
    """An ASGI application whose answers bear the id of their request; a client that has closed its direction gets no second one."""

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
    """Raises `Refused` for a request to a host, or from a web page of a host, that has a name of the public internet.

    A page may have its own name resolve to this machine (DNS rebinding). The gateway is reached at an address, or at a name of one label.
    """
    for header in ("host", "origin"):
        value = headers.get(header)
        if value is not None and not _is_local(value):
            raise Refused("wrong_host", f"The {header.title()} of this request, {value[:100]!a}, is none that the gateway answers.")


def _is_local(authority: str) -> bool:
    found = _AUTHORITY.fullmatch(authority)
    if found is None or (host := found[1].rstrip(".").lower()) == "null":
        return False
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE)
    return True


def key_of(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key else headers.get("x-api-key", "")


def is_retry(headers: Mapping[str, str]) -> bool:
    """The SDKs of OpenAI and Anthropic count their attempts in this header."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


async def body_of(request: Request, within_s: float) -> Any:
    """The JSON of a request. Raises `Refused` for one that is too long, comes too slowly, or is none."""
    from starlette.requests import ClientDisconnect

    kept, size = [], 0
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_BODY:
        raise Refused("too_large", f"The request has {declared[:20]} bytes; at most {MAX_BODY} are taken.")
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BODY:
                    raise Refused("too_large", f"The request has more than {MAX_BODY} bytes.")
                kept.append(piece)
    except TimeoutError:
        raise Refused("invalid", f"The request did not come within {within_s:g} s.") from None
    except ClientDisconnect:
        raise Refused("invalid", "The client has gone away.") from None
    return read_json(_decoded(b"".join(kept), request.headers.get("content-encoding", "")))


def _decoded(content: bytes, encoding: str) -> bytes:
    """A body without its encoding, which may expand to no more than a body may have. Raises `Refused`."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return content
    if name not in _ENCODINGS:
        raise Refused("encoding", f"Content-Encoding {encoding[:100]!a} is not supported: send gzip, deflate, or none.")
    decoder = zlib.decompressobj(_ENCODINGS[name])
    try:
        plain = decoder.decompress(content, MAX_BODY + 1)
    except zlib.error:
        raise Refused("invalid", f"The body is not {name}.") from None
    if len(plain) > MAX_BODY:
        raise Refused("too_large", f"The request has more than {MAX_BODY} bytes.")
    if not decoder.eof or decoder.unused_data:
        raise Refused("invalid", f"The body is not one stream of {name}.")
    return plain


async def watch(request: Request, gone: asyncio.Event) -> None:
    """Sets `gone` when the client closes its connection, or its direction of it."""
    while not request.scope.get(HALF_CLOSED):
        if (await request.receive())["type"] == "http.disconnect":
            break
    gone.set()


def json_response(body: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), status, media_type="application/json")


def event_bytes(name: str, data: Any) -> bytes:
    """One event of a stream."""
    said = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return ((f"event: {name}\n" if name else "") + f"data: {said}\n\n").encode("utf-8", "replace")
