"""Servers of environments for tests: scripted HTTP and OpenEnv servers, which misbehave on request, and real ones in other environments."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".environments" / "openenv" / "bin" / "python"
MOVES = {"type": "object", "properties": {"move": {"enum": ["left", "right"], "type": "string"}}, "required": ["move"]}


def observation(text: str = "you are here", *, reward: Any = 1.0, done: Any = False) -> dict[str, Any]:
    """Returns the answer of an OpenEnv server to a reset or a step."""
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


@dataclass
class FakeOpenEnv:
    """An OpenEnv server. `on_step` and `on_reset` answer on the socket; `pages` are answers to GET requests."""

    schema: Mapping[str, Any] = field(default_factory=lambda: MOVES)
    pages: dict[str, Callable[[], Response]] = field(default_factory=dict)
    on_reset: Callable[[ServerConnection, Any], Awaitable[None]] | None = None
    on_step: Callable[[ServerConnection, Any], Awaitable[None]] | None = None
    on_open: Callable[[ServerConnection], Awaitable[None]] | None = None
    port: int = 0
    open: int = 0
    sessions: int = 0

    @property
    def ref(self) -> str:
        return f"openenv:http://127.0.0.1:{self.port}"

    async def session(self, socket: ServerConnection) -> None:
        self.open, self.sessions = self.open + 1, self.sessions + 1
        try:
            if self.on_open is not None:
                await self.on_open(socket)
            async for text in socket:
                message = json.loads(text)
                handler = {"reset": self.on_reset, "step": self.on_step}.get(message["type"])
                if message["type"] == "close":
                    return
                if handler is None:
                    await socket.send(json.dumps(observation()))
                else:
                    await handler(socket, message["data"])
        finally:
            self.open -= 1

    def page(self, socket: ServerConnection, request: Request) -> Response | None:
        if request.path in self.pages:
            return self.pages[request.path]()
        if request.path == "/ws":
            return None
        return reply({"/schema": {"action": self.schema}, "/metadata": {"description": "A test."}}[request.path])


def reply(data: Any, status: int = 200, **headers: str) -> Response:
    """Returns an HTTP answer with JSON."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Response(
        status, "", Headers({"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}), body
    )


@asynccontextmanager
async def fake_openenv(**settings: Any) -> AsyncIterator[FakeOpenEnv]:
    """Serves an OpenEnv server."""
    fake = FakeOpenEnv(**settings)
    async with serve(fake.session, "127.0.0.1", 0, process_request=fake.page, max_size=1 << 20) as server:
        fake.port = next(iter(server.sockets)).getsockname()[1]
        yield fake


@dataclass
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


Handler = Callable[[HttpRequest, asyncio.StreamWriter], Awaitable[bytes | None]]


@asynccontextmanager
async def http_server(handler: Handler) -> AsyncIterator[str]:
    """Serves HTTP/1.1 and yields the address. The handler returns the bytes of an answer; None closes the connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                answer = await handler(HttpRequest(method, path, headers, body), writer)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


def answer(data: Any, status: int = 200, **headers: str) -> bytes:
    """Returns the bytes of an HTTP answer with JSON."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *(f"{key.replace('_', '-')}: {headers[key]}" for key in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events(*pairs: tuple[str, str]) -> bytes:
    """Returns the bytes of an HTTP answer with server-sent events."""
    body = "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in pairs).encode()
    return f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def real_server(script: str, *arguments: str) -> Iterator[str]:
    """Runs a script of this folder in the environment `openenv`, and yields the address of its server. The script prints its port."""
    process = subprocess.Popen([PYTHON, HERE / script, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
