"""Stores the traces of a run or import, with bounded size, in the SQLite file `failures/traces.sqlite` in the run's or import's folder.

A trace is stored as zstd-compressed JSON. A task is stored once for all of its traces. Counts include the failures whose traces are not
stored. The experience store also contains episodes, but a trace can be read without that store and without the task family.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.base import untrusted_files
from agentrl.base.database import (
    ForeignDatabase,
    check_files,
    compress,
    decompress,
    enter_wal,
    is_read_only,
    make_tables,
    query_deadline,
    read_pragma,
    restrict_connection,
    transaction,
)
from agentrl.base.liveness import LOCK_WAIT_S as _WAIT_S
from agentrl.errors import AgentRLError, StoreError, UserError
from agentrl.failure.trace import FORMAT, Tag, Trace, deciding_tag_name, kind_of_task, newest_version
from agentrl.records import codec

FILE = "failures/traces.sqlite"
MAX_TRACE_BYTES = 32 << 20
"""Maximum size of one trace as JSON, in bytes. A larger trace is counted but not stored."""
_MAX_TASK_BYTES = 4 * MAX_TRACE_BYTES
_APPLICATION_ID = 0x41475254  # "AGRT"
_SCHEMA_VERSION = 2
_QUERY_S = 60.0
_PERSON_TAG = '%"by":"person:%'  # LIKE pattern for the JSON of tags
_QUESTION_CHARS = 400
_COUNTED = ("phase", "step", "version", "why", "tag", "kind")
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
    "CREATE TABLE added (name TEXT PRIMARY KEY) WITHOUT ROWID",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """The summary of a trace, for lists of traces. All strings in it are untrusted."""

    seq: int
    id: str
    phase: str
    step: int
    version: int  # newest policy version that sampled its tokens; -1 means none
    why: str
    tag: str
    kind: str
    task_id: str
    task_key: str
    score: float | None
    question: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeCount:
    """The number of episodes (`n`) for which all other fields have these values. For episodes that passed, `why` and `tag` are empty."""

    phase: str
    step: int
    version: int
    why: str
    tag: str
    kind: str
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilter:
    """A filter that matches traces by their fields. A field that is empty or None matches every trace."""

    tag: str = ""
    kind: str = ""
    why: str = ""
    phase: str = ""
    version: int | None = None
    ids: tuple[str, ...] = ()

    def sql_where(self) -> tuple[str, list[Any]]:
        """Returns the SQL WHERE clause for this filter, and its parameters. The clause is empty if the filter matches every trace."""
        equal = {"tag": self.tag, "kind": self.kind, "why": self.why, "phase": self.phase}
        terms = [f"{name} = ?" for name, value in equal.items() if value]
        values: list[Any] = [value for value in equal.values() if value]
        if self.version is not None:
            terms, values = [*terms, "version = ?"], [*values, self.version]
        if self.ids:
            terms, values = [*terms, "id IN (SELECT value FROM json_each(?))"], [*values, json.dumps(self.ids)]
        return (f" WHERE {' AND '.join(terms)}" if terms else ""), values


def count_of_trace(trace: Trace) -> EpisodeCount:
    """Returns an `EpisodeCount` of 1 for the episode of a trace."""
    return EpisodeCount(
        phase=trace.phase,
        step=trace.step,
        version=newest_version(trace.episode),
        why=str(trace.why),
        tag=deciding_tag_name(trace.tags),
        kind=kind_of_task(trace.task),
        n=1,
    )


class Collection:
    """The traces in a folder. Any number of processes may read them, and one process may write at a time.

    Args:
        folder: a run folder or an import's folder.
        keep: maximum number of traces stored per phase; None means no limit. If a phase is full, the oldest trace with the most frequent
            tag is deleted, so that rare failures are kept. Traces that a person tagged are kept.
        keep_bytes: maximum compressed size of a phase's traces, in bytes; None means no limit. The limit is enforced in the same way as
            `keep`, except that a single trace may exceed it.
        make: create the file if it is missing. If `make` is False, a missing file raises `UserError`, and a read-only file can be read.
        busy_timeout_s: maximum wait, in seconds, while another process writes.

    Every method raises `StoreError` if the file is damaged or locked, or cannot be read or written.
    """

    def __init__(
        self, folder: Path, *, keep: int | None = None, keep_bytes: int | None = None, make: bool = False, busy_timeout_s: float = _WAIT_S
    ) -> None:
        self.folder, self.path = folder, folder / FILE
        self._keep, self._keep_bytes = keep, keep_bytes
        if not make and not self.path.is_file():
            raise UserError(f"{folder} has no captured failures", fix="give the folder of a run, such as runs/quickstart")
        with _store_errors(self.path):
            if not make:
                untrusted_files.check_file(self.path, inside=folder)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_files(self.path)
            read_only = not make and is_read_only(self.path)
            name = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1" if read_only else self.path
            self._db = sqlite3.connect(name, timeout=busy_timeout_s, isolation_level=None, uri=read_only, check_same_thread=False)
        self._sizes, self._data_version = dict[str, _PhaseSize](), -1
        try:
            with self._query():
                self._open(read_only=read_only, timeout_s=busy_timeout_s)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.count_matching(TraceFilter())

    def add(
        self,
        traces: Iterable[Trace],
        *,
        counts: Iterable[EpisodeCount] | None = None,
        passed: Iterable[tuple[str, str]] = (),
        once: str = "",
    ) -> int:
        """Stores traces in one transaction, replacing traces with the same ids. Returns the number of stored traces.

        Args:
            counts: the counts to add; None counts each new trace once.
            passed: (task key, phase) of each episode that passed. For each task, only the first phase in which it passed is recorded.
            once: an idempotency key. If an earlier call with the same key succeeded, nothing is stored or counted.
        """
        traces = list(traces)
        with self._transaction() as db:
            if once and not db.execute("INSERT OR IGNORE INTO added VALUES (?)", (once,)).rowcount:
                return 0
            if counts is None:
                known = "SELECT 1 FROM traces WHERE id = ?"
                counts = [count_of_trace(trace) for trace in traces if db.execute(known, (trace.id,)).fetchone() is None]
            for count in counts:
                _add_count(db, count)
            stored = sum(self._put(db, trace) for trace in traces)
            db.executemany("INSERT OR IGNORE INTO passed VALUES (?, ?)", passed)
        return stored

    def rows(self, wanted: TraceFilter | None = None, *, most: int = -1, newest: bool = False) -> list[TraceRow]:
        """Returns the rows of at most `most` matching traces (-1 means all), the oldest first, or the newest first if `newest` is true."""
        where, values = (wanted or TraceFilter()).sql_where()
        query = f"SELECT {', '.join(TraceRow.__slots__)} FROM traces{where} ORDER BY seq {'DESC' if newest else 'ASC'} LIMIT ?"
        names = TraceRow.__slots__
        with self._query():
            return [TraceRow(**dict(zip(names, self._typed(names, row), strict=True))) for row in self._db.execute(query, (*values, most))]

    def count_matching(self, wanted: TraceFilter) -> int:
        """Returns the number of traces that a filter matches."""
        where, values = wanted.sql_where()
        with self._query():
            return int(self._db.execute(f"SELECT COUNT(*) FROM traces{where}", values).fetchone()[0])

    def traces(self, wanted: TraceFilter | None = None) -> Iterator[Trace]:
        """Yields the matching traces, the oldest first. If a trace is damaged, raises a `StoreError` that contains its id."""
        for row in self.rows(wanted):
            if (trace := self.get(row.id)) is not None:  # it may have been deleted since
                yield trace

    def get(self, trace_id: str) -> Trace | None:
        """Returns the trace with the id `trace_id`, or None if no such trace is stored."""
        with self._query():
            row = self._db.execute(
                "SELECT body, tags, (SELECT body FROM tasks WHERE key = task_key) FROM traces WHERE id = ?", (trace_id,)
            ).fetchone()
        if row is None:
            return None
        body, tags, task = row
        try:
            text = decompress(body, most=4 * MAX_TRACE_BYTES)[:-1] + b',"tags":' + str(tags).encode()
            if task is not None:
                text += b',"task":' + decompress(task, most=_MAX_TASK_BYTES)
            return codec.from_json(Trace, text + b"}")
        except ValueError as error:
            raise StoreError(f"trace {trace_id} in {self.path} is damaged: {str(error)[:300]}") from error

    def tag(self, trace_id: str, tags: Sequence[Tag]) -> None:
        """Replaces the tags of a trace, and counts the trace under its new tag. Raises `UserError` if the trace is not stored."""
        name, text = deciding_tag_name(tags), codec.to_json(tuple(tags)).decode()
        with self._transaction() as db:
            row = db.execute(f"SELECT {', '.join(_COUNTED)} FROM traces WHERE id = ?", (trace_id,)).fetchone()
            if row is None:
                raise UserError(f"{self.folder} has no trace {trace_id}", fix="agentrl failures list RUN shows the traces")
            old = EpisodeCount(**dict(zip(_COUNTED, row, strict=True)), n=-1)
            sizes = self._size_of(old.phase)
            db.execute("UPDATE traces SET tag = ?, tags = ? WHERE id = ?", (name, text, trace_id))
            if old.tag != name:
                _add_count(db, old)
                _add_count(db, replace(old, tag=name, n=1))
        sizes.add(old.tag, 0, by=-1)
        sizes.add(name, 0)

    def counts(self, *by: str) -> dict[tuple[Any, ...], int]:
        """Returns the number of episodes, with or without a stored trace, by the values of at least one of the `EpisodeCount` fields."""
        if unknown := set(by) - set(EpisodeCount.__slots__):
            raise ValueError(f"EpisodeCount has no field {', '.join(sorted(unknown))}")
        names = ", ".join(by)
        with self._query():
            for line in self._db.execute("SELECT n FROM counts WHERE typeof(n) != 'integer' LIMIT 1"):  # SUM would count text as 0
                self._typed(("n",), line)
            lines = self._db.execute(f"SELECT {names}, SUM(n) FROM counts GROUP BY {names} HAVING SUM(n) > 0 ORDER BY {names}")
            return {tuple(self._typed((*by, "n"), line)[:-1]): line[-1] for line in lines}

    def dropped(self) -> dict[str, int]:
        """Returns a mapping phase -> number of traces that were deleted, or not stored, because of the limits on number and size."""
        with self._query():
            return {line[0]: line[1] for line in self._db.execute("SELECT phase, n FROM dropped") if self._typed(("phase", "n"), line)}

    def clear_phase(self, phase: str, *, step: int | None = None, place: str = "") -> None:
        """Deletes the traces and counts of a phase, or of one of its steps, and all records of tasks that passed in the phase.

        Args:
            place: the name under which the phase's passed tasks were recorded; empty means `phase`.
        """
        with self._transaction() as db:
            for table in ("traces", "counts"):
                db.execute(f"DELETE FROM {table} WHERE phase = ? AND step = coalesce(?, step)", (phase, step))
            if step is None:
                db.execute("DELETE FROM dropped WHERE phase = ?", (phase,))
            db.execute("DELETE FROM passed WHERE phase = ?", (place or phase,))
            db.execute("DELETE FROM tasks WHERE key NOT IN (SELECT task_key FROM traces)")
        self._sizes.pop(phase, None)

    def first_passed_phase(self, task_key: str, *, but: str) -> str:
        """Returns the first phase in which a task passed; empty if it never passed, or if that phase is `but`."""
        with self._query():
            row = self._db.execute("SELECT phase FROM passed WHERE task_key = ? AND phase != ?", (task_key, but)).fetchone()
        return "" if row is None else str(row[0])

    @contextmanager
    def _query(self) -> Iterator[None]:
        with _store_errors(self.path), query_deadline(self._db, _QUERY_S):
            yield

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._query():
            try:
                with transaction(self._db) as db:
                    if (data_version := read_pragma(db, "data_version")) != self._data_version:  # another process has written
                        self._sizes, self._data_version = {}, data_version
                    yield db
            except BaseException:
                self._sizes = {}
                raise

    def _open(self, *, read_only: bool, timeout_s: float) -> None:
        db = self._db
        try:
            restrict_connection(db, _SCHEMA, longest=4 * MAX_TRACE_BYTES)
        except ForeignDatabase as error:
            raise StoreError(f"{self.path} is an SQLite file, but not a collection of traces: {error}") from error
        if not read_only:
            mode = enter_wal(db, timeout_s=timeout_s)
            db.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")  # a power cut may lose the newest transactions
            make_tables(db, _SCHEMA)
        if read_pragma(db, "application_id") != _APPLICATION_ID:
            raise StoreError(f"{self.path} is an SQLite file, but not a collection of traces")
        if (schema := read_pragma(db, "user_version")) != _SCHEMA_VERSION:
            raise StoreError(f"{self.path} has trace schema {schema}; this version of agentrl reads {_SCHEMA_VERSION}")

    def _typed(self, names: Sequence[str], line: Sequence[Any]) -> Sequence[Any]:
        """Returns the values of columns after checking their types, because SQLite stores values of any type in any column."""
        for name, value in zip(names, line, strict=True):
            kind = int if name in ("seq", "step", "version", "bytes", "n") else int | float | None if name == "score" else str
            if not isinstance(value, kind):
                raise StoreError(f"{self.path} is damaged: the column {name} has a value of type {type(value).__name__}")
        return line

    def _put(self, db: sqlite3.Connection, trace: Trace) -> bool:
        body, size = _packed(trace)
        phase, task = trace.phase, trace.task
        task_json = b"" if task is None else codec.to_json(task)
        if size > MAX_TRACE_BYTES or len(task_json) > _MAX_TASK_BYTES or self._keep == 0:
            _count_dropped(db, phase)
            return False
        self._remove(db, "id = ?", trace.id)
        key = "" if trace.episode is None else trace.episode.task_key
        if task is not None and not db.execute("SELECT 1 FROM tasks WHERE key = ?", (key,)).fetchone():
            db.execute("INSERT INTO tasks VALUES (?, ?)", (key, compress(task_json)))
        count = count_of_trace(trace)
        row = {name: getattr(count, name) for name in _COUNTED} | {
            "id": trace.id,
            "task_id": "" if task is None else task.id,
            "task_key": key,
            "score": None if trace.score is None else trace.score.value,
            "question": _question(trace),
            "tags": codec.to_json(trace.tags).decode(),
            "bytes": len(body),
            "body": body,
        }
        sizes = self._size_of(phase)
        db.execute(f"INSERT INTO traces ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
        sizes.add(count.tag, len(body))
        while sizes.exceeds(self._keep, self._keep_bytes) and self._delete_one(db, phase, sizes):
            _count_dropped(db, phase)
        return True

    def _delete_one(self, db: sqlite3.Connection, phase: str, sizes: _PhaseSize) -> bool:
        """Deletes the oldest trace with the most frequent tag, except traces that a person tagged. Returns False if there is none."""
        query = "SELECT MIN(seq) FROM traces WHERE phase = ? AND tag IN (SELECT value FROM json_each(?)) AND tags NOT LIKE ?"
        for tags in sizes.by_frequency():
            (seq,) = db.execute(query, (phase, json.dumps(tags), _PERSON_TAG)).fetchone()
            if seq is not None:
                self._remove(db, "seq = ?", seq)
                return True
        return False

    def _remove(self, db: sqlite3.Connection, where: str, value: object) -> None:
        row = db.execute(f"SELECT seq, phase, tag, bytes, task_key FROM traces WHERE {where}", (value,)).fetchone()
        if row is None:
            return
        seq, phase, tag, size, key = row
        self._size_of(phase).add(tag, -size, by=-1)
        db.execute("DELETE FROM traces WHERE seq = ?", (seq,))
        db.execute("DELETE FROM tasks WHERE key = ? AND NOT EXISTS (SELECT 1 FROM traces WHERE task_key = ?)", (key, key))

    def _size_of(self, phase: str) -> _PhaseSize:  # must be called before a change, which the caller then adds
        if phase not in self._sizes:
            self._sizes[phase] = _PhaseSize(self._db, phase)
        return self._sizes[phase]


class _PhaseSize:
    """The number of stored traces in one phase, by tag, and the total size of these traces in bytes."""

    def __init__(self, db: sqlite3.Connection, phase: str) -> None:
        lines = db.execute("SELECT tag, COUNT(*), SUM(bytes) FROM traces WHERE phase = ? GROUP BY tag", (phase,)).fetchall()
        self.tags = Counter({tag: number for tag, number, _ in lines})
        self.bytes = sum(size for _, _, size in lines)

    def add(self, tag: str, size: int, *, by: int = 1) -> None:
        self.tags[tag] += by
        self.bytes += size

    def by_frequency(self) -> list[list[str]]:
        """Returns the tags, grouped into lists of equally frequent tags, the most frequent first."""
        groups: dict[int, list[str]] = {}
        for tag, times in self.tags.most_common():
            groups.setdefault(times, []).append(tag)
        return list(groups.values())

    def exceeds(self, keep: int | None, keep_bytes: int | None) -> bool:
        number = self.tags.total()
        return (keep is not None and number > keep) or (keep_bytes is not None and self.bytes > keep_bytes and number > 1)


def _question(trace: Trace) -> str:
    prompt = trace.task.prompt if trace.task is not None else [one.message for one in trace.spoken if one.message.role == "user"][:1]
    return prompt[-1].content[:_QUESTION_CHARS] if prompt else ""


def _packed(trace: Trace) -> tuple[bytes, int]:
    """Returns a trace without its task and tags as compressed JSON (b"" if it is too large), and the size before compression in bytes."""
    fields = ("id", "why", "source", "episode", "spoken", "tools", "score", "phase", "step", "origin", "missing")
    text = codec.to_json({name: getattr(trace, name) for name in fields} | {"format": FORMAT})
    return (compress(text), len(text)) if len(text) <= MAX_TRACE_BYTES else (b"", len(text))


def _add_count(db: sqlite3.Connection, count: EpisodeCount) -> None:
    db.execute(
        "INSERT INTO counts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
        tuple(getattr(count, name) for name in (*_COUNTED, "n")),
    )


def _count_dropped(db: sqlite3.Connection, phase: str) -> None:
    db.execute("INSERT INTO dropped VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + excluded.n", (phase,))


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except AgentRLError:  # a `UserError` is a `ValueError`
        raise
    except (sqlite3.Error, OSError, ValueError) as error:  # ValueError: not an SQLite file of agentrl, or an unpaired surrogate in an id
        raise StoreError(f"{path}: {error}") from error
