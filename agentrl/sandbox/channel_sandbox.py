"""A sandbox as the rest of agentrl sees it: the `Sandbox` protocol over a channel, the same for every backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import SandboxError
from agentrl.records import ExecResult, SandboxSpec
from agentrl.sandbox import arguments, frames
from agentrl.sandbox.channel import Channel

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time after a program's limit in which the exec server must report it; then the program is killed from outside."""
FILE_S = 25.0
HANG_UP_S = 3.0

Destroy = Callable[[bool], Awaitable[None]]
"""Removes what the backend made. The argument: whether the sandbox's own main process is known to have ended."""


class ChannelSandbox:
    """One sandbox, whose exec server is at the other end of `channel`. Programs run one at a time; a second call waits its turn.

    A program that times out takes every process of the sandbox with it; one that ends by itself may leave others running.
    """

    def __init__(self, name: str, spec: SandboxSpec, channel: Channel, destroy: Destroy) -> None:
        self.id = name
        self.spec = spec
        self._channel = channel
        self._destroy = destroy
        self._turn = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._when_closed: list[Callable[[], None]] = []
        self._restored = False
        self._sessions: set[str] = set()  # asked for so far

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Runs a program with its own pipes. Each of stdout and stderr keeps its first and last `output_bytes / 2` bytes."""
        fields = arguments.program(argv, env) | arguments.limits(timeout_s, output_bytes)
        return await self._run("exec", fields, arguments.content(stdin, "stdin"))

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """What `python3 -I -c code` gives, from a fork of a warm interpreter that has run nobody's code before.

        With `session`, in the interpreter of that name, which lives on and keeps its names; four names in the life of a sandbox.
        """
        fields = {"session": arguments.session_name(session)} | arguments.limits(timeout_s, output_bytes)
        result = await self._run("python", fields, arguments.code(code))
        first = bool(session) and session not in self._sessions
        self._sessions |= {session}
        return replace(result, restarted=True) if first and self._restored else result

    async def _run(self, operation: str, program: Mapping[str, Any], body: bytes) -> ExecResult:
        async with self._turn:
            reply = await self._channel.call(
                operation,
                program,
                body=body,
                schema=frames.SESSION_RESULT if program.get("session") else frames.RESULT,
                max_body=2 * (program["output_bytes"] + frames.CUT_MARK_BYTES),
                timeout_s=program["timeout_s"] + GRACE_S,
            )
        try:
            return frames.parse_result(reply.fields, reply.body)
        except SandboxError:
            await self.close()
            raise

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Bytes of a regular file; a link anywhere in the path is refused with `ValueError`."""
        request = {"path": arguments.plain_path(path), "max_bytes": arguments.size(max_bytes, "max_bytes", arguments.MAX_READ_BYTES)}
        async with self._turn:
            reply = await self._channel.call("read", request, schema=frames.CHUNK, max_body=max_bytes, timeout_s=FILE_S)
        return reply.body

    async def write(self, path: str, data: bytes) -> None:
        """Replaces `path` (a link is replaced, not followed). `ValueError` when there is no room or the path is refused."""
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Writes several files in one round trip; with none, shows that the sandbox answers."""
        contents = arguments.contents(files)
        listing = [[path, len(data)] for path, data in contents.items()]
        async with self._turn:
            await self._channel.call("write", {"files": listing}, body=b"".join(contents.values()), timeout_s=FILE_S)

    async def snapshot(self) -> bytes:
        """The working directory as a tar archive: regular files, folders, links as links. Programs stand still meanwhile.

        Names, permission bits and times are kept, and files that share one content still do. Pipes, sockets and devices are left
        out, and modes that close a file to its owner are no obstacle.
        Raises `ValueError` when the working directory is too large, and for no other reason: more than the sandbox's `disk_mb`,
        20,000 entries, 64 levels or 20 s of work. The archive is hostile data: hand it to `open(snapshot=...)`, never unpack it
        on the host.
        """
        limit = (self.spec.disk_mb << 20) + (32 << 20)  # tar headers of 20,000 entries
        async with self._turn:
            request = {"max_bytes": limit}
            reply = await self._channel.call("snapshot", request, schema=frames.CHUNK, max_body=limit, timeout_s=2 * FILE_S)
        return reply.body

    async def restore(self, archive: bytes) -> None:
        """Unpacks a snapshot into the working directory, inside the sandbox. What sessions held is not in it, and they will say so."""
        self._restored = True
        async with self._turn:
            await self._channel.call("restore", body=arguments.content(archive, "a snapshot"), timeout_s=2 * FILE_S)

    async def pause(self) -> None:
        """Stops every program, and its clock; may be called while one runs. Memory stays in use. Who is woken all the same is killed."""
        self._channel.pause_deadlines()
        await self._channel.call("pause", timeout_s=GRACE_S)

    async def resume(self) -> None:
        """Lets the programs go on."""
        await self._channel.call("resume", timeout_s=GRACE_S)
        self._channel.resume_deadlines()

    async def close(self) -> None:
        """Destroys the sandbox. Idempotent; carried through even when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close sandbox {self.id}")
        await asyncio.shield(self._closing)

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, after the sandbox is destroyed; at once when it is already."""
        if self._closing is not None and self._closing.done():
            callback()
        else:
            self._when_closed.append(callback)

    async def _close(self) -> None:
        try:
            ended = await self._channel.close(HANG_UP_S)
            await self._destroy(ended)
        except SandboxError as error:  # what could not be removed now is found by its label later (agentrl.sandbox.reaper)
            log.warning("sandbox %s could not be removed: %s", self.id, error)
        finally:
            for callback in self._when_closed:
                callback()
