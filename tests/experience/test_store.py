"""The store with races, crashes and damage, tested with real processes on a real file."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import threading
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.liveness import LOCK_WAIT_S
from agentrl.errors import StoreError
from agentrl.experience import GroupOrder, SqliteStore
from agentrl.experience import store as store_module
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, GroupUse, VersionSpan
from agentrl.testing.store_contract import StoreContract, make_group
from tests.driving import make_recipe
from tests.forking import FORKS
from tests.ledgers import indices
from tests.thirdparty.fieldkit.store import FolderStore

for test in ("test_of_two_learners_that_commit_the_same_groups_one_wins", "test_kill_9_loses_nothing_that_was_acknowledged"):
    pytest.mark.slow(getattr(StoreContract, test))  # they start processes


class TestSqliteStore(StoreContract):
    store = "sqlite"


class TestFolderStore(StoreContract):
    store = "tests.thirdparty.fieldkit.store:FolderStore"


@pytest.fixture
def store(tmp_path: Path):
    opened = SqliteStore(tmp_path / "runs" / "run" / "experience.sqlite")
    yield opened
    opened.close()


def _put_all(path: str, name: str, count: int, barrier, claims) -> None:
    barrier.wait(300)
    store = SqliteStore(path)  # opened by all at once, so that creating the file races too
    stored = [index for index in range(count) if store.put(make_group(index, name))]
    claims.put((name, stored))
    store.close()


@pytest.mark.slow
def test_of_several_processes_that_put_the_same_index_one_wins(tmp_path: Path) -> None:
    path, count, writers = tmp_path / "experience.sqlite", 25, 4
    barrier, claim_queue = FORKS.Barrier(writers), FORKS.Queue()
    processes = [FORKS.Process(target=_put_all, args=(str(path), f"writer{n}", count, barrier, claim_queue)) for n in range(writers)]
    for process in processes:
        process.start()
    claims = dict(claim_queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * writers
    assert sorted(index for stored in claims.values() for index in stored) == list(range(count))
    store = SqliteStore(path)
    for name, stored in claims.items():  # the winner's bytes are the ones stored
        assert store.groups(stored) == tuple(make_group(index, name) for index in stored)
    store.close()


def test_names_of_missing_groups_are_bounded(store: SqliteStore) -> None:
    with pytest.raises(StoreError, match=r": 0, 1, 2, 3, 4, 5, 6, 7$"):
        store.groups(range(8))
    with pytest.raises(StoreError, match=r": 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"):
        store.groups(range(9))


@pytest.mark.parametrize("default", ["FULL", "NORMAL"])
def test_stored_groups_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str) -> None:
    """SQLite builds differ in their defaults."""
    connect = sqlite3.connect

    def connect_with_default(*path: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*path, **options)
        connection.execute(f"PRAGMA synchronous = {default}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_with_default)
    store = SqliteStore(tmp_path / "experience.sqlite")
    (synchronous,) = store._connection.execute("PRAGMA synchronous").fetchone()
    (journal,) = store._connection.execute("PRAGMA journal_mode").fetchone()
    (page_bytes,) = store._connection.execute("PRAGMA page_size").fetchone()
    store.close()
    assert (synchronous, journal, page_bytes) == (2, "wal", 1 << 14), (
        "2 is FULL, the only mode that syncs a write-ahead commit before it returns"
    )


def test_the_file_lock_timeout_exceeds_the_time_to_kill_a_stopped_process(store: SqliteStore) -> None:
    assert store._connection.execute("PRAGMA busy_timeout").fetchone() == (1000 * LOCK_WAIT_S,)


@pytest.mark.parametrize("ending", ["close", "failed start"])
def test_no_file_stays_open(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "experience.sqlite"
    alive: object  # keeps a reference, so that no garbage collection closes it
    if ending == "close":
        store = alive = SqliteStore(path)
        store.close()
    else:
        path.write_bytes(b"no database" * 1000)
        with pytest.raises(StoreError) as alive:
            SqliteStore(path)
    files = [os.readlink(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{entry}")]
    assert not [name for name in files if name.startswith(str(path))]
    del alive


def test_a_store_is_used_by_any_thread_and_waits_for_another_process_that_writes(store: SqliteStore) -> None:
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(1.0, lambda: other.execute("COMMIT")).start()
    stored: list[bool] = []
    writer = threading.Thread(target=lambda: stored.append(store.put(make_group(0))))
    writer.start()
    writer.join(30)
    other.close()
    assert stored == [True] and store.has(0)


def test_a_file_system_without_shared_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write-ahead logging needs it. Without it SQLite returns another journal mode, as here for an in-memory store."""
    monkeypatch.setattr(store_module.sqlite3, "connect", lambda path, **options: sqlite3.Connection(":memory:", isolation_level=None))
    with pytest.raises(StoreError, match=r"without shared memory for SQLite \(memory\)\n  fix: use a local disk for --run-dir"):
        SqliteStore(tmp_path / "experience.sqlite")


def used(*indices: int, tokens: int = 2) -> dict[int, GroupUse]:
    return dict.fromkeys(indices, GroupUse(tokens_trained=tokens))


def test_a_damaged_row_of_the_ledger_is_a_store_error(store: SqliteStore) -> None:
    store.put(make_group(0))
    store._connection.execute("UPDATE groups SET counted = 'many'")
    with pytest.raises(StoreError, match=r"a row of the ledger in .* is damaged"):
        store.entries()


def test_a_file_without_primary_keys_is_rejected_before_its_rows_are_joined(tmp_path: Path) -> None:
    """A thousand rows of one group in each table would be a million entries."""
    path = tmp_path / "experience.sqlite"
    SqliteStore(path).close()
    other = sqlite3.connect(path)
    other.executescript(f"DROP TABLE groups; {store_module.SCHEMA[0].replace('INTEGER PRIMARY KEY', 'INTEGER')}")
    other.close()
    with pytest.raises(StoreError, match="its tables differ from those that agentrl creates"):
        SqliteStore(path)


def test_rows_that_repeat_a_group_end_the_reading(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose pages form a loop has endless rows."""
    store.put(make_group(0))
    monkeypatch.setattr(store_module, "_ENTRIES", f"{store_module._ENTRIES} JOIN (SELECT 1 UNION ALL SELECT 2)")
    with pytest.raises(StoreError, match=r"a row of the ledger in .* is damaged: group 0 follows group 0"):
        store.entries()


def _versioned(index: int, version: int) -> Group:
    (scored,) = make_group(index).episodes
    (trajectory,) = scored.episode.trajectories
    turn = replace(trajectory.turns[0], versions=(VersionSpan(version=version, start=0, end=2),))
    episode = replace(scored.episode, trajectories=(replace(trajectory, turns=(turn,)),))
    return replace(make_group(index), episodes=(replace(scored, episode=episode),))


@pytest.mark.parametrize("kind", [SqliteStore, FolderStore])
def test_a_learner_that_falls_back_repeats_its_steps_with_the_same_groups(tmp_path: Path, kind: type) -> None:
    """Notes and task weights of later groups depend on them. Group 0 is late, and its weights are older than those of groups 3 and 4."""
    store: ExperienceStore = kind(tmp_path / "store", make_recipe()) if kind is FolderStore else SqliteStore(tmp_path / "experience.sqlite")
    order, uses = GroupOrder(per_step=2), dict[int, dict[int, GroupUse]]()

    def learn(step: int) -> tuple[int, ...] | None:
        chosen = order.select(step, store.entries())
        if chosen is not None:
            store.assign(step, chosen)
            uses[step] = used(*chosen)
            store.commit(step, uses[step], f"checkpoints/{step + 1:06d}")
        return chosen

    for index, version in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)):
        store.put(_versioned(index, version))
    assert [learn(step) for step in range(3)] == [(1, 2), (3, 4), (5, 6)]
    store.put(_versioned(0, 0))
    store.reconcile({0: uses[0]})  # checkpoints 2 and 3 are damaged
    assert [[entry.index for entry in store.entries(step=step)] for step in (1, 2)] == [[3, 4], [5, 6]]
    assert all(entry.use is None for entry in store.entries(first=3)), "their tokens are open again"
    store.put(_versioned(7, 3))
    assert [learn(step) for step in range(1, 4)] == [(3, 4), (5, 6), (0, 7)]
    store.close()


def test_a_full_disk_is_a_store_error_with_the_fix_and_loses_nothing(store: SqliteStore) -> None:
    store.put(make_group(0))
    store._connection.execute("PRAGMA max_page_count = 8")  # SQLite's own limit gives the same SQLITE_FULL as a full disk
    noise = random.Random(0).randbytes(60_000).hex()
    with pytest.raises(StoreError, match=r"disk is full\n  fix: free space"):
        store.put(make_group(1, noise))
    assert store.groups(indices(store)) == (make_group(0),)
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert store.put(make_group(1, noise))


def test_damage_is_a_store_error_not_wrong_data(tmp_path: Path) -> None:
    not_sqlite = tmp_path / "noise.sqlite"
    not_sqlite.write_bytes(os.urandom(8192))
    with pytest.raises(StoreError, match="damaged or not a database"):
        SqliteStore(not_sqlite)

    path = tmp_path / "experience.sqlite"
    store = SqliteStore(path)
    store.put(make_group(0))
    store.close()
    with sqlite3.connect(path) as raw:
        body = bytearray(raw.execute("SELECT body FROM groups").fetchone()[0])
        body[len(body) // 2] ^= 1
        raw.execute("UPDATE groups SET body = ?", (bytes(body),))
    raw.close()
    store = SqliteStore(path)
    with pytest.raises(StoreError, match=r"group 0 in .* is damaged"):
        store.groups([0])
    store.close()


def test_a_file_that_is_not_a_store_of_this_version_is_an_error(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as raw:
        raw.execute("CREATE TABLE groups (x)")
    raw.close()
    with pytest.raises(StoreError, match="not an experience store"):
        SqliteStore(foreign)
    with sqlite3.connect(foreign) as raw:  # agentrl 0.1 files are identified by these four bytes
        raw.execute("PRAGMA application_id = 0x41475258")
        raw.execute("PRAGMA user_version = 2")
        raw.execute("DROP TABLE groups")
        for statement in store_module.SCHEMA:
            raw.execute(statement)
    raw.close()
    SqliteStore(foreign).close()

    newer = tmp_path / "newer.sqlite"
    SqliteStore(newer).close()
    with sqlite3.connect(newer) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(StoreError, match="schema 99"):
        SqliteStore(newer)

    with pytest.raises(StoreError, match="Not a directory"):
        SqliteStore(newer / "inside" / "experience.sqlite")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON groups BEGIN DELETE FROM taken; END",
        "CREATE VIEW v AS SELECT * FROM groups",
        "CREATE TABLE t (idx INTEGER PRIMARY KEY)",
    ],
)
def test_a_file_with_foreign_content_is_not_opened(store: SqliteStore, statement: str) -> None:
    """A run folder may come from a third party: a trigger in its file would run with every stored group."""
    store.put(make_group(0))
    with sqlite3.connect(store.path) as raw:
        raw.execute(statement)
    raw.close()
    with pytest.raises(StoreError, match=r"it contains a (trigger 't'|view 'v'|table 't') that agentrl does not create"):
        SqliteStore(store.path)


@pytest.mark.parametrize(("seconds", "error"), [(300.0, "groups are not in"), (300.5, "a query took longer than 300 s")])
def test_a_query_times_out_after_five_minutes(store: SqliteStore, monkeypatch: pytest.MonkeyPatch, seconds: float, error: str) -> None:
    readings = itertools.chain([1000.0], itertools.repeat(1000.0 + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: next(readings))
    with pytest.raises(StoreError, match=error):
        store.groups(range(50_000))


def test_a_lock_held_too_long_ends_the_wait(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "experience.sqlite", busy_timeout_s=0.2)
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked it for too long"):
        store.put(make_group(0))
    assert indices(store) == ()  # readers are not blocked
    holder.execute("ROLLBACK")
    holder.close()
    assert store.put(make_group(0))
    store.close()


@pytest.mark.slow
def test_old_episodes_are_deleted_and_the_ledger_and_its_hashes_remain(tmp_path: Path) -> None:
    """The file stops growing. A group that no step has used, or a step of another process, keeps its episodes."""
    store, everything = SqliteStore(tmp_path / "bounded.sqlite", keep_steps=4), SqliteStore(tmp_path / "all.sqlite")
    sizes = []
    for step in range(30):
        text = random.Random(step).randbytes(20_000).hex()
        for each_store in (store, everything):
            each_store.put_all([make_group(2 * step, text), make_group(2 * step + 1, text)])
            each_store.commit(step, {2 * step: GroupUse(tokens_trained=2)} | ({2 * step + 1: GroupUse(reason="x")} if step else {}), "c")
        sizes.append([each_store._connection.execute("PRAGMA page_count").fetchone()[0] for each_store in (store, everything)])
    (early, early_all), (last, last_all) = sizes[10], sizes[-1]
    assert last - early < 0.05 * (last_all - early_all), "only the ledger grows"
    entries = store.entries()
    assert [replace(entry, has_episodes=True) for entry in entries] == list(everything.entries())
    assert [entry.index for entry in entries if entry.has_episodes] == [1, *range(2 * 26, 60)], "no step has used group 1"
    with pytest.raises(StoreError, match=r"episodes of group 4 .* were deleted, because of store.options.keep_steps"):
        store.groups([4])
    assert store.groups([52]) == everything.groups([52])
    indexed = store._connection.execute("SELECT DISTINCT idx FROM episodes ORDER BY idx").fetchall()
    assert indexed == [(index,) for index in (1, *range(2 * 26, 60))]
    word = random.Random(2).randbytes(20_000).hex()[:492]
    hits = [one._connection.execute("SELECT count(*) FROM episode_text WHERE text MATCH ?", (f'"{word}"',)) for one in (store, everything)]
    assert [hit.fetchone()[0] > 0 for hit in hits] == [False, True], "the searchable text is also deleted"
    query = "SELECT idx, body FROM groups WHERE idx = 4"
    (_, stored_hash), (_, body) = (each_store._connection.execute(query).fetchone() for each_store in (store, everything))
    assert stored_hash == b"sha256:" + sha256(body).digest()
    reopened = SqliteStore(tmp_path / "all.sqlite", keep_steps=4)  # a run that continues with the option
    reopened.commit(30, {1: GroupUse()}, "c")
    assert [entry.index for entry in reopened.entries() if entry.has_episodes] == [1, *range(2 * 27, 60)]
    for each_store in (store, everything, reopened):
        each_store.close()
