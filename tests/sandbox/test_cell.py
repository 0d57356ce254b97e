"""Cells: opening, loss of a cell or a driver, full cells, allow-lists, and connections without the key."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from agentrl.config.tools import SandboxConfig
from agentrl.errors import SandboxError, SandboxTimeout, SandboxUnavailable, UserError
from agentrl.records import codec
from agentrl.sandbox import BubblewrapBackend, images, lease, limits, open_sandboxes
from agentrl.sandbox.attacks import host_steps, run_attacks
from agentrl.sandbox.cell import CellBackend, backend, open_cells, server, wire
from agentrl.sandbox.cell.server import Cell
from agentrl.sandbox.conformance import check_conformance
from tests.sandbox.building import SPEC, leftovers, processes_of
from tests.sandbox.test_egress import ANSWER, Server
from tests.waiting import until

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("no_orphans")]
KEY = "0123456789abcdef" * 2
FETCH = "import urllib.request as r\nprint(r.urlopen('http://127.0.0.1:{}/', timeout=10).read().decode())"


@contextlib.asynccontextmanager
async def cell(**options):
    """A cell in this process, and its address."""
    cell_server = Cell(KEY, **options)
    port = await cell_server.start("127.0.0.1", 0)
    try:
        yield cell_server, f"127.0.0.1:{port}"
    finally:
        await cell_server.close()
        assert leftovers() == []


@contextlib.asynccontextmanager
async def driver(root, *addresses, key=KEY):
    cell_backend = CellBackend(run_label="test", root=root, addresses=addresses, key=key)
    try:
        yield cell_backend
    finally:
        await cell_backend.close()


def cell_process(*options):
    """A cell in another process, and its address."""
    command = [sys.executable, "-m", "agentrl", "sandbox", "serve", "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "AGENTRL_CELL_KEY": KEY})
    line = process.stdout.readline()
    assert line.startswith("cell ready on port "), line
    return process, f"127.0.0.1:{int(line.split()[4].strip(':'))}"


# Sandboxes ------------------------------------------------------------------------------------------------------------


async def test_sandbox_of_a_cell_runs_programs_and_restores_snapshots(root):
    async with cell() as (served, address), driver(root, address) as opened:
        sandbox = await opened.open(SPEC, files={"a/b": b"content"})
        assert (await sandbox.exec(["cat", "a/b"], timeout_s=20)).stdout == "content"
        assert (await sandbox.python("6 * 7", timeout_s=20, session="s")).stdout == "42\n"
        other = await opened.open(SPEC, snapshot=await sandbox.snapshot())
        assert await other.read("a/b", max_bytes=100) == b"content"
        await sandbox.close()
        assert len(served._running) == 1 and len(processes_of("exec_server")) >= 1, "the sandbox has ended when `close` returns"
        assert (await other.exec(["true"], timeout_s=20)).ok
    assert served._free == server.MAX_SANDBOXES


@pytest.mark.slow
async def test_cell_conforms(root):
    async with cell() as (_, address), driver(root, address) as opened:
        results = await check_conformance(opened, SPEC)
    assert [(result.name, result.detail) for result in results if not result.ok] == [] and len(results) > 20


async def test_program_that_blocks_its_exec_server_is_killed_by_the_cell(root):
    async with cell() as (_, address), driver(root, address) as opened:
        sandbox = await opened.open(SPEC)
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await until(lambda: processes_of("sleep\x0060"))
        assert await sandbox._channel._relieve() is True
        assert (await running).reason == "killed"


async def test_allow_list_is_served_by_the_driver(root):
    """Programs reach what the driver's proxy permits. The cell opens no connection for them."""
    async with Server() as allowed, Server() as forbidden, cell() as (served, address), driver(root, address) as opened:
        sandbox = await opened.open(replace(SPEC, network=(f"127.0.0.1:{allowed.port}",)))
        for _ in range(3):
            assert (await sandbox.python(FETCH.format(allowed.port), timeout_s=30)).stdout == "hi\n"
        refused = await sandbox.python(FETCH.format(forbidden.port), timeout_s=30)
        assert "403" in refused.stderr and forbidden.seen == [] and len(allowed.seen) == 3 and ANSWER
        crowd = "import threading\ndef f():\n    " + FETCH.format(allowed.port).replace("\n", "\n    ") + "\n"
        crowd += "threads = [threading.Thread(target=f) for _ in range(12)]\n[t.start() for t in threads]\n[t.join() for t in threads]"
        assert (await sandbox.python(crowd, timeout_s=60)).stdout.count("hi") == 12
        await sandbox.close()
        assert not served._running


# Losses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_if_a_cell_dies_its_sandboxes_fail_and_others_open_elsewhere(root):
    process, address = cell_process()
    try:
        async with cell() as (_, second), driver(root, address, second) as opened:
            sandboxes = [await opened.open(SPEC) for _ in range(4)]
            assert sorted(state.open for state in opened._cells.values()) == [2, 2], "sandboxes are spread"
            process.kill()
            process.wait()
            results = await asyncio.gather(*(sandbox.exec(["true"], timeout_s=20) for sandbox in sandboxes), return_exceptions=True)
            assert sum(isinstance(result, SandboxError) for result in results) == 2
            new_sandboxes = [await opened.open(SPEC) for _ in range(2)]
            assert all([(await sandbox.exec(["true"], timeout_s=20)).ok for sandbox in new_sandboxes])
            for sandbox in (*sandboxes, *new_sandboxes):
                await sandbox.close()
            assert [state.open for state in opened._cells.values()] == [0, 0]
    finally:
        process.kill()
        process.stdout.close()


async def test_a_cell_removes_leftovers_of_dead_cells():
    folder = lease.runtime_folder() / "000000000-1-1" / "agentrl-000000000-1-1-0"
    folder.mkdir(parents=True)
    process, _ = cell_process()
    assert not folder.exists()
    process.terminate()
    assert process.wait(timeout=30) == 0
    process.stdout.close()


@pytest.mark.slow
async def test_stopped_cell_delays_an_opening_once(root, monkeypatch):
    """The kernel still accepts connections to a stopped process."""
    monkeypatch.setattr(backend, "GREETING_S", 2.0, raising=False)
    process, address = cell_process()
    try:
        async with cell() as (_, second), driver(root, address, second) as opened:
            await opened.prepare(SPEC)
            busy = [await opened.open(SPEC) for _ in range(2)]
            os.kill(process.pid, signal.SIGSTOP)
            await busy[0].close()
            await busy[1].close()  # now the stopped one may be the first choice
            start = time.monotonic()
            sandboxes = [await opened.open(SPEC, timeout_s=20) for _ in range(4)]
            assert time.monotonic() - start < 15
            assert all([(await sandbox.exec(["true"], timeout_s=20)).ok for sandbox in sandboxes])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_cell_that_greets_and_then_stops_is_tried_last(root):
    """After a timeout it is avoided, although it has the fewest sandboxes. The longer it is silent, the longer it is avoided."""

    async def greet(reader, writer):
        writer.write(bytes(32))
        greeted.append(await reader.readexactly(64))
        await reader.read()
        writer.close()

    greeted = []
    stopped = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with stopped, cell() as (_, address), driver(root, address) as opened:
        await opened.prepare(SPEC)
        opened._names.insert(0, ("127.0.0.1", stopped.sockets[0].getsockname()[1]))
        opened._resolved_at = -1000.0
        opened._cells.clear()
        for _ in range(2):  # at the latest the second opening tries it first
            if not greeted:
                with contextlib.suppress(SandboxTimeout):
                    await opened.open(SPEC, timeout_s=3.0)
        sandboxes = [await opened.open(SPEC, timeout_s=20) for _ in range(3)]
        assert len(greeted) == 1
        silent = next(state for state in opened._cells.values() if state.failures)
        assert silent.avoided_until > asyncio.get_running_loop().time()
        for _ in range(8):
            opened._avoid_silent(silent, "again")
            assert silent.avoided_until - asyncio.get_running_loop().time() <= backend.MOST_AVOID_S
        assert all([(await sandbox.exec(["true"], timeout_s=20)).ok for sandbox in sandboxes])


async def test_invalid_host_name_is_a_typed_error(root, monkeypatch):
    monkeypatch.setattr(CellBackend, "reach_s", backend.CONNECT_S)
    async with driver(root, "cells..ns:7423") as opened:
        with pytest.raises(SandboxUnavailable, match=r"cells\.\.ns: UnicodeError"):
            await opened.prepare(SPEC)
    with pytest.raises(UserError, match="not the address of a cell"):
        wire.parse_address("host:²")


DRIVER = """
import asyncio, sys
from pathlib import Path
from agentrl.records import codec, SandboxSpec
from agentrl.sandbox.cell import CellBackend
async def main():
    backend = CellBackend(run_label="test", root=Path(sys.argv[1]), addresses=[sys.argv[2]], key=sys.argv[3])
    sandbox = await backend.open(codec.from_json(SandboxSpec, sys.argv[4]))
    print("open", flush=True)
    await sandbox.exec(["sleep", "1000"], timeout_s=1000)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_sandboxes_of_a_killed_driver_end_and_those_of_another_continue(root):
    async with cell() as (served, address), driver(root, address) as opened:
        sandbox = await opened.open(SPEC)
        command = [sys.executable, "-c", DRIVER, str(root), address, KEY, codec.to_json(SPEC).decode()]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert await process.stdout.readline() == b"open\n"
        await until(lambda: processes_of("sleep\x001000"))
        assert len(served._running) == 2
        process.kill()
        await process.wait()
        await until(lambda: len(served._running) == 1 and not processes_of("sleep\x001000"), patience_s=30)
        assert (await sandbox.exec(["true"], timeout_s=20)).ok


async def test_full_cells_are_skipped_and_then_waited_for(root):
    async with cell(sandboxes=1) as (_, first), cell(memory_mb=SPEC.memory_mb) as (_, second), driver(root, first, second) as opened:
        sandbox, other_sandbox = [await opened.open(SPEC) for _ in range(2)]
        assert [state.open for state in opened._cells.values()] == [1, 1]
        with pytest.raises(SandboxTimeout, match=r"room for (0 sandboxes|63 sandboxes and 0 MiB)"):
            await opened.open(SPEC, timeout_s=1.0)
        waiting = asyncio.create_task(opened.open(SPEC, timeout_s=60))
        await asyncio.sleep(0.3)
        await sandbox.close()
        assert (await (await waiting).exec(["true"], timeout_s=20)).ok and (await other_sandbox.exec(["true"], timeout_s=20)).ok


async def test_few_sandboxes_of_cells_are_opened_in_advance(root, monkeypatch):
    monkeypatch.setenv("CELL_KEY", KEY)
    async with cell() as (served, address):
        options = {"addresses": [address], "key": "env:CELL_KEY"}
        pool = await open_sandboxes(
            SandboxConfig.model_validate({"backend": {"ref": "cell", "options": options}}), run_label="t", root=root
        )
        await pool.prepare(SPEC)
        await until(lambda: len(served._running) == 1)
        await pool.close()
        await until(lambda: not served._running)


async def test_sandbox_that_does_not_start_frees_its_memory(root, monkeypatch):
    async with cell() as (served, address), driver(root, address) as opened:
        await opened.prepare(SPEC)

        async def fail(*_, **__):
            raise SandboxError("no namespaces")

        monkeypatch.setattr(served._backend, "_start", fail)
        with pytest.raises(SandboxError, match=f"cell {address}: .*no namespaces"):
            await opened.open(SPEC)
        assert (served._free, served._running, opened._open) == (server.MAX_SANDBOXES, {}, {})


# Missing cells --------------------------------------------------------------------------------------------------------


async def test_unreachable_cells_are_an_error_within_30_seconds(root, monkeypatch):
    monkeypatch.setattr(CellBackend, "reach_s", 4.0)
    assert backend.REACH_S + backend.CONNECT_S < 30
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = "127.0.0.1:9"
        for address in (dead, f"127.0.0.1:{silent.getsockname()[1]}", "no-such-cell.invalid:7423"):
            monkeypatch.setattr(backend, "PREPARE_S", 2.0)
            async with driver(root, address) as opened:
                start = time.monotonic()
                with pytest.raises(SandboxUnavailable, match=r"(?s)no cell can open sandboxes of image.*agentrl sandbox serve"):
                    await opened.prepare(SPEC)
                assert time.monotonic() - start < 10 and opened._open == {}


async def test_cell_without_the_image_or_with_another_version_is_not_used(root, monkeypatch):
    (root / "other").mkdir()
    (root / "other" / "image.toml").write_text('packages = ["python3", "hello"]\n')
    async with cell() as (served, address), driver(root, address) as opened:
        with pytest.raises(SandboxUnavailable, match=r"the cell has no sandbox image [0-9a-f]{16}"):
            await opened.prepare(replace(SPEC, image="other"))
        monkeypatch.setattr(opened, "_describe", lambda spec, key: {**CellBackend._describe(opened, spec, key), "code": "other"})
        with pytest.raises(SandboxUnavailable, match="different version of agentrl"):
            await opened.prepare(SPEC)
        with pytest.raises(SandboxUnavailable, match="runsc"):
            await opened.prepare(replace(SPEC, runtime="runsc"))
        assert not served._running


@pytest.mark.parametrize("key", ["../../../../etc", "d" * 15, "D" * 16, "a/../../../b" + "c" * 4])
def test_image_is_identified_by_its_key_only(key):
    with pytest.raises(ValueError, match="key"):
        images.StoredImage(key=key)


def test_options_are_checked(root):
    for options in ({}, {"addresses": ["x:1"]}, {"key": KEY}, {"addresses": ["x"], "key": KEY}, {"addresses": ["x:1"], "key": "short"}):
        with pytest.raises(UserError):
            open_cells(root=root, run_label="test", **options)
    for text, parsed in (("[::1]:7423", ("::1", 7423)), ("cells.ns:80", ("cells.ns", 80))):
        assert wire.parse_address(text) == parsed
    for text in ("x", "x:", ":1", "x:0", "x:65536", "x:a"):
        with pytest.raises(UserError, match="HOST:PORT"):
            wire.parse_address(text)
    with pytest.raises(UserError, match="openssl"):
        Cell("short")


# Strangers ------------------------------------------------------------------------------------------------------------


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


# Attacks --------------------------------------------------------------------------------------------------------------


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
