from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from agentrl.errors import ServingError
from agentrl.serving import transport
from agentrl.serving.transport import HttpTransport, UnsentError
from tests.waiting import until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
END = b"<the connection ends here>"


class Server:
    """Answers the n-th request of each connection with raw bytes; `None` closes the connection instead."""

    def __init__(self, answer: Callable[[int], bytes | None]) -> None:
        self.answer, self.connections, self.waiting, self.lost, self.url = answer, 0, 0, 0, ""
        self.go = asyncio.Event()
        self.go.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                assert await reader.readexactly(length) == b"[1]"
                self.waiting += 1
                answered = asyncio.create_task(self.go.wait())
                ended = asyncio.create_task(reader.read(1))
                await asyncio.wait({answered, ended}, return_when=asyncio.FIRST_COMPLETED)
                self.waiting -= 1
                if not answered.done():
                    return
                ended.cancel()
                with suppress(asyncio.CancelledError):
                    await ended
                if (content := self.answer(number)) is None:
                    return
                writer.write(content.removesuffix(END))
                if content.endswith(END):
                    return
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.lost += 1
            writer.close()


@asynccontextmanager
async def served(answer: Callable[[int], bytes | None], *, max_connections: int = 8) -> AsyncIterator[tuple[Server, HttpTransport]]:
    script = Server(answer)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    client_transport = HttpTransport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", max_connections=max_connections)
    try:
        yield script, client_transport
    finally:
        client_transport.close()
        server.close()
        await until(lambda: script.lost == script.connections)


async def test_connections_are_reused_bounded_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(lambda n: OK, max_connections=3) as (server, client):
        server.go.clear()
        requests = [asyncio.create_task(client.request("POST", "/", b"[1]")) for _ in range(5)]
        await until(lambda: server.waiting == 3)
        await asyncio.sleep(0.05)
        assert server.waiting == 3, "two of five requests are queued"
        server.go.set()
        assert await asyncio.gather(*requests) == [(200, b"{}")] * 5
        assert server.connections == 3
        monkeypatch.setattr(transport, "IDLE_S", -1.0)
        await client.request("POST", "/", b"[1]")
        await until(lambda: server.lost == 3)
        assert server.connections == 4


async def test_chunked_answers_are_read_and_closed_connections_are_replaced() -> None:
    chunked = b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\n\r\n"
    async with served(lambda n: chunked) as (server, client):
        assert await client.request("POST", "/", b"[1]") == (503, b"[]")
        assert await client.request("POST", "/", b"[1]") == (503, b"[]")
        assert server.connections == 2


HOSTILE: dict[str, bytes | None] = {
    "no HTTP": b"SSH-2.0-x\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "an end in the middle": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}" + END,
    "an invalid chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "more than the limit": b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + b"x" * 3000,
    "nothing": None,
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_invalid_answers_raise_and_close_the_connection(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 2000)
    async with served(lambda n: HOSTILE[case]) as (server, client):
        with pytest.raises(ServingError) as caught:
            await asyncio.wait_for(client.request("POST", "/", b"[1]"), 10)
        assert ("was closed" in str(caught.value)) == (case in ("nothing", "an end in the middle"))
        assert not isinstance(caught.value, UnsentError), "the server may have received it, so it is not sent again"
        await until(lambda: server.lost == 1)


async def test_cancellation_closes_the_connection_and_a_closed_transport_sends_nothing() -> None:
    async with served(lambda n: OK) as (server, client):
        server.go.clear()
        job = asyncio.create_task(client.request("POST", "/", b"[1]"))
        await until(lambda: server.waiting == 1)
        job.cancel()
        await until(lambda: server.lost == 1)  # the server detects this and stops sampling
        pending = asyncio.create_task(client.request("POST", "/", b"[1]"))
        await until(lambda: server.waiting == 1)
        client.close()
        with pytest.raises(ServingError):
            await pending
        with pytest.raises(UnsentError, match="closed"):
            await client.request("POST", "/", b"[1]")
        assert server.connections == 2


async def test_an_unsolicited_answer_is_discarded() -> None:
    async with served(lambda n: OK + OK.replace(b"{}", b"[]")) as (server, client):
        assert await client.request("POST", "/", b"[1]") == (200, b"{}")
        assert await client.request("POST", "/", b"[1]") == (200, b"{}")
        assert server.connections == 2


async def test_a_transport_closed_while_connecting_sends_nothing() -> None:
    async with served(lambda n: OK) as (_, client):
        job = asyncio.create_task(client.request("POST", "/", b"[1]"))
        await asyncio.sleep(0)  # it is connecting
        client.close()
        with pytest.raises(UnsentError, match="closed"):
            await job
