"""The embedded experience store: one SQLite file in the run folder, which all processes on one machine open.

Write-ahead logging lets readers continue while a writer commits. With `synchronous=FULL`, every finished `put` and `commit` survives a
power cut. Primary keys ensure, even under a race, that an index is stored only once and that a group is assigned to only one step.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl.base.database import (
    compress,
    connect,
    decompress,
    enter_wal,
    make_tables,
    query_deadline,
    read_pragma,
    require_schema,
    transaction,
)
from agentrl.base.liveness import LOCK_WAIT_S
from agentrl.config.recipe import Recipe
from agentrl.errors import StoreError
from agentrl.experience import episode_rows, late_parts
from agentrl.experience.ledger import new_entry
from agentrl.experience.residuals import split_group
from agentrl.plugins import parts
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, GroupUse, LateScore, LedgerEntry, PendingScore, ScoreReceipt, codec

APPLICATION_ID = 0x41475258  # "AGRX", distinguishes these files from other SQLite files
_SCHEMA_VERSION = 5
SCHEMA = (
    "CREATE TABLE groups (idx INTEGER PRIMARY KEY, task_id TEXT NOT NULL, stored_at REAL NOT NULL, attempts INTEGER NOT NULL,"
    " counted INTEGER NOT NULL, has_spread INTEGER NOT NULL, oldest_version INTEGER, tokens_sampled INTEGER NOT NULL, body BLOB NOT NULL)",
    # One row per assigned or consumed group. The checkpoint is NULL until the step completes. There is no foreign key, because after a
    # restore the checkpoint determines which groups a step consumed, even if a group is no longer stored.
    "CREATE TABLE taken (idx INTEGER PRIMARY KEY, step INTEGER NOT NULL, checkpoint TEXT, tokens_trained INTEGER NOT NULL,"
    " reason TEXT NOT NULL)",
    "CREATE INDEX taken_by_step ON taken (step)",
    *late_parts.SCHEMA,
    *episode_rows.SCHEMA,
    # The policy version from which each block of groups started.
    "CREATE TABLE blocks (block INTEGER PRIMARY KEY, version INTEGER NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
_ENTRIES = (
    "SELECT groups.idx, task_id, attempts, counted, has_spread, oldest_version, tokens_sampled, step, checkpoint, tokens_trained, reason,"
    " (SELECT count(*) FROM late_parts WHERE idx = groups.idx),"
    " (SELECT count(*) FROM late_parts WHERE idx = groups.idx AND closed_at IS NULL),"
    " NOT (length(body) = 39 AND substr(body, 1, 7) = x'7368613235363a')"  # see `DELETED`
    " FROM groups LEFT JOIN taken ON groups.idx = taken.idx"
)
_INSERT = "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
DELETED = b"sha256:"
"""Prefix of the value that replaces a deleted body. The hash of the body, 32 bytes, follows it."""
_PAGE_BYTES = 1 << 14
"""Page size of a new file. A body needs fewer pages of this size than of SQLite's default size, 4 KiB, so a commit writes fewer frames.

The store therefore accepts 1.3 to 2 times as many groups per second.
"""
_LEAST = -(1 << 62)  # below every index
_QUERY_S = 300.0
_NAMED = 8  # maximum number of indices in an error message


class SqliteStore:
    """An `ExperienceStore` in one SQLite file. Safe for several processes and threads. Open it after a fork, never before.

    Args:
        path: the database file. The file and its folder are created if absent.
        busy_timeout_s: maximum wait while another process writes, in seconds.
        keep_steps: number of newest steps whose episodes are kept; None keeps all episodes. `commit` deletes the episodes of older steps.
            The ledger keeps the entries and hashes of these groups, and the file reuses the space of the episodes.

    Every method raises `StoreError` if the file is damaged or has a different schema version, if the disk is full, or if the wait exceeds
    `busy_timeout_s`.
    """

    def __init__(self, path: Path | str, *, busy_timeout_s: float = LOCK_WAIT_S, keep_steps: int | None = None) -> None:
        self.path = Path(path)
        self._keep_steps, self._deleted = keep_steps, 0  # number of steps whose episodes this object has deleted
        self._lock = threading.Lock()  # one connection, used by one thread at a time
        with translated_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = connect(self.path, SCHEMA, timeout_s=busy_timeout_s)
            try:
                self._prepare(busy_timeout_s)
            except BaseException:
                self._connection.close()
                raise

    def put(self, group: Group) -> bool:
        """Stores a group and returns True. If a group with this index exists, stores nothing and returns False."""
        return self.put_all((group,))[0]

    def put_all(self, groups: Sequence[Group]) -> tuple[bool, ...]:
        """Stores groups and their residuals in one commit. Returns, for each group, whether it was stored because its index was new."""
        rows = [[(part, _row(part)) for part in split_group(group)] for group in groups]
        with self._transaction() as db:
            stored = []
            for parts in rows:
                stored.append(db.execute(_INSERT, parts[0][1]).rowcount == 1)
                for group, row in parts if stored[-1] else ():
                    db.execute(_INSERT, row)
                    late_parts.insert_parts(db, group)
                    episode_rows.insert_episodes(db, group)
            return tuple(stored)

    def has(self, index: int) -> bool:
        """Whether a group is stored."""
        with self._reading() as db:
            return db.execute("SELECT 1 FROM groups WHERE idx = ?", (index,)).fetchone() is not None

    def entries(self, *, first: int | None = None, step: int | None = None) -> tuple[LedgerEntry, ...]:
        """Returns ledger entries in ascending order of index.

        These are the entries of one step or, if `step` is None, of the groups from index `first` on (None means all groups) and of earlier
        groups with late parts that no step has consumed.
        """
        late = "SELECT idx FROM late_parts LEFT JOIN taken USING (idx) WHERE idx < ?1 AND checkpoint IS NULL"
        chosen = f"SELECT idx FROM groups WHERE idx >= ?1 UNION {late}"  # not `OR`, which would read all groups
        where, value = (f"groups.idx IN ({chosen})", _LEAST if first is None else first) if step is None else ("taken.step = ?", step)
        query = f"{_ENTRIES} WHERE {where} ORDER BY groups.idx"
        try:
            with self._reading() as db:
                return tuple(_ascending(map(_entry, db.execute(query, (value,)))))
        except ValueError as error:
            raise StoreError(f"a row of the ledger in {self.path} is damaged: {error}") from error

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """Returns the groups in the given order. Raises `StoreError` if a group is absent or damaged, or its episodes were deleted."""
        wanted = list(indices)
        with self._reading() as db:
            bodies = self._bodies(db, wanted)
            closed = late_parts.closed_parts(db, wanted)
        if missing := [index for index in wanted if index not in bodies]:
            raise StoreError(f"groups are not in {self.path}: {_name(missing)}")
        return tuple(self._decode(index, bodies[index]).with_parts(closed.get(index, {})) for index in wanted)

    def add_score(self, score: LateScore, *, now: float) -> ScoreReceipt:
        """Stores a late score. The last score of a group makes the group ready. Raises `ScoreRejected`."""
        with self._transaction() as db:
            return late_parts.add_score(db, score, now=now, read=lambda index: self._group(db, index))

    def expire_scores(self, *, now: float) -> tuple[int, ...]:
        """Closes the open parts of episodes that have an expired part. Returns the indices of their groups, in ascending order."""
        with self._reading() as db:
            if not late_parts.has_expired(db, now=now):  # the common case, which needs no write lock
                return ()
        with self._transaction() as db:
            return late_parts.expire_scores(db, now=now, read=lambda index: self._group(db, index))

    def pending_scores(self, *, limit: int, after: str = "") -> tuple[PendingScore, ...]:
        """Returns the parts that can be scored now in at most `limit` episodes whose ids follow `after`, in ascending order of id."""
        with self._reading() as db:
            return late_parts.pending_scores(db, limit=limit, after=after)

    def parked(self) -> tuple[int, ...]:
        """Returns the indices of the groups that wait for late scores, in ascending order."""
        with self._reading() as db:
            return late_parts.parked_groups(db)

    def start_block(self, block: int, version: int) -> None:
        """Records the policy version from which a block of groups starts. If a block already has a record, it is not changed."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO blocks VALUES (?, ?)", (block, version))

    def block_versions(self) -> dict[int, int]:
        """Returns the recorded policy versions by block."""
        with self._reading() as db:
            return dict(db.execute("SELECT block, version FROM blocks ORDER BY block"))

    def assign(self, step: int, indices: Sequence[int]) -> None:
        """Assigns groups to a step, and removes different assignments to this and later steps. Raises `StoreError` if a group is not
        stored, waits for late scores, or belongs to an earlier or completed step."""
        with self._transaction() as db:
            if {row[0] for row in db.execute("SELECT idx FROM taken WHERE step = ? AND checkpoint IS NULL", (step,))} == set(indices):
                return
            db.execute("DELETE FROM taken WHERE step >= ? AND checkpoint IS NULL", (step,))  # the assignments of later steps depend on it
            self._take(db, step, indices)

    def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None:
        """Records how a step used its groups. Raises `StoreError` if a group is not stored, is parked, or belongs to a different step."""
        with self._transaction() as db:
            db.execute("DELETE FROM taken WHERE step = ? AND checkpoint IS NULL", (step,))
            self._take(db, step, tuple(uses))
            rows = ((checkpoint, use.tokens_trained, use.reason, index) for index, use in uses.items())
            db.executemany("UPDATE taken SET checkpoint = ?, tokens_trained = ?, reason = ? WHERE idx = ?", rows)
        while self._keep_steps is not None and self._deleted <= step - self._keep_steps:
            self._delete_episodes(self._deleted)
            self._deleted += 1

    def reconcile(self, consumed: Mapping[int, Mapping[int, GroupUse]]) -> None:
        """Sets assignments and uses of groups to those in a checkpoint, given as step -> index -> use. Groups of later steps stay assigned
        to those steps. Raises `StoreError` if a group occurs in two steps."""
        rows: dict[int, tuple[int, int, int, str]] = {}
        for step, uses in consumed.items():
            for index, use in uses.items():
                if index in rows:
                    raise StoreError(f"the checkpoint records that steps {rows[index][1]} and {step} both consumed group {index}")
                rows[index] = (index, step, use.tokens_trained, use.reason)
        complete = max(consumed, default=-1)
        with self._transaction() as db:
            db.execute(
                "DELETE FROM taken WHERE step <= ? AND idx NOT IN (SELECT value FROM json_each(?))", (complete, json.dumps(list(rows)))
            )
            db.execute("UPDATE taken SET checkpoint = NULL, tokens_trained = 0, reason = '' WHERE step > ?", (complete,))
            db.executemany(
                "INSERT INTO taken (idx, step, tokens_trained, reason, checkpoint) VALUES (?, ?, ?, ?, '') ON CONFLICT (idx) DO UPDATE SET"
                " step = excluded.step, tokens_trained = excluded.tokens_trained, reason = excluded.reason,"
                " checkpoint = iif(step = excluded.step, coalesce(checkpoint, ''), '')",
                rows.values(),
            )

    def put_evaluated(self, phase: str, step: int, group: Group) -> None:
        """Stores the episodes of an evaluation. See `EvaluationStore`."""
        bodies = [compress(codec.to_json(replace(group, episodes=(scored,)))) for scored in group.episodes]
        with self._transaction() as db:
            for scored, body in zip(group.episodes, bodies, strict=True):
                alone = replace(group, index=0, episodes=(scored,))
                (number,) = episode_rows.insert_episodes(db, alone, phase=phase, step=step)
                db.execute("INSERT INTO evaluated VALUES (?, ?)", (number, body))

    def delete_evaluated(self, phase: str) -> None:
        """Deletes the evaluation episodes of a phase."""
        with self._transaction() as db:
            episode_rows.delete_phase(db, phase)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._connection.close()

    def _group(self, db: sqlite3.Connection, index: int) -> Group:
        """Returns a stored group with its closed parts. The caller must have opened a transaction."""
        return self._decode(index, self._bodies(db, [index])[index]).with_parts(late_parts.closed_parts(db, [index]).get(index, {}))

    def _bodies(self, db: sqlite3.Connection, indices: Sequence[int]) -> dict[int, bytes]:
        return dict(db.execute("SELECT idx, body FROM groups WHERE idx IN (SELECT value FROM json_each(?))", (json.dumps(indices),)))

    def _delete_episodes(self, step: int) -> None:
        """For each group that a step has consumed, replaces the body with its hash and deletes the rows in the table of episodes."""
        query = (
            "SELECT groups.* FROM taken JOIN groups USING (idx) WHERE step = ? AND checkpoint IS NOT NULL"
            " AND NOT (length(body) = 39 AND substr(body, 1, 7) = ?)"
        )
        with self._reading() as db:
            bodies = [(*row, body) for *row, body in db.execute(query, (step, DELETED))]
        rows = [(*row, DELETED + sha256(body).digest()) for *row, body in bodies]
        if rows:
            with self._transaction() as db:  # not UPDATE, which does not merge pages
                for index, *_, body in bodies:
                    group: Group | None = None
                    with suppress(StoreError):
                        group = self._decode(index, body)
                    episode_rows.delete_group(db, index, group)
                db.executemany("DELETE FROM groups WHERE idx = ?", [row[:1] for row in rows])
                db.executemany(_INSERT, rows)

    def _decode(self, index: int, body: object) -> Group:
        if not isinstance(body, bytes):
            raise StoreError(f"group {index} in {self.path} is damaged: its body is {type(body).__name__}, not bytes")
        if body.startswith(DELETED):
            raise deleted_error(index, self.path)
        try:
            return codec.from_json(Group, decompress(body))
        except ValueError as error:
            raise StoreError(f"group {index} in {self.path} is damaged: {error}") from error

    def _take(self, db: sqlite3.Connection, step: int, indices: Sequence[int]) -> None:
        if missing := _absent(db, indices):
            raise StoreError(f"step {step} cannot use groups that are not in {self.path}: {_name(missing)}")
        if parked := sorted({*indices}.intersection(late_parts.parked_groups(db))):
            raise StoreError(f"step {step} cannot use groups that wait for late scores: {_name(parked)}")
        for index in indices:
            if not db.execute("INSERT OR IGNORE INTO taken VALUES (?, ?, NULL, 0, '')", (index, step)).rowcount:
                earlier = db.execute("SELECT step FROM taken WHERE idx = ?", (index,)).fetchone()[0]
                raise StoreError(f"step {step} cannot use group {index}: it belongs to step {earlier}")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated_errors(self.path), query_deadline(self._connection, _QUERY_S):
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated_errors(self.path), transaction(self._connection) as db:
            yield db

    def _prepare(self, timeout_s: float) -> None:
        db = self._connection
        db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # page size of a new file
        if (mode := enter_wal(db, timeout_s=timeout_s)) != "wal":
            raise StoreError(
                f"{self.path} is on a file system without shared memory for SQLite ({mode})\n  fix: use a local disk for --run-dir"
            )
        db.execute("PRAGMA synchronous = FULL")
        make_tables(db, SCHEMA)
        check_schema(db, self.path, fix="continue with the agentrl version that started this run, or start a new run folder")


def check_schema(db: sqlite3.Connection, path: Path, *, fix: str) -> None:
    """Raises `StoreError` if an open file is not an experience store of this schema version. `fix`: what the user must do if the file has a
    different schema version."""
    if read_pragma(db, "application_id") != APPLICATION_ID:
        raise StoreError(f"{path} is an SQLite file but not an experience store")
    if (version := read_pragma(db, "user_version")) != _SCHEMA_VERSION:
        raise StoreError(f"{path} has store schema {version}; this agentrl reads {_SCHEMA_VERSION}\n  fix: {fix}")
    require_schema(db, SCHEMA)  # without the primary keys, a group could have millions of rows


def _row(group: Group) -> tuple[Any, ...]:
    entry = new_entry(group)
    row = (entry.index, entry.task_id, time.time(), entry.attempts, entry.counted, entry.has_spread, entry.oldest_version)
    return (*row, entry.tokens_sampled, compress(codec.to_json(group)))


def _entry(row: Sequence[Any]) -> LedgerEntry:
    index, task_id, attempts, counted, has_spread, oldest_version, tokens_sampled, *rest = row
    step, checkpoint, tokens_trained, reason, parts, pending, has_episodes = rest
    return LedgerEntry(
        index=index,
        task_id=task_id,
        attempts=attempts,
        counted=counted,
        has_spread=bool(has_spread),
        oldest_version=oldest_version,
        tokens_sampled=tokens_sampled,
        late_parts=parts,
        pending=pending,
        step=step,
        use=None if checkpoint is None else GroupUse(tokens_trained=tokens_trained, reason=reason),
        has_episodes=bool(has_episodes),
    )


def _ascending(entries: Iterable[LedgerEntry]) -> Iterator[LedgerEntry]:
    """Yields the entries. Raises `ValueError` if indices do not increase, because a damaged file whose pages form a loop yields endless
    rows."""
    last: int | None = None
    for entry in entries:
        if last is not None and entry.index <= last:
            raise ValueError(f"group {entry.index} follows group {last}, but indices must increase")
        yield entry
        last = entry.index


def _absent(db: sqlite3.Connection, indices: Sequence[int]) -> list[int]:
    query = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT idx FROM groups)"
    return [row[0] for row in db.execute(query, (json.dumps(list(indices)),))]


def open_store(run_dir: Path, recipe: Recipe) -> ExperienceStore:
    """Opens the store that a recipe configures. Raises `PluginError` if the plug-in is invalid, and `StoreError` if the store fails."""
    part = parts.Part(recipe.store.ref) if recipe.store.ref in parts.STORE.shipped else recipe.store
    store: ExperienceStore = parts.make_part(parts.STORE, part, run_dir, recipe)
    return store


def open_sqlite(run_dir: Path, recipe: Recipe) -> SqliteStore:
    """Opens `experience.sqlite` in the run folder, which the stores `sqlite` and `redis` use."""
    keep = recipe.store.options.get("keep_steps")
    return SqliteStore(run_dir / "experience.sqlite", keep_steps=keep if isinstance(keep, int) else None)


def _name(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:_NAMED])) + (", ..." if len(indices) > _NAMED else "")


def deleted_error(index: int, path: Path) -> StoreError:
    """Returns the error for a group whose episodes were deleted."""
    why = f"the episodes of group {index} in {path} were deleted, because of store.options.keep_steps"
    return StoreError(f"{why}\n  fix: set a larger keep_steps for later runs")


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Converts errors from SQLite or the file system to a `StoreError` that names the file and, for known errors, the fix."""
    try:
        yield
    except sqlite3.Error as error:
        advice = {
            sqlite3.SQLITE_FULL: "the disk is full\n  fix: free space, then continue with --resume; nothing that was stored is lost",
            sqlite3.SQLITE_BUSY: "another process locked it for too long\n  fix: end that process",
            sqlite3.SQLITE_CORRUPT: "the file is damaged\n  fix: restore it from a copy, or start a new run folder",
            sqlite3.SQLITE_NOTADB: "the file is damaged or not a database\n  fix: restore it from a copy, or start a new run folder",
            sqlite3.SQLITE_READONLY: "the file cannot be written\n  fix: check the permissions of the run folder",
            sqlite3.SQLITE_CANTOPEN: "the file cannot be opened\n  fix: check the path and permissions of the run folder",
            sqlite3.SQLITE_CONSTRAINT: "two groups have the same episode id\n  fix: stop the worker that sent the second, then --resume",
            sqlite3.SQLITE_IOERR: "reading or writing failed\n  fix: check the disk and its free space",
        }.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "SQLite failed")  # without the extended bits
        raise StoreError(f"experience store {path}: {advice}\n  detail: {error}") from error
    except OSError as error:
        raise StoreError(f"experience store {path}: {error}") from error
