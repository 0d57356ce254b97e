"""HTTP/1.1 requests to one server over persistent connections. The requests include every turn of thousands of episodes.

A general HTTP client takes a millisecond of CPU time per request and searches all of its connections. This module
keeps free connections in a stack and uses only h11 between a request and the socket.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from urllib.parse import urlsplit

import h11

from agentrl.errors import ServingError
from agentrl.serving.access import auth_headers as access

MAX_ANSWER_BYTES = 256 << 20
"""Maximum size of one response, in bytes. The longest completion with the largest supports takes some tens of MiB."""
IDLE_S = 10.0
"""Seconds after which a free connection is not reused. The server drops it after 30 s, and a request sent at that time would be lost."""
_MAX_HEAD = 64 << 10


class UnsentError(ServingError):
    """The request never reached the server, so a retry is safe."""


class HttpTransport:
    """Sends requests to one `http://host:port`, at most `max_connections` at once; further requests wait. Use the transport from only one
    event loop."""

    def __init__(self, url: str, *, key: str = "", max_connections: int, what: str = "the inference server") -> None:
        """`key`: the server's key (`agentrl.serving.access`); empty means that the server needs no
        key. `what`: the server's name in error messages."""
        parts = urlsplit(url)
        self.url, self._what = url, what
        self.closed = False
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._head = [(b"host", parts.netloc.encode())]
        self._head += [(name.encode(), value.encode()) for name, value in access(key).items()]
        self._slots = asyncio.Semaphore(max_connections)
        self._free: deque[tuple[float, _Connection]] = deque()  # with the time when each became free; newest last
        self._busy: set[_Connection] = set()

    async def request(self, method: str, path: str, body: bytes = b"", *, last: bool = False) -> tuple[int, bytes]:
        """Returns the status and the content of the response. The caller sets the deadline. Cancellation closes the connection.

        `body`: JSON. `last`: whether this is the last request on its connection. Raises `UnsentError` if the server cannot be reached or
        this transport is closed, and `ServingError` if the connection breaks later, or if the response is not HTTP or longer than
        `MAX_ANSWER_BYTES`.
        """
        async with self._slots:
            connection = self._reuse() or await self._open()
            self._busy.add(connection)
            try:
                answer = await connection.exchange(self._head_of(method, path, len(body), last), body)
            except BaseException:
                connection.abort()
                raise
            finally:
                self._busy.discard(connection)
            if not self.closed and connection.reset():
                self._free.append((time.monotonic(), connection))
            else:
                connection.abort()
            return answer

    def close(self) -> None:
        """Aborts all requests. Idempotent."""
        self.closed = True
        for connection in (*self._busy, *(free for _, free in self._free)):
            connection.abort()
        self._free.clear()

    def _head_of(self, method: str, path: str, length: int, last: bool) -> h11.Request:
        headers = [*self._head, (b"content-length", b"%d" % length)]
        headers += [(b"content-type", b"application/json")] if length else []
        headers += [(b"connection", b"close")] if last else []
        return h11.Request(method=method.encode(), target=path.encode(), headers=headers)

    def _reuse(self) -> _Connection | None:
        """Returns the most recently used free connection, so that surplus connections become idle and expire."""
        if self.closed:
            raise self._closed_error()
        oldest = time.monotonic() - IDLE_S
        while self._free and self._free[0][0] < oldest:
            self._free.popleft()[1].abort()
        while self._free:
            if (connection := self._free.pop()[1]).usable:
                return connection
        return None

    async def _open(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(lambda: _Connection(self._what), self._host, self._port)
        except OSError as error:
            raise UnsentError(f"cannot reach {self._what} at {self.url}: {error}") from error
        if self.closed:  # `close` has not seen this connection
            connection.abort()
            raise self._closed_error()
        return connection

    def _closed_error(self) -> UnsentError:
        return UnsentError(f"the connection to {self._what} at {self.url} was closed: the server is being stopped or restarted")


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._status, self._content = 0, bytearray()

    @property
    def usable(self) -> bool:
        """Whether the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: h11.Request, body: bytes) -> tuple[int, bytes]:
        """Sends a request and returns the status and the content. Raises `ServingError` if the connection closes or the response is not
        HTTP."""
        assert self._transport is not None, "it was opened"
        self._answer = asyncio.get_running_loop().create_future()
        head = self._http.send(request)
        self._http.send(h11.Data(data=body))
        self._http.send(h11.EndOfMessage())
        self._transport.writelines((head, body) if head else ())
        return await self._answer

    def reset(self) -> bool:
        """Prepares the connection for the next exchange. Returns False if the server is closing the connection or has sent extra data."""
        self._answer, self._status, self._content = None, 0, bytearray()
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE or self._http.trailing_data[0]:
            return False  # extra data would become part of the next response
        self._http.start_next_cycle()
        return self.usable

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport."""
        assert isinstance(transport, asyncio.Transport), "a socket's"
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parses a part of the response."""
        self._read(data)

    def eof_received(self) -> bool:
        """Parses the end of the response, and closes the connection."""
        self._read(b"")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the current exchange."""
        self._fail("the connection was closed before the answer" if error is None else f"{type(error).__name__}: {error}")

    def _read(self, data: bytes) -> None:
        if self._answer is None:  # no request is waiting: the server is closing, or sends extra data
            self.abort()
            return
        try:
            self._http.receive_data(data)
            while not self._answer.done():
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                if isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.Data):
                    self._content += event.data
                    if len(self._content) > MAX_ANSWER_BYTES:
                        self._fail(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
                elif isinstance(event, h11.EndOfMessage):
                    self._answer.set_result((self._status, bytes(self._content)))
                elif isinstance(event, h11.ConnectionClosed):
                    self._fail("the connection was closed before the answer")
        except h11.RemoteProtocolError as error:
            self._fail(f"its answer is not HTTP: {error}" if data else "the connection was closed before the end of the answer")

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ServingError(f"{self._what}: {reason}"))
