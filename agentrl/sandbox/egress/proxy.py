"""A forward proxy for the programs of one sandbox: `CONNECT host:port`, and plain HTTP with absolute URLs. One request a connection."""

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
from agentrl.sandbox.egress import heads
from agentrl.sandbox.egress.addresses import AllowList
from agentrl.sandbox.egress.heads import ProxyRequest, Refusal

log = logging.getLogger(__name__)

CHUNK = 65536
LINGER_S = 2.0
LINGER_BYTES = 1 << 20
RECEIVE_BYTES = 1 << 18
"""Kernel buffer for what a sandbox has sent and the proxy has not read yet; it is not charged to the sandbox's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one sandbox may use of the host's proxy. Times in seconds; connections beyond the bound wait."""

    connections: int = 16  # open at once
    pause_s: float = 0.005  # between two accepted connections
    head_bytes: int = 16384
    head_s: float = 10.0
    connect_s: float = 15.0  # including the name look-up
    idle_s: float = 60.0  # a server that is listed by its address may take longer over an answer
    total_s: float = 900.0  # of one connection
    total_bytes: int = 1 << 30  # of all connections, both ways, as long as the sandbox lives


class BudgetSpent(Exception):
    """The sandbox has used up its bytes."""


class _Clock:
    """The deadline of a connection: `idle_s` after the last byte, and `total_s` after the first.

    A `patient` one is for a server of the operator's own, such as a model's: while that has the last word of a program to answer, only
    `total_s` counts.
    """

    def __init__(self, bounds: Bounds, *, patient: bool) -> None:
        self._idle_s, self._patient = bounds.idle_s, patient
        self._end = asyncio.get_running_loop().time() + bounds.total_s
        self.deadline = asyncio.timeout_at(self._next())

    def _next(self) -> float:
        return min(self._end, asyncio.get_running_loop().time() + self._idle_s)

    def moved(self, *, asked: bool) -> None:
        """Bytes have moved: of the program where it `asked`, else of the server."""
        self.deadline.reschedule(self._end if asked and self._patient else self._next())


class Proxy:
    """Serves the connections of sandbox `name`. `refused` counts refusals by reason; the first is logged, `sum_up` logs the totals."""

    def __init__(self, name: str, network: Sequence[Destination], bounds: Bounds) -> None:
        self.refused: Counter[str] = Counter()
        self._name, self._bounds = name, bounds
        self._book = AllowList(network)
        self._left = bounds.total_bytes

    async def serve(self, link: socket.socket) -> None:
        """Answers a connection's one request, and always closes it."""
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        reader, writer = await _streams(link, self._bounds.head_bytes)
        try:
            await self._request(reader, writer)
            writer.close()
            async with asyncio.timeout(self._bounds.idle_s):
                await writer.wait_closed()
        except (OSError, BudgetSpent):  # a side went away, or the deadline (TimeoutError is an OSError) or the byte budget is over
            pass
        finally:
            writer.transport.abort()

    def log_refusals(self) -> None:
        """Logs the totals, unless there was only the refusal that was already logged."""
        if self.refused.total() > 1:
            reasons = "; ".join(f"{reason}: {count}" for reason, count in self.refused.most_common())
            log.warning("sandbox %s: %d requests to the network refused (%s)", self._name, self.refused.total(), reasons)

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted = None
        try:
            if self._left <= 0:
                raise Refusal(HTTPStatus.FORBIDDEN, f"the sandbox has used up its {self._bounds.total_bytes} bytes")
            wanted = heads.parse_request(await self._head(reader))
            link = await self._connect(wanted)
        except Refusal as refusal:
            self._note(refusal, wanted)
            await _refuse(reader, writer, refusal)
            return
        await self._carry(wanted, reader, writer, link)

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
            raise ConnectionError("closed before the end of the request") from None

    async def _connect(self, wanted: ProxyRequest) -> socket.socket:
        try:
            async with asyncio.timeout(self._bounds.connect_s):
                return await self._book.connect(wanted.host, wanted.port)
        except TimeoutError:
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, f"no connection in {self._bounds.connect_s:.0f} s") from None

    async def _carry(self, wanted: ProxyRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: socket.socket) -> None:
        server_reader, server_writer = await _streams(link, CHUNK)
        clock = _Clock(self._bounds, patient=self._book.lists_address(wanted.host, wanted.port))
        try:
            async with clock.deadline:
                if wanted.head:
                    server_writer.write(wanted.head)
                    clock.moved(asked=not wanted.body)
                    await _first(
                        self._pump(server_reader, writer, clock, asked=False), self._body(reader, server_writer, clock, wanted.body)
                    )
                else:
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await _both(self._pump(server_reader, writer, clock, asked=False), self._pump(reader, server_writer, clock, asked=True))
        finally:
            server_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: _Clock, *, asked: bool) -> None:
        """Forwards bytes until the end of the reader, and forwards that end."""
        while data := await reader.read(CHUNK):
            await self._move(data, writer, clock, asked=asked)
        writer.write_eof()

    async def _body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: _Clock, size: int) -> None:
        """Forwards the body of a request and nothing after it; ends when the program closes or sends more."""
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read everything
            while size and (data := await reader.read(min(size, CHUNK))):
                size -= len(data)
                await self._move(data, writer, clock, asked=not size)
        await reader.read(1)

    async def _move(self, data: bytes, writer: asyncio.StreamWriter, clock: _Clock, *, asked: bool) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise BudgetSpent
        clock.moved(asked=False)  # the other side must take it in time
        writer.write(data)
        await writer.drain()
        clock.moved(asked=asked)

    def _note(self, refusal: Refusal, wanted: ProxyRequest | None) -> None:
        if not self.refused:
            where = f"{wanted.host}:{wanted.port}" if wanted is not None else "a malformed request"
            log.warning("sandbox %s: a request to the network was refused: %s: %s", self._name, where, refusal.reason)
        self.refused[refusal.reason] += 1


async def _streams(link: socket.socket, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The socket as streams; the socket is closed on failure."""
    try:
        return await asyncio.open_connection(sock=link, limit=limit)
    except BaseException:
        link.close()
        raise


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusal: Refusal) -> None:
    """Answers with the reason, then reads on for a moment: closing with unread bytes would discard the answer."""
    text = f"agentrl: {refusal.reason}\n".encode()
    head = f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + text)
    await writer.drain()
    writer.write_eof()
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0 and (data := await reader.read(CHUNK)):
                left -= len(data)


async def _both(*works: Coroutine[Any, Any, None]) -> None:
    """Runs all of them to the end; when one fails the others are cancelled."""
    await _run(works, asyncio.FIRST_EXCEPTION)


async def _first(*works: Coroutine[Any, Any, None]) -> None:
    """Runs them until one ends; the others are cancelled."""
    await _run(works, asyncio.FIRST_COMPLETED)


async def _run(works: Sequence[Coroutine[Any, Any, None]], until: str) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
