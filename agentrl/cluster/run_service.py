"""The HTTP server of a run's driver, for the parts of the run: workers, the learner, and hosts with a mirror of the run folder.

Each part has a key, and each route lists the parts that may use it. The server listens on the loopback address or, in a cluster, on the
driver's address. Requests are plain HTTP, so the network between the hosts must be private.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.base.error_text import disk_full_error
from agentrl.errors import AgentRLError
from agentrl.gateway.http_server import HttpServer
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import check_source, json_response, key_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

WORKER, HOST, LEARNER = "worker", "host", "learner"
"""Parts that have a key: a rollout worker, a host with a mirror, the learner of this session."""
LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 16384
_KEYS = "a worker reads it from workers.json in the run folder; the driver passes it to all other parts"
_TEXT = 1000  # characters of an error in a response
_CHECK = "agentrl.check_key"  # key in the scope of a request


class Replaced(AgentRLError):
    """The request comes from an earlier process of a part that the driver restarted."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route: the method, the path, the parts that may use it, and the function that handles requests."""

    method: str
    path: str
    parts: frozenset[str]
    answer: Callable[[Request], Awaitable[Response]]


@dataclass(slots=True, eq=False)
class RunService:
    """Serves routes while `serving` is open.

    Args:
        host: address to listen on.
        port: 0 means any free port.
    """

    routes: list[Route] = field(default_factory=list)
    host: str = LOOPBACK
    port: int = 0
    url: str = ""
    """Base URL for the parts; set while the service is open."""
    _app: Any = None
    _keys: dict[str, str] = field(default_factory=dict, repr=False)  # sha256 of a key -> part
    _replaced: set[str] = field(default_factory=set, repr=False)  # sha256 of keys that are no longer valid

    def add(self, routes: Sequence[Route]) -> None:
        """Adds routes. Also works while the service is listening."""
        self.routes = [*self.routes, *routes]
        if self._app is not None:
            self._app.router.routes.extend(map(self._route, routes))

    def new_key(self, part: str) -> str:
        """Returns a new key for a part. Earlier keys of the part stay valid until `revoke`."""
        key = secrets.token_urlsafe(32)
        self._keys[_digest(key)] = part
        return key

    def revoke(self, part: str) -> None:
        """Invalidates all keys of a part. From now on, requests with these keys receive status 409."""
        revoked = {digest for digest, owner in self._keys.items() if owner == part}
        self._replaced |= revoked
        self._keys = {digest: owner for digest, owner in self._keys.items() if digest not in revoked}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listens for requests during the block. Raises `InfrastructureError` if the address is not available."""
        from starlette.applications import Starlette

        self._app = Starlette(routes=[self._route(route_spec) for route_spec in self.routes])
        server = HttpServer(self._app, "interface for the parts of the run", self.host, self.port, connections=MAX_CONNECTIONS)
        await server.start()
        self.url = server.url
        try:
            yield
        finally:
            self.url, self._app = "", None
            await server.stop()

    def _route(self, route: Route) -> Any:
        from starlette import routing

        return routing.Route(route.path, self._guarded(route), methods=[route.method])

    def _guarded(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler that accepts only parts with a valid key. The response to an invalid request contains the reason. An invalid
        request never ends the run."""

        async def guarded(request: Request) -> Response:
            check = request.scope[_CHECK] = partial(self._check_key, key_of(request.headers), route)
            try:
                check_source(request.headers)
                check()
                return await route.answer(request)
            except RequestError as refused:
                return json_response({"error": refused.message}, refused.status)
            except Replaced as error:
                return json_response({"error": str(error)}, 409)
            except (ValueError, LookupError, TypeError) as error:
                return json_response({"error": f"invalid request: {_text(error)}"}, 400)
            except (AgentRLError, OSError) as error:
                full = disk_full_error(error) is not None
                log.warning("%s %s failed: %s", route.method, route.path, _text(error))
                return json_response({"error": _text(error)}, 507 if full else 500)

        return guarded

    def _check_key(self, key: str, route: Route) -> None:
        digest = _digest(key)
        part = next((owner for known, owner in self._keys.items() if hmac.compare_digest(known, digest)), None)
        if part is None and digest in self._replaced:
            raise Replaced("the driver restarted this part")
        if part is None:
            raise RequestError("wrong_key", f"the key is missing or wrong: {_KEYS}")
        if part not in route.parts:
            raise RequestError("ended", f"a {part} may not use {route.method} {route.path}")


def check_key_again(request: Request) -> None:
    """Raises `Replaced` if the key of a request has been revoked since the request arrived, because a body may take minutes to arrive."""
    request.scope[_CHECK]()


def bytes_response(content: bytes, *, kind: str = "application/json", status: int = 200) -> Response:
    """Returns a response with this content."""
    from starlette.responses import Response

    return Response(content, status, media_type=kind)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _text(error: BaseException) -> str:
    return str(error)[:_TEXT] or type(error).__name__


async def call_once(calls: dict[str, asyncio.Task[Any]], name: str, call: Callable[[], Awaitable[Any]], *, keep: int = 64) -> Any:
    """Returns the result of a call, or raises its error. Calls with the same name are executed only once while `calls` contains the name.

    Args:
        calls: the newest `keep` calls, by name. If a caller is cancelled, the call continues.
    """
    task = calls.get(name)
    if task is None:
        task = calls[name] = asyncio.ensure_future(call())
        for old in list(calls)[: max(0, len(calls) - keep)]:
            if calls[old].done():
                del calls[old]
    return await asyncio.shield(task)
