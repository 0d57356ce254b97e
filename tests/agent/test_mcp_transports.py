"""MCP servers over HTTP: sessions, streams, invalid answers, and the blame for failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent.mcp.servers import Server, ServerConnection
from agentrl.base import web
from agentrl.base.tool_list import usable_tools
from agentrl.config.tools import MCPConfig
from agentrl.errors import InfrastructureError, ToolUnavailable
from tests.agent.mcp_episodes import HOSTILE, LIMITS, Episode

PLAIN_ECHO = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


def over_http(url: str) -> Server:
    return Server(name="it", config=MCPConfig(url=url), root=HOSTILE.parent, offers=usable_tools([PLAIN_ECHO], ()))


class Scripted(BaseHTTPRequestHandler):
    """An MCP server over HTTP whose behaviour depends on the path."""

    protocol_version = "HTTP/1.1"
    ended_sessions: list[str] = []  # noqa: RUF012
    forgotten: list[str] = []  # noqa: RUF012
    revisions: list[tuple[str, str | None]] = []  # noqa: RUF012
    ponged = threading.Event()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.revisions.append((request.get("method", ""), self.headers["mcp-protocol-version"]))
        if request.get("id") == "p" and request.get("result") == {}:
            self.ponged.set()
        if "id" not in request or "method" not in request:
            return self.answer(202, b"")
        if self.path == "/elsewhere":
            self.send_response(307)
            self.send_header("location", "/json")
            self.send_header("content-length", "0")
            return self.end_headers()
        hello = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result = {"initialize": hello, "tools/list": {"tools": [PLAIN_ECHO]}}.get(request["method"])
        if result is None:
            result = {"content": [{"type": "text", "text": f"{request['params']['arguments']['text']} {self.headers['mcp-session-id']}"}]}
            if self.path == "/flood":
                return self.answer(200, b"x" * 3_000_000)
            if self.path.startswith("/status/"):
                return self.answer(int(self.path.rpartition("/")[2]), b"no")
            if self.path in ("/empty", "/page"):
                return self.answer(200, b"" if self.path == "/empty" else b"<html>we are down for maintenance</html>")
            if self.path in SLOW:
                return self.drip(*SLOW[self.path], request["id"])
            if self.path in ("/drop", "/hang"):
                time.sleep(2.0 if self.path == "/hang" else 0.0)
                return self.connection.shutdown(socket.SHUT_RDWR)
            if self.path == "/forgets" and request["params"]["arguments"]["text"] == "b" and "b" not in self.forgotten:
                self.forgotten.append("b")
                return self.answer(404, b"no such session")
        reply = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()
        if self.path == "/events":
            reply = b': hello\r\n\r\nevent: message\r\ndata: {"method": "x", "id": 1}\r\n\r\ndata: ' + reply + b"\r\n\r\n"
        self.answer(200, reply, "text/event-stream" if self.path == "/events" else "application/json")

    def do_DELETE(self) -> None:
        self.ended_sessions.append(self.headers["mcp-session-id"])
        self.answer(200, b"")

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("mcp-session-id", "s1")
        self.send_header("content-length", str(len(body)))
        if self.path == "/closing":
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def drip(self, kind: str, first_bytes: bytes, number: int) -> None:
        """A body of unknown length. A ping expects a reply before the answer; other bodies do not."""
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            self.wfile.write(first_bytes)
            if b"ping" in first_bytes:
                reply = {"content": [{"type": "text", "text": f"ponged: {self.ponged.wait(3.0)}"}]}
                data = b"data: " + json.dumps({"jsonrpc": "2.0", "id": number, "result": reply}).encode() + b"\n\n"
                self.wfile.write(chunk(data) + b"0\r\n\r\n")
            else:
                time.sleep(4.0)
        except OSError:
            pass
        self.close_connection = True

    def log_message(self, *_: Any) -> None: ...


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = "text/event-stream"
SLOW = {
    "/pings": (EVENTS, chunk(b'data: {"jsonrpc": "2.0", "id": "p", "method": "ping"}\n\n')),
    "/lines": (EVENTS, chunk(b"\n" * 3_000_000)),
    "/pieces": (EVENTS, chunk(b"\n") * 200_000),
    "/bytes": ("application/json", chunk(b" ") * 200_000),
    "/text": ("text/plain", chunk(b"we are down for maintenance")),
    "/words": (EVENTS, chunk(b"data: we are down for maintenance\n\n")),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


async def test_a_server_over_http_is_called_concurrently_and_its_session_ends(address: str) -> None:
    for path in ("/json", "/events"):
        server = Server(name="it", config=MCPConfig(url=address + path, together=True), root=HOSTILE.parent)
        connection = ServerConnection(server)
        server = replace(server, offers=usable_tools(await connection.list_tools(None), ()))
        await connection.close(timeout_s=5.0)
        async with Episode(server) as episode:
            results = await asyncio.gather(*(episode.use("echo", text=f"{n}") for n in range(3)))
            assert [result.outcome.output for result in results] == ["0 s1", "1 s1", "2 s1"]
        assert Scripted.ended_sessions[-1] == "s1", "a session ends with its episode"
    for path, kind in {"/flood": "mcp_flood", "/status/400": "", "/status/413": "", "/status/422": ""}.items():
        async with Episode(replace(server, config=MCPConfig(url=address + path))) as episode:
            result = await episode.use("echo", text="a")
            assert (result.failure.kind if result.failure else "") == kind and not result.outcome.ok
    for url in (f"{address}/elsewhere", "http://127.0.0.1:9/"):
        async with Episode(replace(server, config=MCPConfig(url=url))) as episode:
            with pytest.raises(InfrastructureError):
                await episode.use("echo", text="a")


async def test_requests_over_http_name_the_chosen_revision(address: str) -> None:
    Scripted.revisions.clear()
    async with Episode(over_http(address + "/json")) as episode:
        assert (await episode.use("echo", text="a")).outcome.ok
    revisions = dict(Scripted.revisions)
    assert revisions.pop("initialize") is None and set(revisions.values()) == {"2025-06-18"} and "tools/call" in revisions


async def test_a_ping_in_a_stream_is_answered_before_the_result_arrives(address: str) -> None:
    Scripted.ponged.clear()
    async with Episode(over_http(address + "/pings")) as episode:
        assert (await episode.use("echo", text="a")).outcome.output == "ponged: True"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/lines", "/pieces", "/bytes", "/text", "/words"])
async def test_an_invalid_answer_fails_fast_and_does_not_block_the_event_loop(path: str, address: str) -> None:
    """Tiny pieces cost more than their bytes, and a body that is neither JSON nor events is not an answer."""
    loop, lags = asyncio.get_running_loop(), [0.0]

    async def watch() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            lags.append(loop.time() - before - 0.01)

    async with Episode(over_http(address + path)) as episode:
        watcher, started = asyncio.create_task(watch()), time.monotonic()
        with pytest.raises(ToolUnavailable, match="tool echo: "):
            await episode.use("echo", replace(LIMITS, tool_timeout_s=2.0), text="a")
        assert time.monotonic() - started < (1.5 if path in ("/text", "/words") else 3.5) and max(lags) < 0.7
        watcher.cancel()


@given(events=st.lists(st.sampled_from([b"", b"{}", b"a\nb", b"\xff"]), max_size=6), crlf=st.booleans(), cuts=st.lists(st.integers(0, 200)))
def test_events_are_independent_of_the_pieces(events: list[bytes], crlf: bool, cuts: list[int]) -> None:
    text = b"".join(b"".join(b"data: " + line + b"\n" for line in event.split(b"\n") if event) + b": x\n\n" for event in events)
    text = text.replace(b"\n", b"\r\n") if crlf else text
    positions = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    stream = web.Events()
    received = [data for begin, end in itertools.pairwise(positions) for _, data in stream.feed(text[begin:end]) if data]
    assert received == [event for event in events if event] and stream.held == 0


def test_a_comment_does_not_hide_the_event_that_contains_it() -> None:
    assert web.Events().feed(b": ping\ndata: x\n\n: ping\n\n") == [(b"message", b"x")]


OVER_HTTP = [
    "/status/401",
    "/status/403",
    "/status/429",
    "/status/500",
    "/status/502",
    "/status/503",
    "/status/504",
    "/empty",
    "/page",
    "/drop",
]


@pytest.mark.parametrize("path", [*OVER_HTTP, "/hang"])
async def test_an_unanswered_call_over_http_is_not_blamed_on_the_policy(path: str, address: str) -> None:
    server = over_http(address + path)
    async with Episode(server) as episode:
        with pytest.raises(ToolUnavailable, match="tool echo: "):
            await episode.use("echo", replace(LIMITS, tool_timeout_s=0.5 if path == "/hang" else 5.0), text="a")


async def test_a_lost_session_is_replaced_by_a_new_one(address: str) -> None:
    """A restarted server answers 404 to its former sessions, and the protocol requires the client to start another."""
    server = over_http(address + "/forgets")
    async with Episode(server) as episode:
        assert (await episode.use("echo", text="a")).outcome.output == "a s1"
        result = await episode.use("echo", text="b")
        assert result.outcome.output == "note: the server it was restarted; its state is lost\nb s1" and result.failure is None


async def test_a_server_that_disappears_after_a_call_is_not_blamed_on_the_policy() -> None:
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    server = over_http(f"http://127.0.0.1:{http_server.server_address[1]}/closing")
    async with Episode(server) as episode:
        assert (await episode.use("echo", text="a")).outcome.output == "a s1"
        http_server.shutdown()
        http_server.server_close()
        with pytest.raises(ToolUnavailable, match="ConnectError"):
            await episode.use("echo", text="a")
