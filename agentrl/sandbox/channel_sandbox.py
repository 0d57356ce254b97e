"""The `Sandbox` protocol over a channel, the same for every backend."""

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
from agentrl.sandbox.waiting import ClosesOnce

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long the exec server may take to report a timeout after a program's time limit. After that, the host kills the program."""
FILE_S = 25.0
_CLOSE_S = 3.0
_ARCHIVE_HEADERS_BYTES = 32 << 20  # tar headers of 20,000 entries

Destroy = Callable[[bool], Awaitable[None]]
"""Removes what the backend created. The argument is True if the exec server is known to have exited."""


class ChannelSandbox(ClosesOnce):
    """A sandbox whose exec server is at the other end of `channel`. Programs run one at a time. Calls other than `pause`, `resume` and
    `close` wait until the running program exits.

    If a program times out, every process in the sandbox is killed. A program that exits in time may leave other processes running.
    """

    def __init__(self, name: str, spec: SandboxSpec, channel: Channel, destroy: Destroy) -> None:
        self.id = name
        self.spec = spec
        self._channel = channel
        self._destroy = destroy
        self._turn = asyncio.Lock()
        self._restored = False
        self._sessions: set[str] = set()

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, output_bytes: int = 65536, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Runs a program. Keeps the first and the last `output_bytes / 2` bytes of stdout and of stderr."""
        fields = arguments.program(argv, env) | arguments.limits(timeout_s, output_bytes)
        return await self._run("exec", fields, arguments.content(stdin, "stdin"))

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """Runs `code` as `python3 -I -c` does, but in a fork of a warm interpreter.

        If `session` is set, runs the code in the persistent interpreter of that name, which keeps its variables. A sandbox accepts four
        names; another name raises `ValueError`.
        """
        fields = {"session": arguments.session_name(session)} | arguments.limits(timeout_s, output_bytes)
        result = await self._run("python", fields, arguments.code(code))
        first = bool(session) and session not in self._sessions
        self._sessions |= {session}
        return replace(result, restarted=True) if first and self._restored else result

    async def _run(self, operation: str, fields: Mapping[str, Any], body: bytes) -> ExecResult:
        async with self._turn:
            reply, output = await self._channel.call(
                operation,
                fields,
                body=body,
                schema=frames.SESSION_RESULT if fields.get("session") else frames.RESULT,
                max_body=2 * (fields["output_bytes"] + frames.CUT_MARK_BYTES),
                timeout_s=fields["timeout_s"] + GRACE_S,
            )
        try:
            return frames.parse_result(reply, output)
        except SandboxError:
            await self.close()
            raise

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Returns the bytes of a regular file. Raises `FileNotFoundError`, or `ValueError` if the file has more than `max_bytes` bytes, is
        not a regular file, or has a link in its path."""
        fields = {"path": arguments.plain_path(path), "max_bytes": arguments.size(max_bytes, "max_bytes", arguments.MAX_READ_BYTES)}
        async with self._turn:
            _, body = await self._channel.call("read", fields, schema=frames.CHUNK, max_body=max_bytes, timeout_s=FILE_S)
        return body

    async def write(self, path: str, data: bytes) -> None:
        """Replaces the file `path`, and creates its folders. A link is replaced, not followed. Raises `ValueError` if there is no space, or
        if `path` is invalid, is a folder, or leads through a link."""
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Writes several files in one round trip. If `files` is empty, only checks that the sandbox responds. Raises the errors of `write`,
        after which some of the files may have been written."""
        contents = arguments.contents(files)
        listing = [[path, len(data)] for path, data in contents.items()]
        async with self._turn:
            await self._channel.call("write", {"files": listing}, body=b"".join(contents.values()), timeout_s=FILE_S)

    async def snapshot(self) -> bytes:
        """Returns the working directory as a tar archive of regular files, folders and links, readable or not, with their modes and times.

        All programs are stopped while the archive is created. Hard links are kept; pipes, sockets and devices are omitted. Raises
        `ValueError` only if the directory is too large: an archive of more than `disk_mb` + 32 MiB, or more than 20,000 entries, 64 levels
        or 20 s of work. The archive is untrusted data: pass it to `open(snapshot=...)`, and never unpack it on the host.
        """
        limit = (self.spec.disk_mb << 20) + _ARCHIVE_HEADERS_BYTES
        async with self._turn:
            fields = {"max_bytes": limit}
            _, archive = await self._channel.call("snapshot", fields, schema=frames.CHUNK, max_body=limit, timeout_s=2 * FILE_S)
        return archive

    async def restore(self, archive: bytes) -> None:
        """Unpacks a snapshot into the working directory. Snapshots contain no sessions, so each session's first call reports a restart.
        Raises `ValueError` if the archive is invalid or does not fit; a part of it may then have been unpacked."""
        self._restored = True
        async with self._turn:
            await self._channel.call("restore", body=arguments.content(archive, "a snapshot"), timeout_s=2 * FILE_S)

    async def pause(self) -> None:
        """Stops every program and suspends its time limit, even during a call. The programs keep their memory. A program that keeps
        resuming itself is killed. If no program is running, calls other than `snapshot`, `resume` and `close` raise `SandboxError` until
        `resume`."""
        self._channel.pause_deadlines()
        await self._channel.call("pause", timeout_s=GRACE_S)

    async def resume(self) -> None:
        """Resumes the programs that `pause` stopped."""
        await self._channel.call("resume", timeout_s=GRACE_S)
        self._channel.resume_deadlines()

    async def detach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], Awaitable[bool]]]:
        """See `Channel.detach`. Only `close` may be called afterwards."""
        return await self._channel.detach()

    async def _close(self) -> None:
        try:
            ended = await self._channel.close(_CLOSE_S)
            await self._destroy(ended)
        except SandboxError as error:  # agentrl.sandbox.cleanup finds what remains by its label and removes it later
            log.warning("cannot remove sandbox %s: %s", self.id, error)
