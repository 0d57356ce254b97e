"""Serves the chunks of a host's mirror to other mirrors, even while chunks are still arriving."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentrl.cluster.mirror import Mirror
from agentrl.cluster.run_service import bytes_response
from agentrl.gateway.http_server import HttpServer
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import check_source, is_key, json_response, key_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

WAIT_S = 8.0
"""Seconds to wait for a chunk that is arriving. Shorter than the deadline of the requesting mirror."""
_POLL_S = 0.01
_CONNECTIONS = 256
_READS = 8


@asynccontextmanager
async def relaying(mirror: Mirror, *, host: str) -> AsyncIterator[None]:
    """Serves the chunks of a mirror at an address of this host during the block, and adds the mirror to the driver's chains."""
    key, reads = secrets.token_urlsafe(32), asyncio.Semaphore(_READS)

    async def chunk(request: Request) -> Response:
        try:
            check_source(request.headers)
            if not is_key(key_of(request.headers), key):
                raise RequestError("wrong_key", "the key is missing or wrong")
        except RequestError as refused:
            return json_response({"error": refused.message}, refused.status)
        sha256, waited = request.path_params["sha256"], 0.0
        while not mirror.index.has(sha256) and sha256 in mirror.expected and waited < WAIT_S:
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S
        async with reads:
            data = await asyncio.to_thread(mirror.index.read, sha256)
        if data is None:
            return json_response({"error": "this host does not have the chunk"}, 404)
        return bytes_response(data, kind="application/octet-stream")

    server = HttpServer(app=_app(chunk), name="relay of a mirror", host=host, connections=_CONNECTIONS)
    await server.start()
    mirror.relay = server.url, key
    try:
        yield
    finally:
        mirror.relay = None
        await server.stop()


def _app(chunk: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Route

    return Starlette(routes=[Route("/chunks/{sha256}", chunk, methods=["GET"])])
