"""The host's end of the connection to a sandbox's exec server: requests out, checked replies in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.sandbox import frames
from agentrl.sandbox.frames import FrameError, Schema

RELIEVED_S = 35.0
"""Extra time for an answer after the programs that blocked the exec server have been killed."""
UNRELIEVED_S = 5.0
"""Extra time for an answer if no program blocked the exec server: the machine may have been stopped."""


@dataclass(slots=True, kw_only=True)
class Reply:
    """A checked reply: header fields and body."""

    fields: Mapping[str, Any]
    body: bytes


@dataclass(slots=True, kw_only=True)
class _Call:
    schema: Schema
    max_body: int  # over all frames of the reply
    done: asyncio.Future[Reply]
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    deadline: asyncio.Timeout | None = None
    left_s: float | None = None  # what was left of the deadline when the clocks were stopped


class Channel:
    """Request ids, deadlines and the one reader of a connection. The first thing out of order breaks the channel for good."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, name: str, relieve: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """`relieve` ends the programs of the sandbox from outside, and returns whether they may have delayed an answer."""
        self.name = name
        self._relieve = relieve
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._error: SandboxError | None = None
        self._task: asyncio.Task[bool] | None = None

    @property
    def broken(self) -> bool:
        return self._error is not None

    async def hello(self) -> None:
        """Waits for the server's greeting; the caller bounds the wait."""
        call = self._expect(0, frames.HELLO, 0)
        self._task = asyncio.create_task(self._read(), name=f"sandbox channel {self.name}")
        if (await call.done).fields["version"] != 1:
            raise self._break(FrameError("the exec server speaks another version"))

    async def call(
        self,
        operation: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: bytes = b"",
        schema: Schema = frames.EMPTY,
        max_body: int = 0,
        timeout_s: float,
    ) -> Reply:
        """One request and its reply, whose header must match `schema` and whose body may have `max_body` bytes.

        Raises `FileNotFoundError` or `ValueError` for what the server refuses, `SandboxTimeout` when no reply comes in
        `timeout_s`, `SandboxError` when the sandbox is gone or answers nonsense. A call that is cancelled or late breaks
        the channel, because its reply would be mistaken for nobody's. If programs of the sandbox kept the server from answering, they
        are killed, and the server gets `RELIEVED_S` more.
        """
        if self._error is not None:
            raise SandboxError(f"sandbox {self.name} is gone: {self._error}")
        self._number += 1
        number = self._number
        data = frames.encode({"id": number, "op": operation, **(arguments or {})}, body)
        call = self._expect(number, schema, max_body)
        start = asyncio.get_running_loop().time()
        try:
            try:
                async with asyncio.timeout(timeout_s) as call.deadline:
                    self._writer.write(data)
                    return await self._reply(call)
            except TimeoutError:
                extra_s = RELIEVED_S if self._relieve is not None and await self._relieve() else UNRELIEVED_S
            async with asyncio.timeout(extra_s) as call.deadline:
                return await self._reply(call)
        except TimeoutError:
            waited_s = asyncio.get_running_loop().time() - start
            raise self._break(SandboxTimeout(f"sandbox {self.name}: no answer to {operation} in {waited_s:.1f} s")) from None
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise self._break(SandboxError(f"sandbox {self.name}: connection lost in {operation}: {error}")) from None
        except asyncio.CancelledError:
            self._break(SandboxError(f"{operation} was abandoned"))
            raise
        finally:
            self._calls.pop(number, None)

    async def _reply(self, call: _Call) -> Reply:
        await self._writer.drain()
        return await asyncio.shield(call.done)

    def pause_deadlines(self) -> None:
        """Calls in flight wait without a deadline until `start_clocks`: the sandbox is paused."""
        now = asyncio.get_running_loop().time()
        for call in self._calls.values():
            if call.deadline is not None and not call.deadline.expired() and (when := call.deadline.when()) is not None:
                call.left_s = when - now
                call.deadline.reschedule(None)

    def resume_deadlines(self) -> None:
        """Calls that were in flight at `stop_clocks` have left what they had left then."""
        now = asyncio.get_running_loop().time()
        for call in self._calls.values():
            if call.deadline is not None and not call.deadline.expired() and call.left_s is not None:
                call.deadline.reschedule(now + call.left_s)
                call.left_s = None

    async def close(self, timeout_s: float) -> bool:
        """Hangs up, which ends the server and so the sandbox. True when the server's end closed in `timeout_s`."""
        self._break(SandboxError("closed"))
        if self._task is None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._task)
        except TimeoutError:
            return False
        finally:
            self._task.cancel()
            self._writer.transport.abort()

    def _expect(self, number: int, schema: Schema, max_body: int) -> _Call:
        call = _Call(schema=schema, max_body=max_body, done=asyncio.get_running_loop().create_future())
        self._calls[number] = call
        return call

    def _break(self, error: SandboxError) -> SandboxError:
        """Fails everything that waits and hangs up; gives `error` back to be raised."""
        if self._error is None:
            self._error = error
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(SandboxError(f"sandbox {self.name}: {error}"))
                call.done.exception()  # marked as seen: a caller that has gone does not fetch it
        return error

    async def _read(self) -> bool:
        """Takes replies until the connection ends; after a break it only waits for that end. True when the server ended it."""
        try:
            while self._error is None:
                await self._take()
            while await self._reader.read(65536):
                pass
        except (asyncio.IncompleteReadError, OSError):
            self._break(SandboxError("the exec server ended"))
        except SandboxError as error:
            self._break(error)
            self._writer.transport.abort()
            return False
        return True

    async def _take(self) -> None:
        header_size, body_size = frames.parse_prefix(await self._reader.readexactly(frames.PREFIX.size))
        header = frames.parse_header(await self._reader.readexactly(header_size))
        call = self._calls.get(header["id"])
        if call is None:
            raise FrameError("a reply to nothing")
        call.size += body_size
        if call.size > call.max_body:
            raise FrameError(f"a reply of {call.size} bytes where {call.max_body} were allowed")
        body = await self._reader.readexactly(body_size) if body_size else b""
        if call.done.done():
            return
        if not header["ok"]:
            call.done.set_exception(_refusal(*frames.parse_failure(header), self.name))
            return
        fields = frames.check_fields(header, call.schema)
        more = fields.get("more", False)
        if more and not body:
            raise FrameError("a piece of nothing")
        call.parts.append(body)
        if not more:
            call.done.set_result(Reply(fields=fields, body=b"".join(call.parts)))


def _refusal(kind: str, message: str, name: str) -> Exception:
    if kind == "not_found":
        return FileNotFoundError(message)
    if kind in ("too_large", "refused"):
        return ValueError(message)
    return SandboxError(f"sandbox {name}: {message}")
