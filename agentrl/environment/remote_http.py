"""HTTP requests to an environment's server. The size of responses is limited, redirects are not followed, cookies are not shared, and the
waits that the server requests are observed."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl.base import web
from agentrl.base.backoff import TRANSIENT, backoff_s, requested_wait_s
from agentrl.base.user_code import clean, describe_error
from agentrl.errors import EnvironmentFault
from agentrl.records.fields import MAX_DEPTH
from agentrl.records.fields import text as encodable

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 1 << 20
"""Maximum size of a response, in bytes."""
_ERROR_CHARS = 500
_MOST_TRIES = 20  # attempts at one request that the server postpones
_NOT_BUSY = (409, 500)  # statuses after which a retry would receive the same response


class Busy(EnvironmentFault):
    """The server cannot be reached, or accepts no session at present. `wait_s`: the wait that the server requests. `most`: the server's
    limit on the number of sessions."""

    def __init__(self, text: str, *, wait_s: float | None = None, most: int | None = None) -> None:
        super().__init__(text)
        self.wait_s, self.most = wait_s, most


class Rejected(EnvironmentFault):
    """The server rejected a request because of its content. `text`: the reason, which can be shown to the agent."""

    def __init__(self, message: str, *, status: int, text: str) -> None:
        super().__init__(message)
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response to a request."""

    content: bytes
    cookies: Mapping[str, str]


class HttpClient:
    """Sends requests to one server. The caller sets the deadline of each request.

    The methods that send requests raise `Busy` if the server cannot be reached or postpones the request too often, `Rejected` if the
    server rejects the request, and `EnvironmentFault` for any other error, redirect or invalid response.
    """

    def __init__(self, url: str, what: str, *, connections: int, headers: Mapping[str, str]) -> None:
        self._url, self._what, self._connections = url.rstrip("/"), what, connections
        self._headers = {"accept-encoding": "identity", **headers}  # a small compressed response could expand to gigabytes
        self._client: httpx.AsyncClient | None = None

    async def json(self, method: str, path: str, data: Any = None, *, headers: Mapping[str, str] | None = None) -> Any:
        """Sends a request and returns the parsed JSON of the response."""
        return read_json((await self.request(method, path, data, headers=headers)).content, f"{self._what}, {path},")

    async def request(self, method: str, path: str, data: Any = None, *, headers: Mapping[str, str] | None = None) -> Answer:
        """Sends a request and returns the response, whose status is below 300."""
        async with self._answering(method, path, data, headers) as response:
            content = await self._body(response)
            self._check(response, path, content)
            return Answer(content=content, cookies=_cookies(response))

    async def event_data(self, path: str, data: Any, *, headers: Mapping[str, str] | None = None) -> tuple[str, bytes]:
        """Sends a request whose response is a stream of the events `task_id`, `chunk`, `end` and `error`. Returns the task id (empty
        if there was none) and the joined data of `chunk` and `end`. An event `error` raises `EnvironmentFault`."""
        stream, taken, pieces, task, parts = web.Events(), 0, 0, "", list[bytes]()
        async with self._answering("POST", path, data, {"accept": "text/event-stream", **(headers or {})}) as response:
            if response.status_code >= 300:
                self._check(response, path, await self._body(response))
            async for piece in response.aiter_raw():
                taken, pieces = taken + len(piece), pieces + 1
                if taken > 2 * MAX_BYTES or pieces > 4096 + taken // 64:
                    raise EnvironmentFault(f"{self._what} answered {path} with {taken} bytes in {pieces} pieces, which exceeds the limits")
                for name, content in stream.feed(piece):
                    if name == b"task_id":
                        task = content.decode("ascii", "replace").strip()
                    elif name in (b"chunk", b"end"):
                        parts.append(content)
                    elif name == b"error":
                        raise EnvironmentFault(f"{self._what}, {path}: {clean(content.decode(errors='replace'), _ERROR_CHARS)}")
                    if name == b"end":
                        return task, b"".join(parts)
                await asyncio.sleep(0)
        raise EnvironmentFault(f"{self._what} ended the response to {path} early")

    async def close(self) -> None:
        """Closes the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @asynccontextmanager
    async def _answering(self, method: str, path: str, data: Any, headers: Mapping[str, str] | None) -> AsyncIterator[httpx.Response]:
        """Yields a response. If the server postpones the request (429), repeats it after the wait that the server requests. Raises `Busy`
        after `_MOST_TRIES` attempts."""
        for tries in range(1, _MOST_TRIES + 1):
            async with self._stream(method, path, data, headers) as response:
                if response.status_code != 429:
                    yield response
                    return
                wait_s = requested_wait_s(response.headers, now=time.time())
            await asyncio.sleep(backoff_s(tries, wait_s))
        raise Busy(f"{self._what} postponed {path} {_MOST_TRIES} times")

    def _stream(self, method: str, path: str, data: Any, headers: Mapping[str, str] | None) -> _Stream:
        import httpx  # imported here because the import takes half a second, which would slow down loading a recipe

        if self._client is None:
            local = is_local(self._url)
            limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections, keepalive_expiry=5.0)
            verify = web.certificates() if self._url.startswith("https:") else False
            jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
            self._client = httpx.AsyncClient(
                limits=limits, timeout=None, follow_redirects=False, trust_env=not local, verify=verify, cookies=jar
            )
        body = {} if data is None else {"json": data}
        return _Stream(
            self._client.stream(method, self._url + path, headers={**self._headers, **(headers or {})}, **body), self._what, path
        )

    async def _body(self, response: httpx.Response) -> bytes:
        content = await web.bounded_body(response, MAX_BYTES)
        if len(content) > MAX_BYTES:
            raise EnvironmentFault(f"{self._what} answered with more than {MAX_BYTES} bytes")
        return content

    def _check(self, response: httpx.Response, path: str, content: bytes) -> None:
        status = response.status_code
        if status < 300:
            return
        text = clean(_detail(content), _ERROR_CHARS)
        message = f"{self._what} answered {path} with status {status}: {text}"
        if status < 400:
            raise EnvironmentFault(f"{message}\n  fix: redirects are not followed; set tasks.family to the final address")
        if status in (401, 403):
            raise EnvironmentFault(f"{message}\n  fix: set tasks.family.options.key to env:NAME, and export the key of the server as NAME")
        if status in TRANSIENT and status not in _NOT_BUSY:
            raise Busy(message, wait_s=requested_wait_s(response.headers, now=time.time()))
        raise Rejected(message, status=status, text=text) if status < 500 else EnvironmentFault(message)


class _Stream:
    """A response in progress. A transport error is raised as `Busy`."""

    def __init__(self, stream: Any, what: str, path: str) -> None:
        self._stream, self._what, self._path = stream, what, path

    async def __aenter__(self) -> httpx.Response:
        try:
            return await self._stream.__aenter__()  # type: ignore[no-any-return]
        except Exception as error:
            raise self._fault(error) from error

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        await self._stream.__aexit__(kind, error, trace)
        if isinstance(error, Exception) and (fault := self._fault(error)) is not error:
            raise fault from error

    def _fault(self, error: Exception) -> Exception:
        import httpx

        if isinstance(error, httpx.HTTPError | httpx.StreamError | httpx.InvalidURL | OSError) and not isinstance(error, TimeoutError):
            return Busy(f"{self._what}: request {self._path} failed: {describe_error(error)}")
        return error


def is_local(url: str) -> bool:
    """Whether a URL's host is `127.0.0.1`, `localhost` or `::1`."""
    return (urlsplit(url).hostname or "") in ("127.0.0.1", "localhost", "::1")


def _detail(content: bytes) -> str:
    """Returns the reason in the body of an error response in FastAPI's format; the full text if the body has a different format."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    detail = body.get("detail", text) if isinstance(body, dict) else text
    return detail if isinstance(detail, str) else json.dumps(detail, ensure_ascii=False)


def _cookies(response: httpx.Response) -> dict[str, str]:
    pairs = (header.partition(";")[0].partition("=") for header in response.headers.get_list("set-cookie")[:16])
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() and len(value) < 4096}


def read_json(content: bytes | str, where: str) -> Any:
    """Parses JSON. Raises `EnvironmentFault` if the JSON is invalid, or has more than `MAX_DEPTH` levels, numbers that are not finite, or
    strings that UTF-8 cannot encode."""
    try:
        return _plain(json.loads(content), MAX_DEPTH)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{where} sent invalid JSON: {clean(str(error), 200)}") from None


def _plain(value: Any, levels: int) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, dict | list) and levels <= 0:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {encodable(key): _plain(item, levels - 1) for key, item in value.items()}
    return [_plain(item, levels - 1) for item in value] if isinstance(value, list) else value


def need(value: Any, kind: type[Any], where: str) -> Any:
    """Returns `value` if it has the type `kind`. Otherwise, raises `EnvironmentFault`."""
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise EnvironmentFault(f"{where} is of type {type(value).__name__}, not {kind.__name__}")
    return value
