"""A scripted model server with vLLM's `/inference/v1/generate`, and chat completions with and without token ids.

    python server.py SCRIPT.json

The script is JSON: `answers` maps each route to the response bodies of an episode's turns. `delay_s` is the range of seconds that the
server waits before a response (`delay_of`), from the turn `delay_from` on. `end` is the token that ends a message. The server prints its
port and serves until its standard input ends. It is stateless: the number of messages gives the turn, because each turn adds two, the
assistant's and the tool's. It uses only the standard library, so it runs in any environment.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import zlib
from functools import partial
from pathlib import Path

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ASSISTANT = re.compile(rb'"role": *"assistant"')


_REQUEST_ID = re.compile(rb'"request_id": *"([^"]*)"')


def delay_of(request_id: bytes, delay_s: tuple[float, float]) -> float:
    """Returns the seconds that a request waits: evenly distributed, and computable by the client."""
    low, high = delay_s
    return low + (high - low) * zlib.crc32(request_id) / 2**32


class Script:
    """The responses and their delays."""

    def __init__(self, answers: dict[str, list[str]], *, end: int, delay_s: tuple[float, float], delay_from: int) -> None:
        self._answers = {route.encode(): [_response(body.encode()) for body in bodies] for route, bodies in answers.items()}
        self._delay_s, self._delay_from = delay_s, delay_from
        self._end = re.compile(rb"\b%d\b" % end)

    def answer(self, route: bytes, body: bytes) -> tuple[bytes, float]:
        """Returns the response body and the delay in seconds."""
        bodies = self._answers.get(route)
        if bodies is None:  # routes that clients expect of any server: models, health
            return _response(b'{"data":[{"id":"policy","object":"model"}]}'), 0.0
        begins = body.find(b'"token_ids"')
        turn = len(_ASSISTANT.findall(body)) if begins < 0 else self._turn(body, begins)
        named = _REQUEST_ID.search(body) if turn >= self._delay_from else None
        return bodies[min(turn, len(bodies) - 1)], delay_of(named[1], self._delay_s) if named else 0.0

    def _turn(self, body: bytes, begins: int) -> int:
        """The ends of a system message, if there is one, and of the user's come before the first turn."""
        return (len(self._end.findall(body, begins, body.find(b"]", begins))) - 1) // 2


class Connection(asyncio.Protocol):
    """One persistent connection. A client sends a request after it has received the response to the previous one."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._received, 0, head)
        end = head + 4 + (int(length[1]) if length else 0)
        if len(self._received) < end:
            return
        answer, delay = self._script.answer(bytes(self._received[:head]).split(b" ", 2)[1], bytes(self._received[head + 4 : end]))
        del self._received[:end]
        if delay:
            asyncio.get_running_loop().call_later(delay, self._write, answer)
        else:
            self._write(answer)

    def _write(self, answer: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(answer)


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def serve(script: Script) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Connection, script), "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(serve(Script(content["answers"], end=content["end"], delay_s=tuple(content["delay_s"]), delay_from=content["delay_from"])))
