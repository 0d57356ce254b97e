"""Sandboxes that are cancelled, closed and killed at awkward moments: nothing remains, every error is typed, and every wait ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.sandbox import BubblewrapBackend, WarmPool, images, limits, list_open, prune, select_backend
from agentrl.sandbox import backend as backends
from agentrl.sandbox.lease import alive, lease, runtime_folder, start_time
from tests.descriptors import descriptors_left
from tests.sandbox.building import IMAGE, SPEC, leftovers
from tests.waiting import until

LISTED = replace(SPEC, network=("127.0.0.1:9",))

DEAD = "000000000-1-1"
"""The lease of a driver before the last start of the machine."""


pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def steps(count):
    """Runs `count` iterations of the event loop, so that the moment does not depend on the speed of the machine."""
    for _ in range(count):
        await asyncio.sleep(0)


# A backend that is closed ----------------------------------------------------------------------------------------------


async def test_closing_a_backend_cancels_openings(backend):
    """There are more openings than may run at once, so some are still waiting."""
    openings = [asyncio.create_task(backend.open(SPEC if number % 3 else LISTED)) for number in range(20)]
    while not (backend._open or openings[0].done()):
        await asyncio.sleep(0.001)
    await asyncio.gather(backend.close(), backend.close())
    assert leftovers() == []
    for outcome in await asyncio.gather(*openings, return_exceptions=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, SandboxError), repr(outcome)
        else:
            with pytest.raises(SandboxError):
                await outcome.exec(["true"], timeout_s=5)
    with pytest.raises(SandboxError, match="closed"):
        await backend.open(SPEC)


async def test_cancelled_close_continues(backend):
    sandboxes = [await backend.open(SPEC) for _ in range(3)]
    pool = WarmPool(backend, warm=1, max_open=4)
    await pool.prepare(SPEC)
    in_use = await pool.open(SPEC)
    for closable in (pool, backend):
        closing = asyncio.create_task(closable.close())
        await steps(2)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    await backend.close()
    assert leftovers() == []
    for sandbox in (*sandboxes, in_use):
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"], timeout_s=5)


async def test_backend_waits_for_a_sandbox_whose_removal_is_in_progress(backend, monkeypatch):
    """The caller of its `close` may have been cancelled, for example by a cell that ends."""
    sandbox, removing, remove = await backend.open(SPEC), threading.Event(), backends.remove_folder

    def slowly(folder):
        removing.set()
        time.sleep(0.3)
        remove(folder)

    monkeypatch.setattr(backends, "remove_folder", slowly)
    closing = asyncio.create_task(sandbox.close())
    await until(removing.is_set)
    closing.cancel()
    await backend.close()
    assert leftovers() == []


@pytest.mark.parametrize("spec", [SPEC, LISTED], ids=["plain", "listed"])
async def test_lack_of_descriptors_is_a_typed_error_and_leaves_nothing(backend, spec):
    """Tries every number of free descriptors, from none to enough."""
    refused = 0
    for free in range(24):
        await (await backend.open(SPEC)).close()  # starts all threads and connections, and removes stuck folders
        try:
            with descriptors_left(free):
                sandbox = await backend.open(spec)
        except SandboxError:
            refused += 1
        else:
            break
    await sandbox.close()
    assert refused > 0
    await (await backend.open(SPEC)).close()
    await backend.close()
    assert leftovers() == []


def test_lack_of_descriptors_does_not_make_a_driver_count_as_dead():
    """A live driver that counts as dead loses its sandboxes. A wrong lease in the name of a folder keeps it for ever."""
    with subprocess.Popen(["sleep", "60"]) as process:
        own, other = lease(), f"{lease().partition('-')[0]}-{process.pid}-{start_time(process.pid)}"
        with descriptors_left(0):
            with pytest.raises(SandboxError, match=f"start time of process {process.pid}: Too many open files"):
                alive(other)
            assert lease() == own
        assert alive(other)
        process.kill()
    assert not alive(other)


@pytest.mark.bubblewrap
async def test_event_loop_runs_while_the_kernel_creates_a_control_group(root, monkeypatch):
    """An opening that is cancelled in the meantime waits for the kernel, and leaves nothing."""
    if limits.find_control_groups() is None:
        pytest.skip("this machine gives this user no control groups")
    backend = select_backend("bubblewrap", run_label="test", root=root)
    await backend.prepare(SPEC)
    started, may_continue = threading.Event(), threading.Event()
    confine = limits.ControlGroups.confine

    def slow(*arguments):
        started.set()
        assert may_continue.wait(60.0)
        return confine(*arguments)

    monkeypatch.setattr(limits.ControlGroups, "confine", slow)
    opening = asyncio.create_task(backend.open(SPEC))
    while not started.is_set():
        await asyncio.sleep(0.001)  # the event loop runs
    opening.cancel()
    await steps(20)
    may_continue.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert leftovers() == []
    await (await backend.open(SPEC)).close()
    await backend.close()
    assert leftovers() == []


# Images --------------------------------------------------------------------------------------------------------------


class TwoAtOnce(BubblewrapBackend):
    """Prepares an image only while another one is being prepared."""

    def __init__(self, root):
        super().__init__(run_label="test", root=root)
        self.both = asyncio.Barrier(2)
        self.prepared = []

    async def _ensure(self, image):
        self.prepared.append(image.name)
        await self.both.wait()
        return await super()._ensure(image)


@pytest.mark.bubblewrap
async def test_different_images_are_prepared_concurrently_and_each_once(root):
    for name in ("other", "third"):
        (root / name).mkdir()
        (root / name / "image.toml").write_text(IMAGE)
    backend = TwoAtOnce(root)
    async with asyncio.timeout(60):
        await asyncio.gather(*(backend.prepare(replace(SPEC, image=name)) for name in ("image", "other", "image", "other")))
        assert sorted(backend.prepared) == ["image", "other"]
        third = asyncio.create_task(backend.prepare(replace(SPEC, image="third")))
        while backend.both.n_waiting == 0:
            await asyncio.sleep(0.001)
        await (await backend.open(SPEC)).close()  # a prepared image does not wait for others
        await backend.both.wait()
        await third
    await backend.close()


@pytest.mark.bubblewrap
async def test_cancelled_build_ends(root, tmp_path, monkeypatch):
    """Otherwise an interrupted driver would wait for its threads until the image is built."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mmdebstrap").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.new && mv {tmp_path}/pid.new {tmp_path}/pid\nsleep 900\n"
    )
    (tmp_path / "bin" / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    first, second = (asyncio.create_task(BubblewrapBackend(run_label="test", root=root).prepare(SPEC)) for _ in range(2))
    async with asyncio.timeout(60):
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
        for preparing in (first, second):  # one builds, the other waits for the lock
            preparing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await preparing
        await asyncio.get_running_loop().shutdown_default_executor()  # as `asyncio.run` does in the end
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


async def test_compiling_sandbox_has_a_deadline(backend, root, tmp_path, monkeypatch):
    built = images.load_image(root / "image")
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    fresh = images.load_image(root / "image")
    fresh.folder.mkdir(parents=True)
    fresh.rootfs.symlink_to(built.rootfs)
    second_backend = select_backend(backend.name, run_label="test", root=root)
    with monkeypatch.context() as patch:
        patch.setattr("agentrl.sandbox.backend.FIRST_S", 0.001)
        with pytest.raises(SandboxTimeout, match=r"in 0\.0 s"):
            await second_backend.prepare(SPEC)
    await second_backend.prepare(SPEC)
    await second_backend.close()
    assert leftovers() == []


# Leftovers of drivers ----------------------------------------------------------------------------------------------------


def test_partial_leftovers_of_a_killed_driver_are_removed():
    """While it was creating or removing a sandbox: an empty folder, some of the control groups."""
    (runtime_folder() / DEAD).mkdir(exist_ok=True)
    control_groups = limits.find_control_groups()
    folders = [Path(control_groups.folders(f"agentrl-{DEAD}-0")[-1])] if control_groups is not None else []
    for folder in folders:
        folder.mkdir(exist_ok=True)
    prune()
    assert not (runtime_folder() / DEAD).exists()
    assert [folder for folder in folders if folder.exists()] == []


def test_folders_may_disappear_while_they_are_listed(monkeypatch):
    """When a driver closes its last sandbox, or another process prunes a dead driver."""
    is_folder = Path.is_dir

    def is_dir_then_removed(path):
        result = is_folder(path)
        if path.name == DEAD:
            path.rmdir()
        return result

    monkeypatch.setattr(Path, "is_dir", is_dir_then_removed)
    for list_folders in (list_open, prune):
        (runtime_folder() / DEAD).mkdir(exist_ok=True)
        list_folders()
        assert not (runtime_folder() / DEAD).exists(), "it disappeared while it was listed"


# A stopped sandbox -----------------------------------------------------------------------------------------------------


@pytest.mark.bubblewrap
async def test_stopped_ready_sandbox_does_not_block_the_pool(root):
    backend = select_backend("bubblewrap", run_label="test", root=root)
    pool = WarmPool(backend, warm=1, max_open=1)
    await pool.prepare(SPEC)
    while not pool._ready[SPEC]:
        await asyncio.sleep(0.01)
    stopped_id = pool._ready[SPEC][0].id
    for pid in processes_in(stopped_id):
        os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with contextlib.suppress(SandboxTimeout):  # on a slow machine there is no time for another one
        assert (await pool.open(SPEC, timeout_s=4.0)).id != stopped_id
    assert time.monotonic() - start < 25.0  # a file may take 30 s to be written
    await pool.close()
    assert leftovers() == []


def processes_in(name):
    """Pids of the processes of sandbox `name`, which see its runtime folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if f"/{name}/" in path.read_text():
                pids.append(int(path.parent.name))
    return pids
