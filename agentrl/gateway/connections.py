"""Connections to the gateway: bounds on bytes outside the body, pipelined requests and idle time, and corrections of HTTP parsers.

The key of a request is checked only when its head is complete, so any program that reaches the gateway can send bytes before that. uvicorn
has two parsers: h11, which bounds heads, and httptools, which is installed with vLLM and bounds nothing. Neither answers a client that has
closed its side, and httptools loses the body of a request that offers to change the protocol, as Java's client does.
"""

from __future__ import annotations

import asyncio
from typing import Any

IDLE_S = 30.0
"""For so long a connection may be without a request whose head has arrived whole, at first and after an answer; at most half as much
again, since it is looked at now and then."""
HEAD_BYTES = 65536
"""Bound on a request line, headers, trailers, and the framing of a chunked body beyond `FRAMING`."""
FRAMING = 6
"""Bytes of framing allowed for each byte of a chunked body: a chunk of one byte has five."""
PIPELINED = 16
"""Requests of a connection that may wait for the answer to an earlier one."""
PIECE = 4096
"""The parser gets the data in pieces of this size, and the bounds are checked after each."""
HALF_CLOSED = "agentrl.half_closed"
"""Key in a request's ASGI scope: the client has closed its side. It may be waiting for the answer, or may have disconnected."""
_OFFERS = (b"upgrade", b"http2-settings")
_REASON = f"A request's head may have {HEAD_BYTES} bytes.\n".encode()
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    % (len(_REASON), _REASON)
)


def bounded() -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, for the installed parser, with these bounds."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    return bounded_protocol(AutoHTTPProtocol)


def bounded_protocol(base: Any) -> type[asyncio.Protocol]:
    """The uvicorn protocol `base` with these bounds. uvicorn's limit on idle connections starts only after the first answer."""
    counts = hasattr(base, "on_body")  # httptools. h11 bounds heads, trailers and chunks itself: `h11_max_incomplete_event_size`

    class Bounded(base):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._framing = 0  # bytes of the request at hand that are no body, less what its body allows
            self._looks = 0  # in a row that found no request, or the same one, answered
            self._last: Any = None
            if counts:
                self.parser: Any = _Parser(self, self.parser)
            self._later()

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            for start in range(0, len(data), PIECE):
                if self.transport.is_closing():
                    return
                piece = data[start : start + PIECE]
                self._framing += len(piece) if counts else 0
                super().data_received(piece)
                if self._framing > HEAD_BYTES:
                    self._refuse()
                elif len(getattr(self, "pipeline", ())) > PIPELINED:  # h11 reads one request at a time
                    self.transport.abort()

        def _refuse(self) -> None:
            """Ends the connection, with an answer unless one is already under way."""
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(TOO_LARGE)
                self.transport.close()
            else:
                self.transport.abort()

        def _later(self) -> None:
            self._look = self.loop.call_later(IDLE_S / 2, self._looked)

        def _looked(self) -> None:
            asked, self._last = self._last is not self.cycle, self.cycle
            at_work = self.cycle is not None and not self.cycle.response_complete
            self._looks = 0 if asked or at_work else self._looks + 1
            if self._looks > 1:
                self.transport.abort()
            else:
                self._later()

        def eof_received(self) -> bool:
            """Keeps the connection of a client that has sent its complete request, closed its side, and may be waiting for the answer."""
            cycle = self.cycle
            if cycle is None or cycle.response_complete or cycle.more_body:
                return False
            cycle.scope[HALF_CLOSED] = True
            cycle.message_event.set()
            return True

        # Called by httptools

        def on_headers_complete(self) -> None:
            if not self.parser.should_upgrade():  # otherwise the head is parsed again
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._framing = max(0, self._framing - (1 + FRAMING) * len(body))
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                self._framing = 0
                super().on_message_complete()

    return Bounded


class _Parser:
    """httptools' parser, but ignores an offer to change the protocol: the request is answered in HTTP/1.1.

    httptools treats the bytes after the head of such a request as the other protocol. So the head is parsed again without the offer.
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
                    raise httptools.HttpParserError("this is no proxy") from None
                data = self._head() + data[offer.args[0] :]
                self._parser = httptools.HttpRequestParser(self._protocol)
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _head(self) -> bytes:
        """The head of the request without the offer."""
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._protocol.url, self._parser.get_http_version().encode())]
        for name, value in self._protocol.headers:
            if name == b"connection":
                value = b", ".join(one.strip() for one in value.split(b",") if one.strip().lower() not in _OFFERS)
            if name not in _OFFERS and value:
                lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))
