"""Cells: opening, loss of a cell or a driver, full cells, and allow-lists."""

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
from agentrl.sandbox import images, lease, open_sandboxes
from agentrl.sandbox.cell import CellBackend, backend, open_cells, server, wire
from agentrl.sandbox.cell.server import Cell
from agentrl.sandbox.conformance import check_conformance
from tests.sandbox.building import DRIVER, FETCH, KEY, SPEC, cell, driver, processes_of
from tests.sandbox.test_egress import ANSWER, Server
from tests.waiting import until

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("no_orphans")]


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
