"""The gateway's HTTP server: keys, bounds, and one route for each call of each protocol. Loopback by default.

One key is one session. Whatever comes in is answered in the protocol's own words, is counted, and stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from agentrl import usercode
from agentrl.errors import InfrastructureError
from agentrl.gateway import anthropic_messages, chat_completions, responses
from agentrl.gateway.asked import MAX_BODY, Answer, Asked, Refused, read_json
from agentrl.gateway.connections import bounded
from agentrl.gateway.rewards import REWARDS
from agentrl.gateway.session import Session

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_CONNECTIONS = 8192
"""Of all programs together; the proxy of a sandbox allows 16."""
REMEMBERED = 4096
"""Keys of ended sessions, which are told that they have ended; older ones are wrong keys."""
BODY_S = 30.0
START_S = 10.0
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Protocol:
    """How one call is read and answered. `events` gives the name and the data of each event."""

    path: str
    read: Callable[[Any], Asked]
    write: Callable[[Answer, Asked], dict[str, Any]]
    events: Callable[[Answer, Asked], Iterator[tuple[str, Any]]]
    error: Callable[[Refused], dict[str, Any]]


PROTOCOLS = tuple(
    Protocol(path, module.read, module.write, module.events, module.error)
    for path, module in (
        ("/v1/chat/completions", chat_completions),
        ("/v1/messages", anthropic_messages),
        ("/v1/responses", responses),
    )
)


@dataclass(slots=True, eq=False)
class Gateway:
    """Serves sessions on one address, as long as there is one. `counts` are of requests that belong to no session."""

    host: str = HOST
    port: int = 0  # 0: any that is free
    counts: Counter[str] = field(default_factory=Counter)
    _sessions: dict[str, Session] = field(default_factory=dict)  # by the hash of the key
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _server: Server | None = None
    _task: asyncio.Task[None] | None = None
    _address: tuple[str, int] | None = None
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        """Without `/v1`. Raises `RuntimeError` while nothing is served."""
        if self._address is None:
            raise RuntimeError("the gateway serves no session")
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Serves a session, under the key that this gives, until the context ends; then the session is closed.

        Raises `InfrastructureError` when the address cannot be listened at.
        """
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
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            await session.close()
            async with self._changing:
                if not self._sessions:
                    await self._stop()

    async def _start(self) -> None:
        import uvicorn

        listener = _listen(self.host, self.port)
        config = uvicorn.Config(
            self._app(),
            http=bounded(),
            log_level="warning",
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        server = _quiet_server(config)
        self._task = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")
        async with asyncio.timeout(START_S):
            while not server.started:
                if self._task.done():
                    raise InfrastructureError(f"the gateway did not start: {self._task.exception()!r}")
                await asyncio.sleep(0.002)
        self._server, self._address = server, listener.getsockname()[:2]

    async def _stop(self) -> None:
        server, task = self._server, self._task
        self._server = self._task = self._address = None
        if server is None or task is None:
            return
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await task
        if self.counts:
            log.info("gateway: %s", ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route(one.path, self._endpoint(one), methods=["POST"]) for one in PROTOCOLS]
        routes.append(Route("/v1/models", self._models, methods=["GET"]))
        routes.append(Route("/sessions/{session:path}/reward", self._reward, methods=["POST"]))
        return Starlette(routes=routes, exception_handlers={404: self._no_route, 405: self._no_route})

    def _endpoint(self, protocol: Protocol) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            session: Session | None = None
            try:
                session = self._session(request.headers)
                asked = protocol.read(await _body(request))
                return await self._answered(protocol, session, asked, request)
            except Refused as refused:
                if session is None:
                    self.counts[f"refused_{refused.kind}"] += 1
                else:
                    session.refused(refused.kind)
                return _json(protocol.error(refused), refused.status)
            except Exception as error:
                usercode.report("a request to the gateway", error)
                if session is not None:
                    session.request_failed(error)
                return _json(protocol.error(Refused("failed", "Internal error.")), 500)

        return answer

    async def _answered(self, protocol: Protocol, session: Session, asked: Asked, request: Request) -> Response:
        asked = replace(asked, retry=_retries(request.headers))
        gone = asyncio.Event()
        watch = asyncio.create_task(_watch(request, gone))
        try:
            answer, delivered = await session.ask(asked, gone=gone)
        finally:
            watch.cancel()
        if gone.is_set():
            raise Refused("failed", "The client has gone away.")
        delivered()
        if not asked.stream:
            return _json(protocol.write(answer, asked))
        from starlette.responses import Response

        stream = b"".join(_event(name, data) for name, data in protocol.events(answer, asked))
        return Response(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _session(self, headers: Mapping[str, str]) -> Session:
        """Raises `Refused` for a key that is none, or that of a session that has ended."""
        key = _key(headers)
        found = self._sessions.get(_hash(key))
        if found is None:
            if _hash(key) in self._ended:
                raise Refused("ended", "This session has ended.")
            raise Refused("wrong_key", "Incorrect API key provided.")
        return found

    async def _models(self, request: Request) -> Response:
        try:
            session = self._session(request.headers)
        except Refused as refused:
            self.counts[f"refused_{refused.kind}"] += 1
            return _json(chat_completions.error(refused), refused.status)
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "agentrl"} for name in session.models]
        return _json({"object": "list", "data": models})

    async def _reward(self, request: Request) -> Response:
        try:
            REWARDS.check_key(_key(request.headers))
            REWARDS.post(request.path_params["session"], await _body(request))
        except Refused as refused:
            self.counts[f"refused_reward_{refused.kind}"] += 1
            return _json(chat_completions.error(refused), refused.status)
        self.counts["rewards"] += 1
        return _json({"object": "reward"})

    async def _no_route(self, request: Request, error: Exception) -> Response:
        self.counts["refused_not_found"] += 1
        refused = Refused("not_found", f"Invalid URL ({request.method[:16]} {request.url.path[:200]!a})")
        known = anthropic_messages if request.url.path.startswith("/v1/messages") else chat_completions
        return _json(known.error(refused), getattr(error, "status_code", 404))


def _quiet_server(config: Any) -> Server:
    """A uvicorn server that leaves the process's signals to the run."""
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # named, or asyncio leaves Nagle's algorithm on: 40 ms a request
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InfrastructureError(f"the gateway cannot listen at {host}:{port}: {error.strerror or error}") from error
    return listener


async def _body(request: Request) -> Any:
    """The JSON of a request. Raises `Refused` for one that is too long, comes too slowly, or is none."""
    from starlette.requests import ClientDisconnect

    kept, size = [], 0
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_BODY:
        raise Refused("too_large", f"The request has {declared[:20]} bytes; at most {MAX_BODY} are taken.")
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BODY:
                    raise Refused("too_large", f"The request has more than {MAX_BODY} bytes.")
                kept.append(piece)
    except TimeoutError:
        raise Refused("invalid", f"The request did not come within {BODY_S:g} s.") from None
    except ClientDisconnect:
        raise Refused("invalid", "The client has gone away.") from None
    return read_json(b"".join(kept))


async def _watch(request: Request, gone: asyncio.Event) -> None:
    """Sets `gone` when the client closes its connection."""
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            gone.set()
            return


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key else headers.get("x-api-key", "")


def _retries(headers: Mapping[str, str]) -> bool:
    """The SDKs of OpenAI and Anthropic count their attempts in this header."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


def _json(body: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), status, media_type="application/json")


def _event(name: str, data: Any) -> bytes:
    said = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return ((f"event: {name}\n" if name else "") + f"data: {said}\n\n").encode("utf-8", "replace")


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "replace")).hexdigest()
