"""The warm pool with scripted sandboxes: each is used once; the pool is limited, refilled, and drops dead ones."""

import asyncio
import threading

import pytest

from agentrl.config.tools import SandboxConfig
from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import SandboxSpec
from agentrl.sandbox import select
from agentrl.sandbox.pool import MAX_SPECS, WarmPool
from agentrl.sandbox.select import LazySandboxes
from agentrl.testing.sandboxes import ScriptedSandbox, ScriptedSandboxes, printing
from tests.waiting import until

SPEC = SandboxSpec(image="none")


class Sandbox(ScriptedSandbox):
    """A scripted sandbox that can be pooled, and can be dead."""

    dead = False
    stopped = False
    delay_s = 0.0

    async def write_all(self, files):
        if self.dead:
            raise SandboxError("dead")
        if self.stopped:
            await asyncio.sleep(30.0)
        await asyncio.sleep(self.delay_s)
        self.files.update(files)


class Backend(ScriptedSandboxes):
    """Opens poolable sandboxes; fails while `broken`."""

    broken = False

    async def open(self, spec, *, files=None, snapshot=None, timeout_s=60.0):
        if self.broken:
            raise SandboxError("no")
        sandbox = Sandbox(f"s{len(self.opened)}", self._answer, files or {})
        self.opened.append(sandbox)
        return sandbox


@pytest.fixture
async def backend():
    return Backend(printing("x"))


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_ready_sandboxes_are_used_once_and_replaced(backend):
    pool = WarmPool(backend, warm=2, max_open=8)
    await pool.prepare(SPEC)
    await settle()
    assert len(backend.opened) == 2
    first, second = [await pool.open(SPEC, files={"f": b"1"}) for _ in range(2)]
    assert (first.id, second.id) == ("s0", "s1") and await first.read("f", max_bytes=9) == b"1"
    await settle()
    assert len(backend.opened) == 4
    await first.close()
    assert (await pool.open(SPEC)).id == "s2"
    await pool.close()
    assert all(sandbox.closed for sandbox in backend.opened)


async def test_dead_sandboxes_are_skipped(backend):
    pool = WarmPool(backend, warm=2)
    await pool.prepare(SPEC)
    await settle()
    backend.opened[0].dead = True
    assert (await pool.open(SPEC)).id == "s1"
    await settle()
    assert backend.opened[0].closed
    await pool.close()


async def test_caller_with_little_time_left_closes_no_ready_sandbox(backend):
    pool = WarmPool(backend, warm=4)
    await pool.prepare(SPEC)
    await settle()
    for sandbox in backend.opened:
        sandbox.delay_s = 0.05
    assert (await pool.open(SPEC, files={"f": b"1"}, timeout_s=0.01)).id == "s0"
    await settle()
    assert not any(sandbox.closed for sandbox in backend.opened)
    await pool.close()


async def test_only_one_stopped_sandbox_is_tried_after_the_deadline(backend, monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.pool._MIN_CHECK_S", 0.05)
    pool = WarmPool(backend, warm=4)
    await pool.prepare(SPEC)
    await settle()
    for sandbox in backend.opened:
        sandbox.stopped = True
    await pool.open(SPEC, files={"f": b"1"}, timeout_s=0.01)
    await settle()
    assert [sandbox.closed for sandbox in backend.opened[:4]] == [True, False, False, False]
    await pool.close()


async def test_stopped_sandboxes_do_not_exceed_the_deadline(backend, monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.pool._MIN_CHECK_S", 0.05)
    pool = WarmPool(backend, warm=2, max_open=1)
    await pool.prepare(SPEC)
    await settle()
    for sandbox in backend.opened:
        sandbox.stopped = True
    start = asyncio.get_running_loop().time()
    assert (await pool.open(SPEC, files={"f": b"1"}, timeout_s=0.4)).id in ("s2", "s3")
    assert asyncio.get_running_loop().time() - start < 20.0
    await settle()
    assert all(sandbox.closed for sandbox in backend.opened[:2])
    await pool.close()


async def test_callers_wait_for_a_slot_until_their_deadline(backend):
    pool = WarmPool(backend, warm=0, max_open=2)
    first, _ = [await pool.open(SPEC) for _ in range(2)]
    with pytest.raises(SandboxTimeout, match="in use"):
        await pool.open(SPEC, timeout_s=0.05)
    waiting = asyncio.create_task(pool.open(SPEC, timeout_s=60.0))
    await settle()
    assert not waiting.done()
    await first.close()
    await first.close()
    third = await waiting
    with pytest.raises(SandboxTimeout):
        await pool.open(SPEC, timeout_s=0.05)
    await third.close()
    await pool.close()


async def test_failed_open_releases_its_slot(backend):
    pool = WarmPool(backend, warm=1, max_open=1)
    backend.broken = True
    for _ in range(3):
        with pytest.raises(SandboxError, match="no"):
            await pool.open(SPEC, timeout_s=60.0)
    backend.broken = False
    await (await pool.open(SPEC, timeout_s=60.0)).close()
    await settle()
    assert len(backend.opened) == 2
    await pool.close()


async def test_least_recently_used_spec_is_dropped(backend):
    pool = WarmPool(backend, warm=1)
    for number in range(MAX_SPECS + 1):
        await pool.prepare(SandboxSpec(image=f"i{number}"))
        await settle()
    assert [sandbox.closed for sandbox in backend.opened] == [True] + [False] * MAX_SPECS
    await pool.close()


async def test_closed_pool_opens_nothing(backend):
    pool = WarmPool(backend, warm=1)
    await pool.close()
    with pytest.raises(SandboxError, match="closed"):
        await pool.open(SPEC)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_backend_that_is_opened_while_its_run_ends_is_closed(backend, cancelled):
    started, finish = asyncio.Event(), asyncio.Event()
    pool = WarmPool(backend, warm=0, max_open=1)

    async def opening():
        started.set()
        await finish.wait()
        return pool

    lazy = LazySandboxes(opening)
    first, second = (asyncio.create_task(lazy.open(SPEC)) for _ in range(2))
    await started.wait()
    closing = asyncio.create_task(lazy.close())
    await settle()
    assert not closing.done()
    if cancelled:
        closing.cancel()
        await settle()
    finish.set()
    await asyncio.wait({first, second, closing})
    assert isinstance(first.exception(), SandboxError) and isinstance(second.exception(), SandboxError)
    with pytest.raises(SandboxError, match="closed"):
        await pool.open(SPEC)
    with pytest.raises(SandboxError, match="closed"):
        await lazy.open(SPEC)
    assert closing.cancelled() if cancelled else closing.exception() is None


class NewBackend(Backend):
    name = "docker"
    closed = False

    async def close(self):
        self.closed = True


@pytest.mark.parametrize("ends", ["while it opens", "while it opens, twice", "while it prunes", "with an error"])
async def test_a_backend_whose_opening_does_not_complete_is_closed(ends, monkeypatch, tmp_path):
    new, started, finish = NewBackend(printing("x")), threading.Event(), threading.Event()

    def open_backend(config, *, run_label, root):
        if ends.startswith("while it opens"):
            started.set()
            finish.wait(30)
        return new

    def prune():
        if ends == "with an error":
            raise SandboxError("the daemon fails")
        started.set()
        finish.wait(30)

    monkeypatch.setattr(select, "open_backend", open_backend)
    monkeypatch.setattr(select.cleanup, "prune", prune)
    opening = asyncio.create_task(select.open_sandboxes(SandboxConfig(), run_label="test", root=tmp_path))
    if ends != "with an error":
        await asyncio.to_thread(started.wait, 30)
        opening.cancel()
        await settle()
        if ends.endswith("twice"):
            opening.cancel()
            await settle()
        finish.set()
    with pytest.raises(SandboxError if ends == "with an error" else asyncio.CancelledError):
        await opening
    await until(lambda: new.closed)
