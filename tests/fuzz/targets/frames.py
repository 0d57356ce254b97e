"""The host's connection to an exec server: for any received bytes, every call ends with a result or a typed error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.frames import CUT_MARK_BYTES
from tests.fuzz import mutators
from tests.fuzz.target import Check, Target, must

OUTPUT_BYTES = 1000
READ_BYTES = 500
SNAPSHOT_BYTES = 33 << 20


class Memory(asyncio.Transport):
    """A connection without another end: what is written is discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False

    def write(self, data: Any) -> None: ...

    def write_eof(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True


def prepare(scratch: Path) -> Check:
    loop = asyncio.new_event_loop()

    def check(data: bytes) -> None:
        loop.run_until_complete(asyncio.wait_for(_session(data), 30.0))

    return check


async def _session(data: bytes) -> None:
    """A driver's calls on a sandbox whose exec server has sent `data` and closed the connection."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport = Memory()
    protocol.connection_made(transport)
    channel = Channel(reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop()), name="fuzzed")
    reader.feed_data(data)
    reader.feed_eof()
    sandbox = ChannelSandbox("fuzzed", SandboxSpec(image="-", disk_mb=1), channel, _destroyed)
    try:
        await channel.hello()
        await _use(sandbox)
    except SandboxError:
        pass
    finally:
        await sandbox.close()
        protocol.connection_lost(None)
    must(channel.broken, "a closed channel still works")


async def _use(sandbox: ChannelSandbox) -> None:
    limit = 2 * (OUTPUT_BYTES + CUT_MARK_BYTES)
    for session in ("", "agent"):
        result = await sandbox.python("pass", timeout_s=1.0, output_bytes=OUTPUT_BYTES, session=session)
        must(len(result.stdout) + len(result.stderr) <= limit, "more output than requested")
        must((result.exit_code is None) == bool(result.reason), "a program that both ended and was killed")
        must(result.wall_s >= 0, "a program with a negative duration")
    for limit in (READ_BYTES, SNAPSHOT_BYTES):
        try:
            data = await (sandbox.read("a", max_bytes=limit) if limit == READ_BYTES else sandbox.snapshot())
            must(len(data) <= limit, "a file larger than was allowed")
        except (FileNotFoundError, ValueError) as error:
            must(str(error).isprintable() and len(str(error)) <= 500, "a message with control characters")
    await sandbox.pause()
    await sandbox.resume()
    with contextlib.suppress(FileNotFoundError, ValueError):
        await sandbox.write("a", b"x")


async def _destroyed(ended: bool) -> None: ...


def frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("!II", len(text), len(body)) + text + body


HELLO = frame({"id": 0, "ok": True, "version": 1})
RAN = {"ok": True, "exit": 0, "reason": "", "wall_s": 0.25, "truncated": False, "stdout": 3}
SESSION = {**RAN, "restarted": False, "ended": False}


def seeds() -> Sequence[bytes]:
    session = [
        *(HELLO, frame({"id": 1, **RAN}, b"outerr"), frame({"id": 2, **SESSION}, b"outerr")),
        *(frame({"id": 3, "ok": True, "more": True}, b"con"), frame({"id": 3, "ok": True, "more": False}, b"tent")),
        frame({"id": 4, "ok": False, "error": "too_large", "message": "the working directory is larger than a snapshot may be"}),
        *(frame({"id": 5, "ok": True}), frame({"id": 6, "ok": True})),
        frame({"id": 7, "ok": False, "error": "refused", "message": "'a' cannot be replaced"}),
    ]
    killed = frame({"id": 1, **RAN, "exit": None, "reason": "timeout"}, b"outerr")
    return [b"".join(session[:count]) for count in range(1, len(session) + 1)] + [HELLO + killed, HELLO + HELLO, b""]


target = Target(
    name="frames",
    about="responses of an exec server",
    prepare=prepare,
    seeds=seeds,
    brief=5_000,
    mutate=mutators.frames,
    words=(
        b'"ok":true',
        b'"ok":false',
        b'"more":true',
        b'"id":0',
        b'"exit":null',
        b'"error":"busy"',
        b'"wall_s":NaN',
        b'"stdout":-1',
        b"\0\0\0\0",
    ),
)
