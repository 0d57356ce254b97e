"""The driver's store: its thread, group commit, back-pressure, errors and cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import StoreError
from agentrl.experience import DriverStore, SqliteStore, driver_store
from agentrl.experience import store as store_module
from agentrl.records import Group
from agentrl.testing.store_contract import make_group
from tests.ledgers import indices


class HeldStore(SqliteStore):
    """A SQLite store whose commits are recorded, and wait while `free` is not set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.free, self.started = threading.Event(), threading.Event()
        self.commits: list[list[int]] = []

    def put_all(self, groups: Sequence[Group]) -> tuple[bool, ...]:
        self.started.set()
        assert self.free.wait(60)
        stored = super().put_all(groups)
        self.commits.append([group.index for group in groups])
        return stored


@pytest.fixture
def held_store(tmp_path: Path) -> Iterator[HeldStore]:
    store = HeldStore(tmp_path / "experience.sqlite")
    yield store
    store.free.set()
    store.close()


async def first_commit(store: DriverStore, held_store: HeldStore) -> asyncio.Task[bool]:
    """Returns a put whose commit waits until `held_store.free` is set."""
    task = asyncio.create_task(store.put(make_group(0)))
    await asyncio.to_thread(held_store.started.wait, 60)
    return task


async def test_groups_that_arrive_during_a_commit_share_the_next_one(held_store: HeldStore) -> None:
    store = DriverStore(lambda: held_store)
    first = await first_commit(store, held_store)
    puts = [asyncio.create_task(store.put(make_group(index))) for index in (1, 2, 2, 3)]
    read = asyncio.create_task(store.entries())
    last = asyncio.create_task(store.put(make_group(4)))
    await asyncio.sleep(0.01)
    assert not any(put.done() for put in (first, *puts)), "nothing is acknowledged before its commit"
    held_store.free.set()
    assert [await first, *[await put for put in puts], await last] == [True, True, True, False, True, True]
    assert [entry.index for entry in await read] == [0, 1, 2, 3], "a read sees only the groups stored before it"
    assert held_store.commits == [[0], [1, 2, 2, 3], [4]]
    await store.close()


async def test_all_calls_run_on_the_thread_that_opened_the_store(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    class Watched(SqliteStore):
        def __getattribute__(self, name: str) -> Any:
            if name in ("put", "put_all", "has", "entries", "groups", "close"):
                threads.append(threading.current_thread())
            return super().__getattribute__(name)

    store = await DriverStore.open(partial(Watched, tmp_path / "experience.sqlite"))
    await store.put(make_group(0))
    assert await store.has(0) and await store.groups([0]) == (make_group(0),) and len(await store.entries()) == 1
    await store.close()
    assert len(set(threads)) == 1 and threads[0] is not threading.main_thread()


async def test_a_store_whose_opening_is_cancelled_is_closed_by_its_thread(tmp_path: Path) -> None:
    opening, free, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(SqliteStore):
        def __init__(self) -> None:
            opening.set()
            free.wait(60)
            super().__init__(tmp_path / "experience.sqlite")

        def close(self) -> None:
            super().close()
            closed.set()

    task = asyncio.create_task(DriverStore.open(Slow))
    await asyncio.to_thread(opening.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    assert await asyncio.to_thread(closed.wait, 60)


async def test_an_error_is_raised_only_for_the_calls_that_it_concerns(held_store: HeldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    to_json = store_module.codec.to_json

    def encode(group: Group) -> bytes:
        if group.index == 2:
            raise ValueError("circular reference")
        return to_json(group)

    monkeypatch.setattr(store_module.codec, "to_json", encode)
    store = DriverStore(lambda: held_store)
    first = await first_commit(store, held_store)
    puts = [asyncio.create_task(store.put(make_group(index))) for index in (1, 2, 3)]
    await asyncio.sleep(0.01)
    held_store.free.set()
    stored, failed, other = await asyncio.gather(*puts, return_exceptions=True)
    assert await first and stored is True and other is True and isinstance(failed, ValueError)

    held_store._connection.execute("PRAGMA query_only = ON")
    held_store.free.clear()
    held_store.started.clear()
    waiting = asyncio.create_task(store.has(0))
    puts = [asyncio.create_task(store.put(make_group(index))) for index in (4, 5)]
    await asyncio.sleep(0.01)
    held_store.free.set()
    errors = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, StoreError) for error in errors) and errors[0] is not errors[1] and await waiting
    held_store._connection.execute("PRAGMA query_only = OFF")
    assert await store.put(make_group(4)), "the store still works"
    await store.close()


async def test_an_accepted_put_is_stored_even_if_its_caller_is_cancelled(held_store: HeldStore) -> None:
    store = DriverStore(lambda: held_store)
    first = await first_commit(store, held_store)
    second = asyncio.create_task(store.put(make_group(1)))
    await asyncio.sleep(0.01)
    first.cancel()
    second.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled() and second.cancelled()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0.01)
    with pytest.raises(StoreError, match="is closed"):
        await store.put(make_group(2))
    held_store.free.set()
    await closing
    reopened = SqliteStore(held_store.path)
    assert indices(reopened) == (0, 1)
    reopened.close()


async def test_callers_wait_while_too_many_calls_are_queued(held_store: HeldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_store, "MAX_WAITING", 3)
    store = DriverStore(lambda: held_store)
    puts = [asyncio.create_task(store.put(make_group(index))) for index in range(8)]
    await asyncio.to_thread(held_store.started.wait, 60)
    assert store._calls.qsize() <= 3
    puts[-1].cancel()  # it was not accepted
    held_store.free.set()
    assert await asyncio.gather(*puts[:-1]) == [True] * 7
    assert [entry.index for entry in await store.entries()] == list(range(7)) and max(map(len, held_store.commits)) <= 3
    await store.close()


async def test_a_store_that_does_not_open_raises_its_error(tmp_path: Path) -> None:
    (tmp_path / "experience.sqlite").write_bytes(b"no database" * 1000)
    before = threading.active_count()
    with pytest.raises(StoreError, match="damaged or not a database"):
        await DriverStore.open(partial(SqliteStore, tmp_path / "experience.sqlite"))
    while threading.active_count() > before:
        await asyncio.sleep(0.01)


_WRITER = """
import asyncio, sys
from functools import partial
from pathlib import Path
from agentrl.experience import DriverStore, SqliteStore
from agentrl.testing.store_contract import make_group

async def main():
    store = await DriverStore.open(partial(SqliteStore, Path(sys.argv[1])))
    async def write(first):
        for index in range(first, 100_000, 32):
            await store.put(make_group(index))
            print(index, flush=True)
    async with asyncio.TaskGroup() as writing:
        for first in range(32):
            writing.create_task(write(first))

asyncio.run(main())
"""


@pytest.mark.slow
def test_kill_9_during_commits_of_many_groups_loses_no_acknowledged_group(tmp_path: Path) -> None:
    path = tmp_path / "experience.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = {int(writer.stdout.readline()) for _ in range(500)}
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged |= {int(line) for line in writer.communicate(timeout=60)[0].splitlines(keepends=True) if line.endswith("\n")}
    store = SqliteStore(path)
    stored = indices(store)
    assert acknowledged <= set(stored) and len(stored) <= len(acknowledged) + 2 * 32
    assert store.groups(stored) == tuple(map(make_group, stored))
    store.close()
