"""The traces of a run or import, durable and bounded: `failures/traces.sqlite` in its folder.

A trace is kept whole, task included, as zstd-compressed JSON; a task is kept once for all its traces. Beside them stand the columns
that lists need, the tags, and how many failures of each sort there were, those that are no longer kept included.

Traces hold episodes that the experience store has, too. They are written again all the same: a trace must be read back without the
store, which the recipe may put elsewhere, and without the family that made the task; evaluations are in no store; and a trace is
handed to other people. `keep` bounds what that takes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.base import untrusted_files
from agentrl.base.database import (
    ForeignDatabase,
    check_files,
    compress,
    decompress,
    enter_wal,
    make_tables,
    query_deadline,
    read_pragma,
    restrict_connection,
    transaction,
)
from agentrl.errors import StoreError, UserError
from agentrl.failure.listing import EpisodeCount, TraceFilter, TraceRow, count_of_trace, kind_of_task, newest_version
from agentrl.failure.trace import FORMAT, Tag, Trace
from agentrl.failure.triage import deciding_tag_name
from agentrl.records import codec

FILE = "failures/traces.sqlite"
MAX_TRACE_BYTES = 32 << 20
"""Bytes of JSON of one trace; a larger one is counted, and not kept."""
_LARGEST_TASK = 4 * MAX_TRACE_BYTES  # bytes of JSON of its task
_APPLICATION_ID = 0x41475254  # "AGRT"
_SCHEMA_VERSION = 1
_BY_A_PERSON = '%"by":"person:%'  # a tag in JSON
_QUESTION = 400  # characters kept for lists
_SCHEMA = (
    "CREATE TABLE traces (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, phase TEXT NOT NULL, step INTEGER NOT NULL,"
    " version INTEGER NOT NULL, why TEXT NOT NULL, tag TEXT NOT NULL, kind TEXT NOT NULL, task_id TEXT NOT NULL, task_key TEXT NOT NULL,"
    " score REAL, question TEXT NOT NULL, tags TEXT NOT NULL, bytes INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE INDEX traces_by_tag ON traces (phase, tag, seq)",
    "CREATE INDEX traces_by_task ON traces (task_key)",
    "CREATE TABLE tasks (key TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE counts (phase TEXT, step INTEGER, version INTEGER, why TEXT, tag TEXT, kind TEXT, n INTEGER NOT NULL,"
    " PRIMARY KEY (phase, step, version, why, tag, kind)) WITHOUT ROWID",
    "CREATE TABLE dropped (phase TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE passed (task_key TEXT PRIMARY KEY, phase TEXT NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
_NUMBERS: dict[str, type | tuple[type, ...]] = {
    "seq": int,
    "step": int,
    "version": int,
    "bytes": int,
    "n": int,
    "score": (int, float),
}  # of all columns
_QUERY_S = 60.0
_COLUMNS = "seq, id, phase, step, version, why, tag, kind, task_id, task_key, score, question, bytes"


class Collection:
    """The traces in a folder. One writer at a time and any number of readers, in any process.

    Args:
        folder: a run folder, or any other.
        keep: traces kept in each phase; None: all. When a phase is full, the oldest of its most frequent tag makes room, so that what
            happens all the time never displaces what is rare. One that a person has tagged stays.
        keep_bytes: the same for their compressed size.
        make: make the file where there is none; otherwise that is a `UserError`, and what cannot be written to is read.
        busy_timeout_s: longest wait for another process's write.

    Every method raises `StoreError` when the file is damaged, locked for long or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        keep_bytes: int | None = None,
        make: bool = False,
        busy_timeout_s: float = 30.0,
    ) -> None:
        self.folder, self.path = folder, folder / FILE
        self._keep, self._keep_bytes = keep, keep_bytes
        self._busy_timeout_s = busy_timeout_s
        if not make and not self.path.is_file():
            raise UserError(f"{folder} has no captured failures", fix="give the folder of a run, such as runs/quickstart")
        if not make:
            with _translated(self.path):
                untrusted_files.check_file(self.path, inside=folder)
        with _translated(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_files(self.path)
            reads_only = not make and _unchangeable(self.path)
            name = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1" if reads_only else self.path
            self._db = sqlite3.connect(name, timeout=busy_timeout_s, isolation_level=None, uri=reads_only)
        try:
            with self._asked():
                self._protect()
                if not reads_only:
                    self._prepare()
                self._check()
                self._held = {phase: _Held(self._db, phase) for (phase,) in self._db.execute("SELECT DISTINCT phase FROM traces")}
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._asked():
            return int(self._db.execute("SELECT COUNT(*) FROM traces").fetchone()[0])

    def add(self, traces: Iterable[Trace], *, counts: Iterable[EpisodeCount] | None = None, passed: Iterable[tuple[str, str]] = ()) -> int:
        """Keeps traces, in place of those of the same ids, all or nothing. Returns how many were kept.

        Args:
            counts: what to add to the counts; None: each trace that is new counts as one.
            passed: (task key, phase) of episodes that were none; a task's first phase is remembered.
        """
        traces = list(traces)
        kept = 0
        with self._transaction() as db:
            for count in map(count_of_trace, filter(self._new, traces)) if counts is None else counts:
                _add_count(db, count)
            for trace in traces:
                kept += self._put(db, trace)
            db.executemany("INSERT OR IGNORE INTO passed VALUES (?, ?)", passed)
        return kept

    def rows(self, wanted: TraceFilter | None = None, *, most: int = -1, newest: bool = False) -> list[TraceRow]:
        """What lists say of the traces, oldest first."""
        where, values = (wanted or TraceFilter()).sql_where()
        order = "DESC" if newest else "ASC"
        with self._asked():
            found = self._db.execute(f"SELECT {_COLUMNS} FROM traces{where} ORDER BY seq {order} LIMIT ?", (*values, most))
            names = tuple(TraceRow.__slots__)
            return [TraceRow(**dict(zip(names, self._typed(names, line), strict=True))) for line in found]

    def count_matching(self, wanted: TraceFilter) -> int:
        """The number of traces that `rows` would list."""
        where, values = wanted.sql_where()
        with self._asked():
            return int(self._db.execute(f"SELECT COUNT(*) FROM traces{where}", values).fetchone()[0])

    def traces(self, wanted: TraceFilter | None = None, *, most: int = -1) -> Iterator[Trace]:
        """The traces themselves, oldest first, one in memory at a time. One that is damaged raises `StoreError` with its id."""
        for row in self.rows(wanted, most=most):
            if (found := self.get(row.id)) is not None:  # it may have made room meanwhile
                yield found

    def get(self, trace_id: str) -> Trace | None:
        """A trace by its id; None when it is not there."""
        with self._asked():
            found = self._db.execute(
                "SELECT body, tags, (SELECT body FROM tasks WHERE key = task_key) FROM traces WHERE id = ?", (trace_id,)
            ).fetchone()
        if found is None:
            return None
        body, tags, task = found
        try:
            text = decompress(body, most=4 * MAX_TRACE_BYTES)[:-1] + b',"tags":' + str(tags).encode()
            if task is not None:
                text += b',"task":' + decompress(task, most=_LARGEST_TASK)
            return codec.from_json(Trace, text + b"}")
        except ValueError as error:
            raise StoreError(f"trace {trace_id} in {self.path} is damaged: {str(error)[:300]}") from error

    def tag(self, trace_id: str, tags: Sequence[Tag]) -> None:
        """Gives a trace these tags in place of those it has, and counts it under the new one."""
        name, text = deciding_tag_name(tags), codec.to_json(tuple(tags)).decode()
        with self._transaction() as db:
            found = db.execute("SELECT phase, step, version, why, tag, kind FROM traces WHERE id = ?", (trace_id,)).fetchone()
            if found is None:
                raise UserError(f"{self.folder} has no trace {trace_id}", fix="agentrl failures list RUN shows them")
            db.execute("UPDATE traces SET tag = ?, tags = ? WHERE id = ?", (name, text, trace_id))
            phase, step, version, why, old, kind = found
            if old != name:
                for one, by in ((old, -1), (name, 1)):
                    _add_count(db, EpisodeCount(phase=phase, step=step, version=version, why=why, tag=one, kind=kind, n=by))
        self._of(phase).retag(old, name)

    def counts(self, *by: str) -> dict[tuple[Any, ...], int]:
        """How many episodes there were, kept or not: values of the fields of `EpisodeCount` that `by` names -> episodes."""
        if unknown := set(by) - set(EpisodeCount.__slots__):
            raise ValueError(f"counts have no {', '.join(sorted(unknown))}")
        names = ", ".join(by)
        with self._asked():
            for line in self._db.execute("SELECT n FROM counts WHERE typeof(n) != 'integer' LIMIT 1"):  # SUM takes text for 0
                self._typed(("n",), line)
            found = self._db.execute(f"SELECT {names}, SUM(n) FROM counts GROUP BY {names} HAVING SUM(n) > 0 ORDER BY {names}")
            return {tuple(self._typed((*by, "n"), line)[:-1]): line[-1] for line in found}

    def dropped(self) -> dict[str, int]:
        """Phase -> traces that are not kept, or no longer."""
        with self._asked():
            return {line[0]: line[1] for line in self._db.execute("SELECT phase, n FROM dropped") if self._typed(("phase", "n"), line)}

    def clear_phase(self, phase: str, *, step: int | None = None, place: str = "") -> None:
        """Removes all there is of a phase, or of one step of it, which is about to be made again; what others passed stays.

        Args:
            place: under what its successes were remembered; empty: the phase.
        """
        with self._transaction() as db:
            for table in ("traces", "counts"):
                db.execute(f"DELETE FROM {table} WHERE phase = ? AND step = coalesce(?, step)", (phase, step))
            if step is None:
                db.execute("DELETE FROM dropped WHERE phase = ?", (phase,))
            db.execute("DELETE FROM passed WHERE phase = ?", (place or phase,))
            db.execute("DELETE FROM tasks WHERE key NOT IN (SELECT task_key FROM traces)")
        self._held.pop(phase, None)

    def first_passed_phase(self, task_key: str, *, but: str) -> str:
        """The first phase in which a task was passed; empty when in none, or in `but`."""
        with self._asked():
            found = self._db.execute("SELECT phase FROM passed WHERE task_key = ? AND phase != ?", (task_key, but)).fetchone()
        return "" if found is None else str(found[0])

    @contextmanager
    def _asked(self) -> Iterator[None]:
        with _translated(self.path), query_deadline(self._db, _QUERY_S):
            yield

    def _typed(self, names: Sequence[str], line: Sequence[Any]) -> Sequence[Any]:
        """The values of columns, after a check of their types, because SQLite stores values of any type."""
        for name, value in zip(names, line, strict=True):
            if not isinstance(value, _NUMBERS.get(name, str)) and not (name == "score" and value is None):
                raise StoreError(f"{self.path} is damaged: the column {name} has a value of type {type(value).__name__}")
        return line

    def _new(self, trace: Trace) -> bool:
        return self._db.execute("SELECT 1 FROM traces WHERE id = ?", (trace.id,)).fetchone() is None

    def _put(self, db: sqlite3.Connection, trace: Trace) -> bool:
        body, size = _packed(trace)
        phase, task = trace.phase, trace.task
        frozen = b"" if task is None else codec.to_json(task)
        if size > MAX_TRACE_BYTES or len(frozen) > _LARGEST_TASK or self._keep == 0:
            _drop(db, phase, 1)
            return False
        self._remove(db, "id = ?", trace.id)
        key = "" if trace.episode is None else trace.episode.task_key
        if task is not None and not db.execute("SELECT 1 FROM tasks WHERE key = ?", (key,)).fetchone():
            db.execute("INSERT INTO tasks VALUES (?, ?)", (key, compress(frozen)))
        row = {
            "id": trace.id,
            "phase": phase,
            "step": trace.step,
            "version": newest_version(trace.episode),
            "why": str(trace.why),
            "tag": deciding_tag_name(trace.tags),
            "kind": kind_of_task(task),
            "task_id": "" if task is None else task.id,
            "task_key": key,
            "score": None if trace.score is None else trace.score.value,
            "question": _question(trace),
            "tags": codec.to_json(trace.tags).decode(),
            "bytes": len(body),
            "body": body,
        }
        db.execute(f"INSERT INTO traces ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
        held = self._held.setdefault(phase, _Held())
        held.add(str(row["tag"]), len(body))
        while held.over(self._keep, self._keep_bytes) and self._make_room(db, phase, held):
            _drop(db, phase, 1)
        return True

    def _make_room(self, db: sqlite3.Connection, phase: str, held: _Held) -> bool:
        """Removes the oldest trace of the most frequent tags that no person has tagged; False when there is none."""
        query = "SELECT MIN(seq) FROM traces WHERE phase = ? AND tag IN (SELECT value FROM json_each(?)) AND tags NOT LIKE ?"
        for tags in held.by_frequency():
            (seq,) = db.execute(query, (phase, json.dumps(tags), _BY_A_PERSON)).fetchone()
            if seq is not None:
                self._remove(db, "seq = ?", seq)
                return True
        return False

    def _remove(self, db: sqlite3.Connection, where: str, value: object) -> None:
        found = db.execute(f"SELECT seq, phase, tag, bytes, task_key FROM traces WHERE {where}", (value,)).fetchone()
        if found is None:
            return
        seq, phase, tag, size, key = found
        db.execute("DELETE FROM traces WHERE seq = ?", (seq,))
        db.execute("DELETE FROM tasks WHERE key = ? AND NOT EXISTS (SELECT 1 FROM traces WHERE task_key = ?)", (key, key))
        self._of(phase).add(tag, -size, by=-1)

    def _of(self, phase: str) -> _Held:
        """What is kept of a phase; another process may have begun it."""
        if phase not in self._held:
            self._held[phase] = _Held(self._db, phase)
        return self._held[phase]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._asked():
            try:
                with transaction(self._db) as db:
                    yield db
            except BaseException:
                self._held = {phase: _Held(self._db, phase) for (phase,) in self._db.execute("SELECT DISTINCT phase FROM traces")}
                raise

    def _protect(self) -> None:
        try:
            restrict_connection(self._db, _SCHEMA, longest=4 * MAX_TRACE_BYTES)
        except ForeignDatabase as error:
            raise StoreError(f"{self.path} is an SQLite file, but not a collection of traces: {error}") from error

    def _prepare(self) -> None:
        db = self._db
        mode = enter_wal(db, timeout_s=self._busy_timeout_s)
        db.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")  # a power cut may cost the newest, never the file
        make_tables(db, _SCHEMA)

    def _check(self) -> None:
        db = self._db
        if read_pragma(db, "application_id") != _APPLICATION_ID:
            raise StoreError(f"{self.path} is an SQLite file, but not one of traces")
        if (found := read_pragma(db, "user_version")) != _SCHEMA_VERSION:
            raise StoreError(f"{self.path} has schema {found} of traces; this agentrl reads {_SCHEMA_VERSION}")


class _Held:
    """What is kept of a phase: traces by tag, and bytes."""

    def __init__(self, db: sqlite3.Connection | None = None, phase: str = "") -> None:
        query = "SELECT tag, COUNT(*), SUM(bytes) FROM traces WHERE phase = ? GROUP BY tag"
        found = db.execute(query, (phase,)).fetchall() if db is not None else []
        self.tags = Counter({tag: number for tag, number, _ in found})
        self.bytes = sum(size for _, _, size in found)

    def add(self, tag: str, size: int, *, by: int = 1) -> None:
        self.tags[tag] += by
        self.bytes += size

    def retag(self, old: str, new: str) -> None:
        self.tags[old] -= 1
        self.tags[new] += 1

    def by_frequency(self) -> list[list[str]]:
        """Tags that are equally frequent together, the most frequent first."""
        found: dict[int, list[str]] = {}
        for tag, times in self.tags.most_common():
            found.setdefault(times, []).append(tag)
        return list(found.values())

    def over(self, keep: int | None, keep_bytes: int | None) -> bool:
        number = self.tags.total()
        return (keep is not None and number > keep) or (keep_bytes is not None and self.bytes > keep_bytes and number > 1)


def _question(trace: Trace) -> str:
    prompt = trace.task.prompt if trace.task is not None else [one.message for one in trace.spoken if one.message.role == "user"][:1]
    return prompt[-1].content[:_QUESTION] if prompt else ""


def _packed(trace: Trace) -> tuple[bytes, int]:
    """A trace without task and tags, compressed, and its size before. What is read back is put together as JSON, and validated whole."""
    named = ("id", "why", "source", "episode", "spoken", "tools", "score", "phase", "step", "origin", "missing")
    text = codec.to_json({name: getattr(trace, name) for name in named} | {"format": FORMAT})
    return (compress(text), len(text)) if len(text) <= MAX_TRACE_BYTES else (b"", len(text))


def _add_count(db: sqlite3.Connection, count: EpisodeCount) -> None:
    db.execute(
        "INSERT INTO counts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
        (count.phase, count.step, count.version, count.why, count.tag, count.kind, count.n),
    )


def _drop(db: sqlite3.Connection, phase: str, by: int) -> None:
    db.execute("INSERT INTO dropped VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n", (phase, by))


def _unchangeable(path: Path) -> bool:
    """Whether nobody can write to a file, and it is whole: SQLite reads it then without the files that it would make beside it."""
    wal = path.with_name(f"{path.name}-wal")
    return not os.access(path.parent, os.W_OK) and not (wal.exists() and wal.stat().st_size)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:  # ValueError: not agentrl's file, or half of a surrogate pair from a command line
        raise StoreError(f"{path}: {error}") from error
