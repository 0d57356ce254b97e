"""Connections to cells: missing keys, invalid requests, other drivers, lost tunnels, and attacks from a cell's sandboxes."""

import asyncio
import contextlib
import os
import socket
from dataclasses import replace

import pytest

from agentrl.errors import SandboxError
from agentrl.sandbox import BubblewrapBackend, limits
from agentrl.sandbox.attacks import host_steps, run_attacks
from agentrl.sandbox.cell import server, wire
from tests.sandbox.building import FETCH, KEY, SPEC, cell, driver, leftovers
from tests.sandbox.test_egress import Server

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("no_orphans")]


async def connected(address):
    host, port = wire.parse_address(address)
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return sock


async def ends(sock):
    with sock, contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            while await asyncio.get_running_loop().sock_recv(sock, 65536):
                pass


async def test_connection_without_the_key_gets_nothing(root):
    async with cell() as (served, address), driver(root, address, key="f" * 32) as opened:
        host, port = wire.parse_address(address)
        with pytest.raises(SandboxError, match="different key"):
            await opened._request((host, port), {"op": "prepare"})
        recorded = bytearray()
        sock = await connected(address)
        nonce = await wire.greeting(sock)
        await wire.request(sock, KEY.encode(), nonce, {"op": "relieve", "token": "x"})  # a valid exchange, which is then repeated
        sock.close()
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(200), os.urandom(64), bytes(recorded), b"\0" * 64):
            sock = await connected(address)
            await asyncio.get_running_loop().sock_sendall(sock, data)
            if not data:
                sock.shutdown(socket.SHUT_WR)
            await ends(sock)
        assert served._running == {}


async def test_cell_without_the_key_is_not_used(root):
    """A program that listens at a cell's address learns neither the key nor the requested sandboxes, and cannot reply."""

    async def impostor(reader, writer):
        writer.write(bytes(32))
        seen.append(await reader.readexactly(64))
        writer.write(bytes(32) + wire.packed({"ok": True, "token": "x"}))

    seen = []
    listening = await asyncio.start_server(impostor, "127.0.0.1", 0)
    async with listening, driver(root, "127.0.0.1:1") as opened:
        with pytest.raises(wire.CellProtocolError, match="does not have the key"):
            await opened._request(listening.sockets[0].getsockname(), {"op": "prepare"})
        assert KEY.encode() not in seen[0]


async def test_silent_connections_are_dropped_and_do_not_block_drivers(root, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(server, "_MAX_STRANGERS", 4)
    async with cell() as (_, address), driver(root, address) as opened:
        strangers = [await connected(address) for _ in range(20)]
        sandbox = await opened.open(SPEC)
        assert (await sandbox.exec(["true"], timeout_s=20)).ok
        await asyncio.gather(*(ends(sock) for sock in strangers))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": "open"},
        {"op": ["open"]},
        {"op": "open", "code": "x", "spec": {"image": "../../etc"}},
        {"op": "open", "code": "x", "spec": {"image": "x"}, "program_bytes": 1 << 40},
        {"op": "open", "code": "x", "spec": {"image": "x", "memory_mb": -1}},
        {"op": "open", "code": "x", "spec": {"image": "x"}, "timeout_s": 1e9},
        {"op": "tunnel", "token": "guess"},
        {"op": "relieve", "token": {"a": 1}},
    ],
)
async def test_invalid_request_ends_its_connection_only(message, root):
    async with cell() as (served, address), driver(root, address) as opened:
        with contextlib.suppress(SandboxError, OSError):
            sock, reply = await opened._request(wire.parse_address(address), message)
            sock.close()
            assert reply["ok"] is False
        assert served._running == {} and served._free == server.MAX_SANDBOXES
        await opened.prepare(SPEC)


async def test_a_driver_cannot_reach_the_sandboxes_of_another(root):
    async with cell() as (_, address), driver(root, address) as owner, driver(root, address) as stranger:
        sandbox = await owner.open(replace(SPEC, network=("127.0.0.1:9",)))
        for operation in ("relieve", "tunnel"):
            for token in (sandbox.id, "", "0" * 32, None):
                sock, reply = await stranger._request(wire.parse_address(address), {"op": operation, "token": token})
                sock.close()
                assert reply == {"ok": False, "why": "gone", "message": "the cell has no such sandbox"}
        assert (await sandbox.exec(["true"], timeout_s=20)).ok


async def test_driver_cannot_replace_the_exec_server(root, tmp_path):
    """It starts with the rights that it needs to isolate itself: with them it could reach the sandboxes of other drivers."""
    (tmp_path / "server.py").write_text("import time\ntime.sleep(60)\n")
    async with cell() as (served, address), driver(root, address) as opened:
        with pytest.raises(SandboxError, match="does not accept a replacement of the exec server"):
            await opened.open(SPEC, timeout_s=5, server=tmp_path / "server.py")
        assert not served._running and leftovers() == []


async def test_lost_tunnels_do_not_end_the_network_of_a_sandbox(root):
    """A driver whose connections break, one after the other, offers new ones. Programs get the one that works."""
    async with Server() as allowed, cell() as (served, address), driver(root, address) as opened:
        sandbox = await opened.open(replace(SPEC, network=(f"127.0.0.1:{allowed.port}",)))
        (token,) = served._running
        for _ in range(6):
            sock = await connected(address)
            nonce = await wire.greeting(sock)
            reply = asyncio.create_task(wire.request(sock, KEY.encode(), nonce, {"op": "tunnel", "token": token}))
            await asyncio.sleep(0.2)
            reply.cancel()
            await asyncio.wait([reply])
            sock.close()
        for _ in range(3):
            assert (await sandbox.python(FETCH.format(allowed.port), timeout_s=30)).stdout == "hi\n"


async def test_messages_are_bounded():
    near, far = socket.socketpair()
    with near, far:
        for sock in (near, far):
            sock.setblocking(False)
        for data, text in ((b"\xff\xff\xff\xff", "at most"), (b"\0\0\0\x02[]", "not a JSON object"), (b"\0\0\0\x01{", "not JSON")):
            await asyncio.get_running_loop().sock_sendall(near, data)
            with pytest.raises(wire.CellProtocolError, match=text):
                await wire.receive(far)
        deep = b"[" * 60000
        await asyncio.get_running_loop().sock_sendall(near, len(deep).to_bytes(4, "big") + deep)
        with pytest.raises(wire.CellProtocolError, match="not JSON"):
            await wire.receive(far)
    with pytest.raises(SandboxError, match="at most"):
        wire.packed({"x": "y" * 70000})


def on_the_cells_network(patch):
    view = BubblewrapBackend._view
    patch.setattr(BubblewrapBackend, "_view", lambda *arguments: [word for word in view(*arguments) if word != "--unshare-net"])


def with_the_cells_key(patch):
    files = limits.system_files
    patch.setattr(limits, "system_files", lambda options: {name: f"{text}# {KEY}\n" for name, text in files(options).items()})


def with_long_timeouts(patch):
    patch.setattr(server, "HANDSHAKE_S", 1000.0)
    patch.setattr(host_steps, "_FRESH_S", 2.0)


@pytest.mark.parametrize(
    ("weaken", "name", "evidence"),
    [
        (on_the_cells_network, "cell_channel", "reached"),
        (with_the_cells_key, "cell_key", "the key is in"),
        (with_long_timeouts, "cell_strangers", "no fresh sandbox"),
    ],
)
async def test_weak_cell_is_detected(weaken, name, evidence, root, monkeypatch):
    weaken(monkeypatch)
    async with cell(replaceable=True) as (_, address), driver(root, address) as opened:
        (result,) = await run_attacks(opened, SPEC, only=name)
    assert result.verdict == "ESCAPED" and evidence in result.evidence, result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cell_", "egress_endless", "fork_bomb", "server_flood"])
async def test_cell_contains_attacks(name, root):
    """All others run against bubblewrap, which cells use, in test_attacks.py."""
    async with cell(replaceable=True) as (_, address), driver(root, address) as opened:
        results = await run_attacks(opened, replace(SPEC, memory_mb=192, processes=48), only=name)
    assert results and [result for result in results if result.verdict != "contained"] == []
