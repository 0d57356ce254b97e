"""The HTTP server of `agentrl view` for static pages, JSON and a stream of changes. By default it listens on the loopback interface.

The address that the command prints contains a random token. The page stores the token for its origin and sends it with every request as
`Authorization: Bearer TOKEN`. No cookie is used, because browsers send cookies to all ports of a host, including servers of other users.
The content security policy forbids scripts and requests from any other origin.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from agentrl.base.secrets import register
from agentrl.base.user_code import log_unexpected
from agentrl.errors import StoreError, UserError
from agentrl.gateway.checks import known_fields, mapping
from agentrl.gateway.connections import HALF_CLOSED
from agentrl.gateway.http_server import HttpServer
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import Identified, RequestSlots, body_of, check_source, is_key, key_of
from agentrl.observe.markup import COMPONENTS
from agentrl.view.live import MAX_STREAMS, Live
from agentrl.view.routes import ROUTES, Query, read_route
from agentrl.view.source import Missing

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentrl.view.library import RunLibrary

AT_ONCE, WAITING = 2, 64
"""Maximum number of requests that read runs at the same time, and maximum number of requests in progress."""
ANSWER_S = 60.0
BODY_S = 10.0
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_FOLDERS = (files("agentrl.view") / "static", COMPONENTS)
STATIC_FILES = {
    entry.name: entry.read_bytes() for folder in _FOLDERS for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES
}
"""The files of the pages, which are included in the wheel: plain JavaScript modules and CSS. They load nothing from other servers."""
_STATUS = {"wrong_key": 401, "wrong_host": 403, "not_found": 404, "too_large": 413, "encoding": 415, "too_many": 429}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(slots=True, kw_only=True, eq=False)
class ViewServer:
    """Serves pages that show the runs of a library, from `start` to `stop`.

    Args:
        port: 0 means any free port.
        user: the name under which operations are recorded.
        read_only: rejects the operations that change a run.
    """

    library: RunLibrary
    host: str = "127.0.0.1"
    port: int = 0
    user: str = "unknown"
    read_only: bool = False
    token: str = field(default_factory=lambda: register(secrets.token_urlsafe(32)))
    _server: HttpServer | None = None
    _live: Live | None = None
    _slots: RequestSlots = field(default_factory=RequestSlots)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    @property
    def url(self) -> str:
        """The address of the started server, with its token. Raises `RuntimeError` if the server is not started."""
        if self._server is None:
            raise RuntimeError("the view is not started")
        return f"{self._server.url}/?token={self.token}"

    async def start(self) -> None:
        """Listens and serves. Raises `InfrastructureError` if the address is not available."""
        self._live = Live(self.library)
        server = HttpServer(app=self.app(), name="view", host=self.host, port=self.port, connections=2 * MAX_STREAMS + WAITING)
        await server.start()
        self._server, self.port = server, server.port

    async def wait(self) -> None:
        """Waits until the server exits without a call of `stop`, and raises its error."""
        if self._server is not None:
            await self._server.wait()

    async def stop(self) -> None:
        """Stops serving, and closes the stores and indexes that the view has opened to read runs. The runs are not stopped."""
        server, self._server = self._server, None
        if self._live is not None:
            self._live.stop()
        if server is not None:
            await server.stop()
        self.library.close()

    def app(self) -> Any:
        """Returns the ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/", _static("index.html"), methods=["GET"])]
        routes += [Route(f"/static/{name}", _static(name), methods=["GET"]) for name in STATIC_FILES]
        routes += [Route(f"/api/{path}", self._guarded(self._reader(path)), methods=["GET"]) for path in ROUTES]
        routes += [
            Route("/api/runs/{run}/live", self._guarded(self._stream), methods=["GET"]),
            Route("/api/runs/{run}/operations/{operation}", self._guarded(self._operate), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
        app.router.redirect_slashes = False
        return Identified(app)

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        """Returns a handler that requires the token and reports errors as JSON."""

        async def guarded(request: Request) -> Response:
            try:
                check_source(request.headers)
                if not is_key(key_of(request.headers), self.token):
                    raise RequestError("wrong_key", "The token is missing or wrong. Open the address that agentrl view printed.")
                async with self._slots.use(most=WAITING, within_s=ANSWER_S):
                    return _protected(await answer(request))
            except RequestError as refused:
                return _refusal(refused.message, _STATUS.get(refused.kind, 400))
            except Missing as error:
                return _refusal(error.message, 404, error.fix)
            except (UserError, StoreError) as error:
                return _refusal(*_message_and_fix(error))
            except TimeoutError:
                return _refusal("The answer took too long.", 503, "wait, then load the page again")
            except Exception as error:
                log_unexpected("a request to the view", error)
                return _refusal("The server failed to answer. Its terminal shows the reason.", 500, "load the page again")

        return guarded

    def _reader(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        read = ROUTES[path]

        async def answer(request: Request) -> Response:
            query = Query(dict(request.path_params), request.query_params.multi_items())
            return json_response(await self._in_thread(lambda: read_route(self.library, read, query)))

        return answer

    async def _stream(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        assert self._live is not None, "the server is started"
        if self._live.streams >= MAX_STREAMS:
            raise RequestError("too_many", f"At most {MAX_STREAMS} pages are updated live. Close some of these pages.")
        if self.library.open(request.path_params["run"]) is None:
            raise Missing("there is no such run", fix="return to the list of runs")
        events = self._live.events(request.path_params["run"], is_closed=lambda: bool(request.scope.get(HALF_CLOSED)))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _operate(self, request: Request) -> Response:
        from agentrl.view.operations import OPERATIONS

        operation, origin = OPERATIONS.get(request.path_params["operation"]), request.headers.get("origin")
        if operation is None:
            raise RequestError("not_found", "There is no such operation.")
        if origin is None or origin.partition("://")[2] != request.headers.get("host"):
            raise RequestError("wrong_host", "An operation must come from a page of this server.")
        if self.read_only:
            raise UserError("this view is read-only", fix="start it without --read-only, or use the command line")
        body = known_fields(mapping(await body_of(request, BODY_S), "the body"), operation.fields)
        source = self.library.open(request.path_params["run"])
        if source is None:
            raise Missing("there is no such run", fix="return to the list of runs")
        return json_response(await self._in_thread(lambda: operation.run(source, body, self.user)))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        async with self._turns:
            return await asyncio.to_thread(work)


def json_response(body: Any) -> Response:
    """Returns a JSON response. NaN and infinities, which browsers cannot read, become null, and half surrogate pairs become `?`."""
    from starlette.responses import Response

    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(body), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _static(name: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        from starlette.responses import Response

        return _protected(Response(STATIC_FILES[name], media_type=_TYPES[name.rpartition(".")[2]]))

    return answer


def _protected(response: Response) -> Response:
    response.headers.update(HEADERS)
    return response


def _message_and_fix(error: UserError | StoreError) -> tuple[str, int, str]:
    if isinstance(error, UserError):
        return error.message[:2000], 422, error.fix[:500]
    message, _, fix = str(error)[:2000].partition("\n  fix: ")
    return message, 409, fix


def _refusal(message: str, status: int, fix: str = "") -> Response:
    from starlette.responses import Response

    body = json.dumps({"error": {"message": message, "fix": fix}}, ensure_ascii=False).encode("utf-8", "replace")
    return _protected(Response(body, status, media_type="application/json"))


async def _no_route(request: Request, error: Exception) -> Response:
    return _refusal("There is no such page.", 404)
