"""The host's end of the connection, with peers that lie, stall and close it."""

import asyncio
import json
import socket

import pytest

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import SandboxSpec
from agentrl.sandbox import frames
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.frames import FrameError


class Peer:
    """The sandbox's end of a channel."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, header, body=b""):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.writer.write(frames.PREFIX.pack(len(text), len(body)) + text + body)

    async def request(self):
        sizes = frames.PREFIX.unpack(await self.reader.readexactly(8))
        header, body = [await self.reader.readexactly(size) for size in sizes]
        return json.loads(header), body


@pytest.fixture
async def pair():
    host_end, sandbox_end = socket.socketpair()
    channel = Channel(*await asyncio.open_unix_connection(sock=host_end), name="test")
    peer = Peer(*await asyncio.open_unix_connection(sock=sandbox_end))
    peer.send({"id": 0, "ok": True, "version": 1})
    await channel.hello()
    yield channel, peer
    peer.writer.close()
    await channel.close(1.0)


async def answer(channel, peer, header, body=b"", **options):
    """The result of a call that the peer answers with `header` (its id filled in) and `body`."""
    call = asyncio.create_task(channel.call("op", timeout_s=60.0, **options))
    request, _ = await peer.request()
    peer.send({"id": request["id"], **header} if isinstance(header, dict) else header, body)
    return await call


async def test_reply_and_chunks(pair):
    channel, peer = pair
    assert (await answer(channel, peer, {"ok": True}, b"data", max_body=4))[1] == b"data"
    call = asyncio.create_task(channel.call("op", schema=frames.CHUNK, max_body=6, timeout_s=60.0))
    number = (await peer.request())[0]["id"]
    for more, body in ((True, b"abc"), (True, b"de"), (False, b"f")):
        peer.send({"id": number, "ok": True, "more": more}, body)
    assert (await call)[1] == b"abcdef"


@pytest.mark.parametrize(
    ("kind", "error"), [("not_found", FileNotFoundError), ("too_large", ValueError), ("refused", ValueError), ("busy", SandboxError)]
)
async def test_error_replies_raise_typed_exceptions_and_keep_the_channel_usable(pair, kind, error):
    channel, peer = pair
    with pytest.raises(error, match="why"):
        await answer(channel, peer, {"ok": False, "error": kind, "message": "why"})
    await answer(channel, peer, {"ok": True})


@pytest.mark.parametrize(
    "header",
    [
        {"ok": True, "surprise": 1},
        {"ok": False, "error": "made_up", "message": ""},
        {"ok": False},
        {"ok": 1},
        {"id": 99, "ok": True},
        b"not json",
        b"[" * 10000,
        b"x" * (frames.MAX_REPLY_HEADER + 1),
    ],
)
async def test_invalid_reply_breaks_the_channel_permanently(pair, header):
    channel, peer = pair
    with pytest.raises(SandboxError):
        await answer(channel, peer, header)
    assert channel.broken
    with pytest.raises(SandboxError, match="gone"):
        await channel.call("op", timeout_s=60.0)


async def test_oversized_body_is_refused_before_it_is_read(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", max_body=1000, timeout_s=60.0))
    number = (await peer.request())[0]["id"]
    text = json.dumps({"id": number, "ok": True}).encode()
    peer.writer.write(frames.PREFIX.pack(len(text), 0xFFFFFFFF) + text)
    with pytest.raises(SandboxError, match="exceeds the limit"):
        await call


async def test_chunks_share_one_limit(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", schema=frames.CHUNK, max_body=10, timeout_s=60.0))
    number = (await peer.request())[0]["id"]
    for _ in range(3):
        peer.send({"id": number, "ok": True, "more": True}, b"12345")
    with pytest.raises(SandboxError, match="exceeds the limit"):
        await call


async def test_empty_chunk_is_refused(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", schema=frames.CHUNK, max_body=10, timeout_s=60.0))
    peer.send({"id": (await peer.request())[0]["id"], "ok": True, "more": True})
    with pytest.raises(SandboxError, match="piece of a reply is empty"):
        await call


async def test_error_messages_are_printable(pair):
    channel, peer = pair
    with pytest.raises(SandboxError) as error:
        await answer(channel, peer, {"ok": False, "error": "failed", "message": "\x1b[2Jline\nnext"})
    assert str(error.value).isprintable() and "line" in str(error.value)


@pytest.mark.slow
async def test_silence_is_a_timeout_and_breaks_the_channel(pair):
    channel, _ = pair
    with pytest.raises(SandboxTimeout):
        await channel.call("op", timeout_s=0.05)
    assert channel.broken


async def test_closed_connection_fails_calls_in_progress(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", timeout_s=60.0))
    await peer.request()
    peer.writer.close()
    with pytest.raises(SandboxError, match="ended"):
        await call


async def test_cancelled_call_breaks_the_channel(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", timeout_s=60.0))
    await peer.request()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(SandboxError, match="op was cancelled"):
        await channel.call("op", timeout_s=60.0)


@pytest.mark.slow
async def test_paused_deadlines_let_a_call_take_longer(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", timeout_s=2.0))
    await asyncio.sleep(0)  # the call has started, and no time has passed
    channel.pause_deadlines()
    number = (await peer.request())[0]["id"]
    await asyncio.sleep(2.2)
    channel.resume_deadlines()
    peer.send({"id": number, "ok": True})
    await call


@pytest.mark.slow
async def test_pausing_does_not_revive_an_expired_deadline(pair):
    channel, peer = pair
    call = asyncio.create_task(channel.call("op", timeout_s=60.0))
    number = (await peer.request())[0]["id"]
    waiting = channel._calls[number]
    waiting.deadline.reschedule(0.0)
    await asyncio.sleep(0)
    assert waiting.deadline.expired()
    assert not call.done()
    channel.pause_deadlines()
    channel.resume_deadlines()
    with pytest.raises(SandboxTimeout):
        await call


async def test_forged_program_result_destroys_the_sandbox(pair):
    channel, peer = pair
    destroyed = []

    async def destroy(ended):
        destroyed.append(ended)

    sandbox = ChannelSandbox("test", SandboxSpec(image="none"), channel, destroy)
    run = asyncio.create_task(sandbox.python("print(1)", timeout_s=60.0))
    request, body = await peer.request()
    assert (request["op"], body) == ("python", b"print(1)")
    peer.send({"id": request["id"], "ok": True, "exit": 0, "reason": "", "wall_s": -1.0, "truncated": False, "stdout": 0})
    await asyncio.sleep(0.05)
    peer.writer.close()
    with pytest.raises(FrameError):
        await run
    assert destroyed == [True]


@pytest.mark.parametrize("path", ["/etc/passwd", "..", "a/../b", "", ".", "a//b", "a/", "x\0y", "/".join("d" * 70)])
async def test_invalid_paths_never_reach_the_sandbox(pair, path):
    channel, _ = pair

    async def destroy(ended):
        raise AssertionError("nothing to destroy")

    sandbox = ChannelSandbox("test", SandboxSpec(image="none"), channel, destroy)
    with pytest.raises(ValueError, match="plain path"):
        await sandbox.read(path, max_bytes=1)
    with pytest.raises(ValueError, match="plain path"):
        await sandbox.write(path, b"")
