"""The forward proxy for programs in one sandbox. Supports `CONNECT host:port` and HTTP with absolute URLs, one request per connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from agentrl.records.destinations import Destination
from agentrl.sandbox.egress.requests import AllowList, ProxyRequest, Refusal, parse_request

log = logging.getLogger(__name__)

_CHUNK = 65536
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20
_RECEIVE_BYTES = 1 << 18
"""Size of the kernel buffer for bytes that a sandbox has sent and the proxy has not read yet. It is not charged to the sandbox's memory."""

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on one sandbox's use of the host's proxy. Times are in seconds. Connections beyond `connections` wait."""

    connections: int = 16  # open at once
    pause_s: float = 0.005  # pause between two accepted connections
    head_bytes: int = 16384
    head_s: float = 10.0
    connect_s: float = 15.0  # including the name look-up
    idle_s: float = 60.0  # does not apply while a server that is listed by its address computes an answer
    total_s: float = 900.0  # duration of one connection
    total_bytes: int = 1 << 30  # of all connections, in both directions, over the sandbox's life


class BudgetSpent(Exception):
    """The sandbox has used up its byte budget."""


class _Clock:
    """The deadline of a connection, which is `idle_s` after the last transfer, but at most `total_s` after the start.

    If `patient` is true, only `total_s` applies while the program waits for a response. `patient` is set for a server that belongs to the
    operator, such as a model server.
    """

    def __init__(self, bounds: Bounds, *, patient: bool) -> None:
        self._idle_s, self._patient = bounds.idle_s, patient
        self._end = asyncio.get_running_loop().time() + bounds.total_s
        self.deadline = asyncio.timeout_at(self._next())

    def _next(self) -> float:
        return min(self._end, asyncio.get_running_loop().time() + self._idle_s)

    def moved(self, *, from_program: bool) -> None:
        """Records a transfer. `from_program`: whether the bytes came from the program."""
        self.deadline.reschedule(self._end if from_program and self._patient else self._next())


class Proxy:
    """Serves the connections of sandbox `name`. `refused` counts the rejected requests by reason; only the first rejection is logged
    immediately."""

    def __init__(self, name: str, network: Sequence[Destination], bounds: Bounds) -> None:
        self.refused: Counter[str] = Counter()
        self._name, self._bounds = name, bounds
        self._allowed = AllowList(network)
        self._left = bounds.total_bytes

    async def serve(self, link: socket.socket) -> None:
        """Serves the only request of a connection, and closes the connection."""
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        program = await _streams(link, self._bounds.head_bytes)
        writer = program[1]
        try:
            await self._request(program)
            writer.close()
            async with asyncio.timeout(self._bounds.idle_s):
                await writer.wait_closed()
        except (OSError, BudgetSpent):  # a side closed, the deadline passed (TimeoutError is an OSError), or the byte budget is used up
            pass
        finally:
            writer.transport.abort()

    def log_refusals(self) -> None:
        """Logs the number of rejected requests if the proxy rejected more than one; the first was already logged."""
        if self.refused.total() > 1:
            reasons = "; ".join(f"{reason}: {count}" for reason, count in self.refused.most_common())
            log.warning("sandbox %s: the proxy rejected %d network requests (%s)", self._name, self.refused.total(), reasons)

    async def _request(self, program: _Streams) -> None:
        request = None
        try:
            if self._left <= 0:
                raise Refusal(HTTPStatus.FORBIDDEN, f"the sandbox has used up its {self._bounds.total_bytes} bytes")
            request = parse_request(await self._head(program[0]))
            try:
                async with asyncio.timeout(self._bounds.connect_s):
                    link = await self._allowed.connect(request.host, request.port)
            except TimeoutError:
                raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, f"no connection in {self._bounds.connect_s:.0f} s") from None
        except Refusal as refusal:
            if not self.refused:
                target = f"{request.host}:{request.port}" if request is not None else "unknown destination"
                log.warning("sandbox %s: the proxy rejected a network request: %s: %s", self._name, target, refusal.reason)
            self.refused[refusal.reason] += 1
            await _refuse(program, refusal)
            return
        await self._forward(request, program, await _streams(link, _CHUNK))

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._bounds.head_s):
                return await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, f"no complete request in {self._bounds.head_s:.0f} s") from None
        except asyncio.LimitOverrunError:
            reason = f"a request head of more than {self._bounds.head_bytes} bytes"
            raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason) from None
        except asyncio.IncompleteReadError:
            raise ConnectionError("the program closed the connection before the end of the request") from None

    async def _forward(self, request: ProxyRequest, program: _Streams, server: _Streams) -> None:
        clock = _Clock(self._bounds, patient=self._allowed.lists_address(request.host, request.port))
        try:
            async with clock.deadline:
                answer = self._pump(server[0], program[1], clock, from_program=False)
                if request.head:
                    server[1].write(request.head)
                    clock.moved(from_program=not request.body)
                    await _run((answer, self._body(program[0], server[1], clock, request.body)), asyncio.FIRST_COMPLETED)
                else:
                    program[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await _run((answer, self._pump(program[0], server[1], clock, from_program=True)), asyncio.FIRST_EXCEPTION)
        finally:
            server[1].transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: _Clock, *, from_program: bool) -> None:
        """Forwards everything from `reader`, and then its end of file."""
        while data := await reader.read(_CHUNK):
            await self._move(data, writer, clock, from_program=from_program)
        writer.write_eof()

    async def _body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: _Clock, size: int) -> None:
        """Forwards the body of a request and nothing after it. Returns when the program closes the connection or sends more bytes."""
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read everything
            while size and (data := await reader.read(min(size, _CHUNK))):
                size -= len(data)
                await self._move(data, writer, clock, from_program=not size)
        await reader.read(1)

    async def _move(self, data: bytes, writer: asyncio.StreamWriter, clock: _Clock, *, from_program: bool) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise BudgetSpent
        clock.moved(from_program=False)  # the other side must accept it in time
        writer.write(data)
        await writer.drain()
        clock.moved(from_program=from_program)


async def _streams(link: socket.socket, limit: int) -> _Streams:
    """Returns the streams of a socket. Closes the socket on failure."""
    try:
        return await asyncio.open_connection(sock=link, limit=limit)
    except BaseException:
        link.close()
        raise


async def _refuse(program: _Streams, refusal: Refusal) -> None:
    """Sends the reason why a request is rejected, then reads briefly: the response would be lost if the connection were closed with unread
    bytes."""
    reader, writer = program
    text = f"agentrl: {refusal.reason}\n".encode()
    head = f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + text)
    await writer.drain()
    writer.write_eof()
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and (data := await reader.read(_CHUNK)):
                left -= len(data)


async def _run(works: Sequence[Coroutine[Any, Any, None]], until: str) -> None:
    """Runs coroutines until the condition `until` of `asyncio.wait` holds, then cancels the rest. If a finished coroutine failed, raises
    its exception."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
