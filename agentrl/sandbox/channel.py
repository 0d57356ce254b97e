"""The host's end of the connection to a sandbox's exec server, which sends requests and checks replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.sandbox import frames
from agentrl.sandbox.frames import FrameError, Schema
from agentrl.sandbox.inside.wire import PREFIX

RELIEVED_S = 35.0
"""Extra time for a reply after the programs that blocked the exec server were killed."""
UNRELIEVED_S = 5.0
"""Extra time for a reply if no program blocked the exec server: a suspended machine can also delay a reply."""


Reply = tuple[Mapping[str, Any], bytes]
"""The checked fields and the body."""


@dataclass(slots=True, kw_only=True)
class _Call:
    schema: Schema
    max_body: int  # maximum bytes over all frames of the reply
    done: asyncio.Future[Reply]
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    deadline: asyncio.Timeout | None = None
    left_s: float | None = None  # time that was left when the deadline was suspended


class Channel:
    """Sends requests to an exec server with ids and deadlines, and is the only reader of the connection. A protocol violation breaks the
    channel permanently."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, name: str, relieve: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """`relieve` kills the sandbox's programs from outside, and returns whether they may have delayed a reply. None disables this."""
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
        """Whether the channel is broken, so that every later call fails."""
        return self._error is not None

    async def hello(self) -> None:
        """Waits for the server's greeting. The caller sets the deadline. Raises `SandboxError` if the connection is closed or the greeting
        is invalid."""
        call = self._expect(0, frames.HELLO, 0)
        self._task = asyncio.create_task(self._read(), name=f"sandbox channel {self.name}")
        fields, _ = await call.done
        if fields["version"] != 1:
            raise self._break(FrameError("the exec server has a different protocol version"))

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
        """Sends a request and returns its reply, whose header must match `schema` and whose body may have up to `max_body` bytes.

        Raises `FileNotFoundError` or `ValueError` if the server refuses the request, `ValueError` if the request is too large,
        `SandboxTimeout` if there is no reply in time, and `SandboxError` if the sandbox is gone or busy or the reply is invalid. A call
        that times out or is cancelled breaks the channel, because its reply could arrive during a later call. After `timeout_s`, programs
        that blocked the server are killed, and the server gets `RELIEVED_S` more. If no program blocked the server, the server gets
        `UNRELIEVED_S` more.
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
            raise self._break(SandboxError(f"sandbox {self.name}: connection lost during {operation}: {error}")) from None
        except asyncio.CancelledError:
            self._break(SandboxError(f"{operation} was cancelled"))
            raise
        finally:
            self._calls.pop(number, None)

    async def _reply(self, call: _Call) -> Reply:
        await self._writer.drain()
        return await asyncio.shield(call.done)

    async def detach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], Awaitable[bool]]]:
        """Detaches the connection after the greeting. Returns the streams of the connection and `relieve`. Every later call fails.

        Raises `SandboxError` if the channel is broken, for example because the server has sent a reply after its greeting.
        """
        assert self._task is not None and self._relieve is not None
        task, self._task = self._task, None
        task.cancel()
        await asyncio.wait([task])
        if self._error is not None:
            raise SandboxError(f"sandbox {self.name}: {self._error}")
        self._error = SandboxError("detached")
        return self._reader, self._writer, self._relieve

    def pause_deadlines(self) -> None:
        """Suspends the deadlines of calls in progress until `resume_deadlines` is called. Used while the sandbox is paused."""
        now = asyncio.get_running_loop().time()
        for call in self._calls.values():
            if call.deadline is not None and not call.deadline.expired() and (when := call.deadline.when()) is not None:
                call.left_s = when - now
                call.deadline.reschedule(None)

    def resume_deadlines(self) -> None:
        """Resumes the deadlines that `pause_deadlines` suspended, with the time that was left."""
        now = asyncio.get_running_loop().time()
        for call in self._calls.values():
            if call.deadline is not None and not call.deadline.expired() and call.left_s is not None:
                call.deadline.reschedule(now + call.left_s)
                call.left_s = None

    async def close(self, timeout_s: float) -> bool:
        """Closes the connection, which stops the server and the sandbox. Returns whether the server closed its end within `timeout_s`.
        After `detach`, leaves the connection open and returns False."""
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
        """Fails all calls in progress and closes the connection. Returns `error`, which the caller raises."""
        if self._error is None:
            self._error = error
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(SandboxError(f"sandbox {self.name}: {error}"))
                call.done.exception()  # marks it as retrieved: a cancelled caller does not retrieve it
        return error

    async def _read(self) -> bool:
        """Reads replies until the connection is closed. Returns True if the server closed the connection, and False after a protocol
        violation."""
        try:
            while self._error is None:
                await self._read_reply()
            while await self._reader.read(65536):
                pass
        except (asyncio.IncompleteReadError, OSError):
            self._break(SandboxError("the exec server ended"))
        except SandboxError as error:
            self._break(error)
            self._writer.transport.abort()
            return False
        return True

    async def _read_reply(self) -> None:
        header_size, body_size = frames.parse_prefix(await self._reader.readexactly(PREFIX.size))
        header = frames.parse_header(await self._reader.readexactly(header_size))
        call = self._calls.get(header["id"])
        if call is None:
            raise FrameError("a reply does not match any request")
        call.size += body_size
        if call.size > call.max_body:
            raise FrameError(f"a reply of {call.size} bytes exceeds the limit of {call.max_body}")
        body = await self._reader.readexactly(body_size) if body_size else b""
        if call.done.done():
            return
        if not header["ok"]:
            call.done.set_exception(_error(*frames.parse_failure(header), self.name))
            return
        fields = frames.check_fields(header, call.schema)
        more = fields.get("more", False)
        if more and not body:
            raise FrameError("a piece of a reply is empty")
        call.pieces.append(body)
        if not more:
            call.done.set_result((fields, b"".join(call.pieces)))


def _error(kind: str, message: str, name: str) -> Exception:
    if kind == "not_found":
        return FileNotFoundError(message)
    if kind in ("too_large", "refused"):
        return ValueError(message)
    return SandboxError(f"sandbox {name}: {message}")
