"""Connections that hold on to the gateway without asking for anything."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentrl.gateway import Gateway, connections

IDLE_S = 0.4


class Nobody:
    """A session that no request reaches."""

    models = ("policy",)

    def refused(self, kind: str) -> None: ...

    async def close(self) -> None: ...


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def request(key: str) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


async def ended_after(reader: asyncio.StreamReader) -> float:
    began = time.monotonic()
    try:
        async with asyncio.timeout(20):
            while await reader.read(4096):
                pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


async def test_a_connection_without_a_request_is_closed_and_one_with_requests_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", IDLE_S)
    gateway: Any = Gateway()
    async with gateway.session(Nobody()) as key:
        silent, drip, after, busy = [await opened(gateway.url) for _ in range(4)]

        async def drips(writer: asyncio.StreamWriter, head: bytes) -> None:
            for byte in head:
                writer.write(bytes([byte]))
                await asyncio.sleep(IDLE_S / 4)

        dripping = asyncio.create_task(drips(drip[1], request(key)))
        after[1].write(request(key))
        assert (await after[0].readline()).startswith(b"HTTP/1.1 200")
        after[1].write(b"G")  # and no more: uvicorn's own limit ends with this byte
        ends = [asyncio.create_task(ended_after(reader)) for reader, _ in (silent, drip, after)]
        for _ in range(8):
            busy[1].write(request(key))
            assert (await busy[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await busy[0].read(4096)
            await asyncio.sleep(IDLE_S / 3)
        for took in await asyncio.gather(*ends):
            assert IDLE_S / 2 <= took < 5
        dripping.cancel()
        for _, writer in (silent, drip, after, busy):
            writer.close()


async def test_a_request_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", IDLE_S)

    class Slow(Nobody):
        async def answer(self, asked: Any) -> Any:
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
        assert (await reader.readline()).startswith(b"HTTP/1.1 4"), "the body came slowly, and was read and answered"
        writer.close()
