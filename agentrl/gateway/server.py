"""The gateway's HTTP server: keys, bounds, and a route for each operation in each protocol. Listens on the loopback interface by default.

Each session has one key. Every request is counted and receives a response in its protocol's format. No request stops the server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agentrl.base import loop_lag, user_code
from agentrl.base.installation import install_command
from agentrl.errors import UserError
from agentrl.gateway import anthropic_messages, chat_completions, responses
from agentrl.gateway.connections import HALF_CLOSED
from agentrl.gateway.http_server import HttpServer
from agentrl.gateway.request import Answer, CompletionRequest, RequestError
from agentrl.gateway.rewards import POSTED_REWARDS
from agentrl.gateway.session import Session
from agentrl.gateway.wire import REQUEST_ID, Identified, body_of, check_source, event_bytes, is_retry, json_response, key_of, watch

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_CONNECTIONS = 8192
"""Maximum number of connections from all programs together. A sandbox's proxy allows 16."""
MAX_ENDED = 4096
"""Maximum number of remembered keys of ended sessions. Requests with these keys fail with the error "ended". Older keys count as wrong
keys."""
BODY_S = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How requests to one path are parsed and answered. `events` yields the name and the data of each event."""

    path: str
    read: Callable[[Any], CompletionRequest]
    write: Callable[[Answer, CompletionRequest], dict[str, Any]]
    events: Callable[[Answer, CompletionRequest], Iterator[tuple[str, Any]]]


ENDPOINTS = tuple(
    Endpoint(path, module.read, module.write, module.events)
    for path, module in (
        ("/v1/chat/completions", chat_completions),
        ("/v1/messages", anthropic_messages),
        ("/v1/responses", responses),
    )
)


@dataclass(slots=True, eq=False)
class Gateway:
    """Serves sessions on one address as long as at least one session is open. `counts` contains the number of requests of each kind that
    belong to no session."""

    host: str = HOST
    port: int = 0  # 0: any free port
    counts: Counter[str] = field(default_factory=Counter)
    _sessions: dict[str, Session] = field(default_factory=dict)  # hash of the key -> session
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _server: HttpServer | None = None
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        """The URL of the gateway without `/v1`. Raises `RuntimeError` if there is no session."""
        if self._server is None:
            raise RuntimeError("the gateway serves no session")
        return self._server.url

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Yields the session's key, and serves the session until the context exits. Raises `InfrastructureError` if the server cannot
        listen."""
        key = f"sk-agentrl-{secrets.token_urlsafe(32)}"
        async with self._changing:
            if self._server is None:
                await self._start()
            self._sessions[_hash(key)] = session
        try:
            yield key
        finally:
            del self._sessions[_hash(key)]
            self._ended[_hash(key)] = None
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
            await session.close()
            async with self._changing:
                if not self._sessions:
                    await self._stop()

    async def _start(self) -> None:
        server = HttpServer(app=self._app(), name="gateway", host=self.host, port=self.port, connections=MAX_CONNECTIONS)
        await server.start()
        self._server = server

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
            if self.counts:
                log.info("gateway: %s", ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route(each.path, self._endpoint(each), methods=["POST"]) for each in ENDPOINTS]
        routes += [
            Route("/v1/messages/count_tokens", self._guarded(self._count), methods=["POST"]),
            Route("/v1/responses/{name}", self._guarded(self._stored), methods=["GET"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
            Route("/sessions/{session:path}/reward", self._reward, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={404: self._no_route, 405: self._no_route})
        app.router.redirect_slashes = False  # a redirect would use the Host header before a key is checked
        return Identified(app)

    def _endpoint(self, protocol: Endpoint) -> Callable[[Request], Any]:
        async def answer(session: Session, request: Request) -> Response:
            return await self._answered(protocol, session, protocol.read(await body_of(request, BODY_S)), request)

        return self._guarded(answer)

    def _guarded(self, answer: Callable[[Session, Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        """Returns a route that requires the key of a session, and counts rejected requests."""

        async def guarded(request: Request) -> Response:
            session: Session | None = None
            try:
                check_source(request.headers)
                session = self._session(request.headers)
                loop_lag.count_as(session.stalls)  # the default is the episode that started the server
                return await answer(session, request)
            except RequestError as refused:
                if session is None:
                    self.counts[f"refused_{refused.kind}"] += 1
                else:
                    session.refused(refused.kind)
                return _error(refused, request)
            except Exception as error:
                user_code.log_unexpected("a request to the gateway", error)
                if session is not None:
                    session.request_failed(error)
                return _error(RequestError("failed", "Internal error."), request, 500)

        return guarded

    async def _answered(self, protocol: Endpoint, session: Session, completion_request: CompletionRequest, request: Request) -> Response:
        completion_request = replace(completion_request, retry=is_retry(request.headers))
        disconnected = asyncio.Event()
        watching = asyncio.create_task(watch(request, disconnected))
        try:
            answer, delivered = await session.complete(completion_request, disconnected=disconnected)
        finally:
            watching.cancel()
        if disconnected.is_set() and not request.scope.get(HALF_CLOSED):
            raise RequestError("failed", "The client has disconnected.")
        if not disconnected.is_set():
            delivered()
        if completion_request.options.get("stored"):
            session.stored_answers[answer.id] = protocol.write(answer, completion_request)
        if not completion_request.stream:
            return json_response(protocol.write(answer, completion_request))
        from starlette.responses import Response

        stream = b"".join(event_bytes(name, data) for name, data in protocol.events(answer, completion_request))
        return Response(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _session(self, headers: Mapping[str, str]) -> Session:
        """Returns the session to which a request's key belongs. Raises `RequestError` if the session has ended or the key is wrong."""
        key = _hash(key_of(headers))
        if key in self._sessions:
            return self._sessions[key]
        if key in self._ended:
            raise RequestError("ended", "This session has ended.")
        raise RequestError("wrong_key", "Incorrect API key provided.")

    async def _count(self, session: Session, request: Request) -> Response:
        return json_response({"input_tokens": session.count(anthropic_messages.read_count(await body_of(request, BODY_S)))})

    async def _stored(self, session: Session, request: Request) -> Response:
        name = request.path_params["name"]
        stored = session.stored_answers.get(name.removeprefix("resp_"))
        if stored is None:
            raise RequestError("not_found", f"Response with id {name[:100]!a} not found.")
        return json_response(stored)

    async def _models(self, session: Session, request: Request) -> Response:
        return json_response(_protocol(request).models(session.models))

    async def _model(self, session: Session, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in session.models:
            raise RequestError("unknown_model", f"The model {name[:100]!a} does not exist or you do not have access to it.", param="model")
        return json_response(_protocol(request).model(name))

    async def _reward(self, request: Request) -> Response:
        try:
            check_source(request.headers)
            POSTED_REWARDS.check_key(key_of(request.headers))
            POSTED_REWARDS.post(request.path_params["session"], await body_of(request, BODY_S))
        except RequestError as refused:
            self.counts[f"refused_reward_{refused.kind}"] += 1
            return _error(refused, request)
        self.counts["rewards"] += 1
        return json_response({"object": "reward"})

    async def _no_route(self, request: Request, error: Exception) -> Response:
        self.counts["refused_not_found"] += 1
        refused = RequestError("not_found", f"Invalid URL ({request.method[:16]} {request.url.path[:200]!a})")
        return _error(refused, request, getattr(error, "status_code", 404))


def import_server() -> None:
    """Imports the packages that the gateway needs, so that no episode waits for the import. Raises `UserError` if a package is not
    installed."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"the gateway needs {' and '.join(missing)}", fix=install_command("gateway"))
    import starlette.applications  # noqa: F401
    import uvicorn.server  # noqa: F401


def _protocol(request: Request) -> Any:
    """Returns the module for a request's protocol, which formats its errors and serves the routes that OpenAI and Anthropic share."""
    anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return anthropic_messages if anthropic else chat_completions


def _error(refused: RequestError, request: Request, status: int | None = None) -> Response:
    body = _protocol(request).error(refused)
    if "request_id" in body:
        body["request_id"] = request.scope[REQUEST_ID]
    return json_response(body, status or refused.status)


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "replace")).hexdigest()
