"""Connections to the gateway: bounds on bytes outside the body, pipelined requests and idle time, and fixes for HTTP parsers.

A request's key is checked only when the request's head is complete, so any program that reaches the gateway can send bytes before the
check. uvicorn has two parsers: h11, which bounds heads, and httptools, which is installed with vLLM and bounds nothing. With both parsers,
a client that has closed its sending side receives no response. httptools also loses the body of a request that offers to upgrade the
protocol, as requests from Java's client do.
"""

from __future__ import annotations

import asyncio
from typing import Any

IDLE_S = 30.0
"""Seconds without a complete request head after which a connection is closed. The close may be delayed by up to half this time."""
HEAD_BYTES = 65536
"""Maximum bytes in a request line, headers and trailers, and in the framing of a chunked body beyond what `FRAMING` allows."""
FRAMING = 6
"""Maximum framing bytes per byte of a chunked body. A chunk of one byte has five framing bytes."""
PIPELINED = 16
"""Maximum number of requests on a connection that wait for the response to an earlier request."""
PIECE = 4096
"""Number of bytes after which the bounds are checked."""
HALF_CLOSED = "agentrl.half_closed"
"""Key in a request's ASGI scope: the client has closed its sending side. It may be waiting for the response, or may have disconnected."""
_OFFERS = (b"upgrade", b"http2-settings")
_REASON = f"A request's head may have at most {HEAD_BYTES} bytes.\n".encode()
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    % (len(_REASON), _REASON)
)


def bounded() -> type[asyncio.Protocol]:
    """Returns uvicorn's HTTP protocol for the installed parser, with the bounds of this module."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    return bounded_protocol(AutoHTTPProtocol)


def bounded_protocol(base: Any) -> type[asyncio.Protocol]:
    """Returns the uvicorn protocol `base` with the bounds of this module. uvicorn's own limit on idle connections applies only after the
    first response."""
    return type("Bounded", (_Bounds, base), {"counts_framing": hasattr(base, "on_body")})  # h11 bounds heads, trailers and chunks itself


class _Bounds:
    """Adds bounds to one of uvicorn's HTTP protocols: this class precedes the protocol in the method resolution order."""

    counts_framing: bool
    parser: Any
    transport: Any
    cycle: Any
    loop: asyncio.AbstractEventLoop

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._framing = 0  # framing bytes of the current request, minus the allowance of its body
        self._idle_checks = 0  # consecutive checks without a new request
        self._last: Any = None
        if self.counts_framing:
            self.parser = _Parser(self, self.parser)
        self._schedule_check()

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if self.transport.is_closing():
                return
            piece = data[start : start + PIECE]
            self._framing += len(piece) if self.counts_framing else 0
            super().data_received(piece)  # type: ignore[misc]
            if self._framing > HEAD_BYTES:
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(TOO_LARGE)
                    self.transport.close()
                else:  # the response to another request is in progress
                    self.transport.abort()
            elif len(getattr(self, "pipeline", ())) > PIPELINED:  # h11 reads one request at a time
                self.transport.abort()

    def _schedule_check(self) -> None:
        self._check = self.loop.call_later(IDLE_S / 2, self._check_idle)

    def _check_idle(self) -> None:
        is_new, self._last = self._last is not self.cycle, self.cycle
        in_progress = self.cycle is not None and not self.cycle.response_complete
        self._idle_checks = 0 if is_new or in_progress else self._idle_checks + 1
        if self._idle_checks > 1:
            self.transport.abort()
        else:
            self._schedule_check()

    def eof_received(self) -> bool:
        """Keeps the connection of a client that has sent its complete request, closed its sending side, and may be waiting for the
        response."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.scope[HALF_CLOSED] = True
        cycle.message_event.set()
        return True

    # Called by httptools

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():  # otherwise the head is parsed again
            super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        self._framing = max(0, self._framing - (1 + FRAMING) * len(body))
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._framing = 0
            super().on_message_complete()  # type: ignore[misc]


class _Parser:
    """Wraps httptools' parser and ignores an offer to upgrade the protocol, so that the request is answered in HTTP/1.1.

    After the head of such a request, httptools treats all bytes as data of the new protocol. The head is therefore parsed again without the
    offer.
    """

    def __init__(self, protocol: Any, parser: Any) -> None:
        self._protocol, self._parser = protocol, parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        import httptools

        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("not a proxy") from None
                data = self._head() + data[offer.args[0] :]
                self._parser = httptools.HttpRequestParser(self._protocol)
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _head(self) -> bytes:
        """Returns the head of the request without the offer to upgrade the protocol."""
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._protocol.url, self._parser.get_http_version().encode())]
        for name, value in self._protocol.headers:
            if name == b"connection":
                value = b", ".join(part.strip() for part in value.split(b",") if part.strip().lower() not in _OFFERS)
            if name not in _OFFERS and value:
                lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))
