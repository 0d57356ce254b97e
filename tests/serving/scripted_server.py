"""An HTTP server with scripted answers, for answers that a healthy vLLM never gives. Standard library only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HANG = object()  # never answer
DROP = object()  # close the connection without an answer


@dataclass
class Call:
    path: str  # without the query
    query: str
    body: Any


@dataclass
class Later:
    """An answer that is sent when an event is set."""

    when: asyncio.Event
    answer: Any


@dataclass
class ScriptedServer:
    """`answer(call)` returns the JSON of a 200 answer, a `(status, JSON)` pair, a `Later` of either, HANG or DROP."""

    answer: Callable[[Call], Any]
    calls: list[Call] = field(default_factory=list)
    url: str = ""

    def paths(self) -> list[str]:
        return [call.path for call in self.calls]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                length = 0
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
                path, _, query = request.decode().split()[1].partition("?")
                call = Call(path, query, json.loads(body) if body else None)
                self.calls.append(call)
                answer = self.answer(call)
                if answer is HANG:
                    await asyncio.sleep(3600)
                if isinstance(answer, Later):
                    await answer.when.wait()
                    answer = answer.answer
                if answer is DROP:
                    return
                status, content = answer if isinstance(answer, tuple) else (200, answer)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def scripted_server(answer: Callable[[Call], Any]) -> AsyncIterator[ScriptedServer]:
    script = ScriptedServer(answer)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        with suppress(asyncio.CancelledError):  # asyncio's streams would report it as an unhandled error
            await script._serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def generated(token_ids: list[int], /, *, version: str = "3", finish_reason: str = "length", **changes: Any) -> dict[str, Any]:
    """A well-formed answer of vLLM's /inference/v1/generate, with `changes` applied to its only choice."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "token_ids": token_ids,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in token_ids]},
        "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
    }
    return {"request_id": "r", "choices": [choice | changes]}
