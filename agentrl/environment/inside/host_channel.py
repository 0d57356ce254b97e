"""The host's side of the channel to agentrl. This module runs outside agentrl's Python environment, so it imports only the standard
library.

    python HOST_SCRIPT.py FD             serves requests on the socket FD
    python HOST_SCRIPT.py describe FILE  reads a configuration from standard input and writes the description of its tasks to FILE

Messages are lines of JSON: `{"id", "method", "params"}` and `{"id", "result"}` or `{"id", "error": {"blame", "message"}}`, in both
directions, and `{"cancel": id}` from agentrl. A request from the host also has `"for"`, the id of the request to which it belongs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

MAX_MESSAGE = 96 << 20
MAX_TEXT = 4000
TASK, POLICY, INFRASTRUCTURE = "task", "policy", "infrastructure"

Handler = Callable[[dict[str, Any], "Caller"], Awaitable[Any]]


class Fault(Exception):
    """Raised if a request fails, with the blame: `TASK`, `POLICY` or `INFRASTRUCTURE`."""

    def __init__(self, blame: str, message: str) -> None:
        super().__init__(message)
        self.blame = blame


class Channel:
    """Answers requests with `handlers`. Each request runs in a task of the event loop."""

    def __init__(self, fd: int, handlers: dict[str, Handler]) -> None:
        self._socket = socket.socket(fileno=fd)
        self._handlers = {"ping": _ping, **handlers}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)

    async def serve(self) -> None:
        """Serves requests until agentrl closes the socket."""
        threading.Thread(target=_die_with, args=(self._socket.fileno(),), daemon=True).start()
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_MESSAGE)
        while line := await reader.readline():
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "method" in message:
            number = message["id"]
            self._running[number] = asyncio.create_task(self._answer(number, message["method"], message.get("params") or {}))
        elif "cancel" in message:
            if (task := self._running.get(message["cancel"])) is not None:
                task.cancel()
        elif (waiting := self._waiting.get(message["id"])) is not None and not waiting.done():
            if "error" in message:
                waiting.set_exception(Fault(message["error"]["blame"], message["error"]["message"]))
            else:
                waiting.set_result(message["result"])

    async def _answer(self, number: int, method: str, params: dict[str, Any]) -> None:
        answer: dict[str, Any]
        try:
            answer = {"result": await self._handlers[method](params, Caller(self, number))}
            json.dumps(answer, allow_nan=False)  # as `send` does
        except asyncio.CancelledError:
            answer = {"error": {"blame": INFRASTRUCTURE, "message": "cancelled"}}
        except Fault as fault:
            answer = {"error": {"blame": fault.blame, "message": str(fault)[:MAX_TEXT]}}
        except BaseException as error:  # including a SystemExit from third-party code
            answer = {"error": {"blame": INFRASTRUCTURE, "message": describe_error(error)}}
        finally:
            del self._running[number]
        await self.send({"id": number, **answer})

    async def request(self, owner: int, method: str, params: dict[str, Any]) -> Any:
        """Sends a request to agentrl and returns its result. Raises `Fault` if agentrl reports an error."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send({"id": number, "for": owner, "method": method, "params": params})
            return await waiting
        finally:
            del self._waiting[number]

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises `ValueError` if it contains a number that is not finite, because agentrl reads strict JSON."""
        self._writer.write(json.dumps(message, allow_nan=False).encode() + b"\n")
        await self._writer.drain()


class Caller:
    """Sends requests to agentrl on behalf of the request that a handler answers."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = channel, number

    async def request(self, method: str, **params: Any) -> Any:
        """Sends a request that belongs to the request being answered. Raises `Fault` if agentrl reports an error."""
        return await self._channel.request(self._number, method, params)


async def _ping(params: dict[str, Any], caller: Caller) -> None:
    """Answers a ping, unless the event loop is blocked."""


def _die_with(fd: int) -> None:
    """Waits until agentrl closes the socket or exits, then kills this process and the processes that it started, even if third-party code
    blocks the event loop."""
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an exception, cut to `MAX_TEXT` characters."""
    text = "its text cannot be read"
    with contextlib.suppress(Exception):
        text = str(error)
    return f"{type(error).__name__}: {text}"[:MAX_TEXT]


def main(
    describe: Callable[[dict[str, Any]], Any], serve: Callable[[Channel, dict[str, Any]], Awaitable[None]], *handlers: Handler
) -> None:
    """Runs a host script.

    Args:
        describe: returns the description of a configuration's tasks as JSON data, or raises `Fault`.
        serve: runs until the channel closes. The second argument is the configuration.
        handlers: functions that handle requests; the method of a request is the name of its handler.
    """
    sys.path.append(sys.path.pop(0))  # this folder comes last, so that it hides no modules of tasks
    if sys.argv[1] == "describe":
        try:
            result = {"result": describe(json.load(sys.stdin))}
        except Fault as fault:
            result = {"error": {"blame": fault.blame, "message": str(fault)[:MAX_TEXT]}}
        except BaseException as error:
            result = {"error": {"blame": TASK, "message": describe_error(error)}}
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            json.dump(result, file)
        return
    config = json.load(sys.stdin)
    channel = Channel(int(sys.argv[1]), {handler.__name__: handler for handler in handlers})
    asyncio.run(_until_closed(channel, serve(channel, config)))


async def _until_closed(channel: Channel, serving: Awaitable[None]) -> None:
    """Runs until the channel closes or `serving` returns. An exception in `serving` terminates the process with a traceback."""
    tasks = {asyncio.ensure_future(channel.serve()), asyncio.ensure_future(serving)}
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
