"""Connections that stay open without sending requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from agentrl.gateway import Gateway, connections

IDLE_S = 0.4


class SilentSession:
    """A session without requests."""

    models = ("policy",)
    stalls = None

    def refused(self, kind: str) -> None: ...

    async def close(self) -> None: ...


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def request(key: str) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


async def seconds_until_end(reader: asyncio.StreamReader) -> float:
    began = time.monotonic()
    try:
        async with asyncio.timeout(20):
            while await reader.read(4096):
                pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@pytest.mark.slow
async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", IDLE_S)
    gateway: Any = Gateway()
    async with gateway.session(SilentSession()) as key:
        silent, drip, after, busy = [await opened(gateway.url) for _ in range(4)]

        async def drips(writer: asyncio.StreamWriter, head: bytes) -> None:
            for byte in head:
                writer.write(bytes([byte]))
                await asyncio.sleep(IDLE_S / 4)

        dripping = asyncio.create_task(drips(drip[1], request(key)))
        after[1].write(request(key))
        assert (await after[0].readline()).startswith(b"HTTP/1.1 200")
        after[1].write(b"G")  # then nothing; uvicorn's own limit ends with this byte
        ends = [asyncio.create_task(seconds_until_end(reader)) for reader, _ in (silent, drip, after)]
        for _ in range(8):
            busy[1].write(request(key))
            assert (await busy[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await busy[0].read(4096)
            await asyncio.sleep(IDLE_S / 3)
        for took in await asyncio.gather(*ends):
            assert IDLE_S / 2 <= took < 15
        dripping.cancel()
        for _, writer in (silent, drip, after, busy):
            writer.close()


@pytest.mark.slow
async def test_a_slow_request_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", IDLE_S)

    class Slow(SilentSession):
        async def answer(self, request: Any) -> Any:
            await asyncio.sleep(4 * IDLE_S)
            raise AssertionError("nothing to say")

    gateway: Any = Gateway()
    async with gateway.session(Slow()) as key:
        reader, writer = await opened(gateway.url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\nContent-Length: 10\r\n\r\n"
        writer.write(head.encode())
        for byte in b'{"a": 1}  ':
            await asyncio.sleep(IDLE_S / 3)
            writer.write(bytes([byte]))
        assert (await reader.readline()).startswith(b"HTTP/1.1 4"), "the slow body was read and answered"
        writer.close()


# Bytes before a key has been checked -----------------------------------------------------------------------------------

PARSERS = [name for name in ("h11", "httptools") if find_spec(name) is not None]
"""The installed parsers; httptools is installed with vLLM."""
MAX_ACCEPTED = 8 << 20
"""The bytes that fit into the kernel's buffers of a connection, its stream and one read of the event loop."""
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
ENDLESS = {
    "a header without end": (b"GET / HTTP/1.1\r\nHost: h\r\nX: ", b"x" * 65536),
    "a header's name without end": (b"GET / HTTP/1.1\r\nHost: h\r\n", b"x" * 65536),
    "headers without end": (b"GET / HTTP/1.1\r\nHost: h\r\n", b"a: b\r\n" * 10000),
    "a target without end": (b"GET /", b"x" * 65536),
    "a method without end": (b"", b"G" * 65536),
    "empty lines without end": (b"", b"\r\n" * 32768),
    "trailers without end": (CHUNKED + b"\r\n1\r\n \r\n0\r\n", b"a: b\r\n" * 10000),
    "a chunk's extension without end": (CHUNKED + b"\r\n1;", b"x" * 65536),
    "a chunk's size without end": (CHUNKED + b"\r\n", b"0" * 65536),
}


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The gateway's server uses this parser."""
    name, kind = {"h11": ("h11_impl", "H11Protocol"), "httptools": ("httptools_impl", "HttpToolsProtocol")}[request.param]
    base = getattr(import_module(f"uvicorn.protocols.http.{name}"), kind)
    monkeypatch.setattr("agentrl.gateway.http_server.bounded", lambda: connections.bounded_protocol(base))
    return str(request.param)


async def accepted_bytes(url: str, start: bytes, piece: bytes, total: int = 64 << 20) -> tuple[int, bytes]:
    """How many bytes of `start` and repeated `piece` a connection accepts, and its answer."""
    reader, writer = await opened(url)
    sent, answer = len(start), b""
    with contextlib.suppress(ConnectionError, TimeoutError):  # the connection is closed or no longer read
        writer.write(start)
        while sent < total and not reader.at_eof():
            writer.write(piece)
            async with asyncio.timeout(3):
                await writer.drain()
            sent += len(piece)
        async with asyncio.timeout(3):
            answer = await reader.read(4096)
    writer.transport.abort()
    return sent, answer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ENDLESS)
async def test_bytes_outside_the_body_are_bounded_with_each_parser(parser: str, case: str) -> None:
    gateway: Any = Gateway()
    async with gateway.session(SilentSession()) as key:
        sent, answer = await accepted_bytes(gateway.url, *ENDLESS[case])
        assert sent < MAX_ACCEPTED
        assert not answer or answer.split()[1] in (b"400", b"401", b"431"), answer
        reader, writer = await opened(gateway.url)  # others are served
        writer.write(request(key))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_pipelined_head_has_the_same_bound(parser: str) -> None:
    class Slow(SilentSession):
        async def ask(self, request_: Any, disconnected: asyncio.Event) -> Any:
            await disconnected.wait()
            return None, lambda: None

    gateway: Any = Gateway()
    async with gateway.session(Slow()) as key:
        text = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(text)}\r\n\r\n"
        start = head.encode() + text + b"GET / HTTP/1.1\r\nHost: h\r\nX: "
        for piece in (b"a: b\r\n" * 10000, b"x" * 65536):
            assert (await accepted_bytes(gateway.url, start, piece))[0] < MAX_ACCEPTED


async def test_pipelined_requests_are_bounded(parser: str) -> None:
    """A quarter of a megabyte holds 14,000 of the shortest requests; a parser may create all objects before the first answer."""
    gateway: Any = Gateway()
    async with gateway.session(SilentSession()):
        reader, writer = await opened(gateway.url)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 14000)
        answers = 0
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(20):
                while await reader.readline():
                    answers += 1
        assert answers < 14000
        writer.close()


async def test_a_large_head_and_a_body_in_small_chunks_are_accepted(parser: str) -> None:
    gateway: Any = Gateway()
    async with gateway.session(SilentSession()) as key:
        long = "".join(f"X-{number}: {'y' * 900}\r\n" for number in range(60))
        for body in (b"1\r\n \r\n" * 50_000, b"400\r\n" + b" " * 1024 + b"\r\n", (b"400\r\n" + b" " * 1024 + b"\r\n") * 500):
            reader, writer = await opened(gateway.url)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\n{long}Transfer-Encoding: chunked\r\n\r\n"
            )
            writer.write(head.encode() + body + b"0\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"400", "the empty text, which is not JSON, was read to its end"
            writer.close()
