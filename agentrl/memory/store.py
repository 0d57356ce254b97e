"""Stores notes by scope and version in one SQLite file. Each version adds all notes from a step's episodes in one transaction.

A search result is a pure function of version, scope, task and query: later notes and notes in other scopes change neither the result nor
its order. Attempts at a task never see notes from other attempts at the task, or notes whose author had read such notes. Therefore, an
answer cannot reach a different attempt through the memory, even indirectly.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.base.database import ForeignDatabase, connect, enter_wal, is_damaged, make_tables, query_deadline, read_pragma, transaction
from agentrl.base.liveness import LOCK_WAIT_S
from agentrl.config.tools import MemoryConfig
from agentrl.errors import StoreError
from agentrl.records import ScoredEpisode
from agentrl.records.episode import Memo

KEEP = 1000  # newest notes kept per scope; older ones are deleted
RESULTS = 5  # maximum number of notes per search: five full notes take 2,000 characters of the reader's context
QUERY_CHARS = 200  # maximum length of a query, in characters
QUERY_WORDS = 16  # maximum number of query words that are searched; additional words are ignored

_QUERY_S = 60.0
_LONGEST = 1 << 28  # maximum size of a value in bytes
_CACHED_TASKS = 256  # maximum task keys in the cache, more than there are groups in flight
_APPLICATION_ID = 0x41474D4D  # "AGMM"
_SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE steps (step INTEGER PRIMARY KEY)",
    "CREATE TABLE writers (id INTEGER PRIMARY KEY, episode TEXT NOT NULL UNIQUE, task_key TEXT NOT NULL)",
    "CREATE INDEX writers_of_task ON writers (task_key)",
    "CREATE TABLE sources (writer INTEGER NOT NULL, source INTEGER NOT NULL, PRIMARY KEY (writer, source)) WITHOUT ROWID",
    "CREATE INDEX written_after ON sources (source)",
    "CREATE TABLE notes (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, writer INTEGER NOT NULL, scope TEXT NOT NULL, text TEXT NOT NULL)",
    "CREATE UNIQUE INDEX same_text ON notes (scope, text)",
    "CREATE INDEX of_scope ON notes (scope, id)",
    "CREATE VIRTUAL TABLE words USING fts5(text, content='notes', content_rowid='id', tokenize='porter unicode61 remove_diacritics 2')",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
_INFORMED = (
    "WITH RECURSIVE informed(id) AS (SELECT id FROM writers WHERE task_key = ?"
    " UNION SELECT writer FROM sources JOIN informed ON source = informed.id) SELECT id FROM informed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenNotes:
    """The notes of one episode that counts, and the key of its task."""

    episode: str
    task_key: str
    memo: Memo


@dataclass(frozen=True, slots=True)
class NoteMatch:
    """A matching note and the id of the episode that wrote it."""

    text: str
    episode: str


def notes_to_commit(episodes: Iterable[ScoredEpisode]) -> list[WrittenNotes]:
    """Returns the notes of the episodes that are scored and not excluded, in order."""
    return [
        WrittenNotes(episode=scored.episode.id, task_key=scored.episode.task_key, memo=scored.episode.memory)
        for scored in episodes
        if scored.episode.memory is not None and scored.episode.memory.notes
        if not scored.episode.left_out and scored.score.value is not None
    ]


class NoteStore:
    """The notes of a run. Thread-safe. Only one process may write; other processes may read at the same time.

    Every method raises `StoreError` if the file is damaged or belongs to a different version of agentrl, or if the disk is full. The notes
    can be rebuilt from the run's groups.

    Args:
        path: the database file, which is created with its folder if missing. None keeps the database in memory.
    """

    def __init__(self, path: Path | None, config: MemoryConfig) -> None:
        self.config = config
        self.path = path
        self._informed: dict[str, set[int]] = {}  # task key -> writers whose notes are hidden from its attempts
        self._informed_at = 0  # version of the store that this cache belongs to
        self._lock = threading.Lock()  # the connection may be used by only one thread at a time
        with self._translate_errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = connect(path, _SCHEMA, timeout_s=LOCK_WAIT_S, longest=_LONGEST)
        try:
            with self._access():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    @property
    def version(self) -> int:
        """The newest version: the number of stored steps."""
        with self._lock, self._access():
            return _version(self._db)

    def commit(self, step: int, episodes: Iterable[WrittenNotes], *, oldest_read: int | None = None) -> bool:
        """Stores the notes of a step's episodes in one transaction and creates version `step + 1`. Returns False if that
        version already exists, else True.

        Args:
            oldest_read: oldest version that may still be read; None means the new version. Notes that neither version `oldest_read` nor a
                later version shows are deleted.

        Raises `StoreError` if `step` does not directly follow the last stored step.
        """
        with self._lock, self._access(), transaction(self._db) as db:
            next_step = _version(db)
            if step < next_step:
                return False
            if step > next_step:
                raise StoreError(f"{self._name}: the notes of step {step} cannot be added before those of step {next_step}")
            db.execute("INSERT INTO steps VALUES (?)", (step,))
            for written in episodes:
                _add(db, step, written)
            _delete_old(db, version=step + 1 if oldest_read is None else oldest_read)
            return True

    def search(self, query: str, *, scope: str, version: int, task_key: str) -> tuple[NoteMatch, ...]:
        """Returns at most `RESULTS` notes of a version and scope that an attempt at a task may see, best first.

        A note's rank is the sum of log(1 + N / n) over the query's words that it contains, where n of the N visible notes contain the
        word (inverse document frequency). Among equal ranks, the newest note comes first. English inflections and accents of
        words are ignored. An empty query returns the newest notes.
        """
        terms = list(dict.fromkeys(re.findall(r"\w+", query.lower())))[:QUERY_WORDS]
        with self._lock, self._access():
            hidden = self._hidden(task_key)
            oldest = _oldest_shown(self._db, scope, version)
            where, values = "scope = ? AND step < ? AND id >= ?", (scope, version, oldest)
            if not terms:
                rows = self._db.execute(f"SELECT id, writer FROM notes WHERE {where} ORDER BY id DESC", values)
                best = list(islice((note_id for note_id, writer in rows if writer not in hidden), RESULTS))
            else:
                counts = self._db.execute(f"SELECT writer, COUNT(*) FROM notes WHERE {where} GROUP BY writer", values)
                total = sum(count for writer, count in counts if writer not in hidden)
                by_term = {term: self._notes_with(term, where, values, hidden) for term in terms}
                best = _ranked(by_term, total)[:RESULTS]
            return tuple(NoteMatch(*_text_values(self._db.execute(_NOTE, (note_id,)).fetchone())) for note_id in best)

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Returns a mapping scope -> (number of stored notes, number of episodes that wrote them)."""
        query = "SELECT scope, COUNT(*), COUNT(DISTINCT writer) FROM notes GROUP BY scope ORDER BY scope"
        with self._lock, self._access():
            rows = self._db.execute(query).fetchall()
        return {str(scope): (notes, writers) for scope, notes, writers in rows}

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._db.close()

    def _hidden(self, task_key: str) -> set[int]:
        """Returns the writers that may know the answer to a task: its attempts, and all writers that read a note by such a writer.

        The result is cached until the next commit, which may come from a different process.
        """
        if (version := _version(self._db)) != self._informed_at:
            self._informed.clear()
            self._informed_at = version
        if task_key not in self._informed:
            if len(self._informed) >= _CACHED_TASKS:
                self._informed.clear()
            self._informed[task_key] = {row[0] for row in self._db.execute(_INFORMED, (task_key,))}
        return self._informed[task_key]

    def _notes_with(self, term: str, where: str, values: Sequence[Any], hidden: set[int]) -> list[int]:
        """Returns the ids of the visible notes that contain a word.

        The cross join makes SQLite look the word up once instead of once for each note in the scope.
        """
        query = f"SELECT id, writer FROM words CROSS JOIN notes ON id = words.rowid WHERE words MATCH ? AND {where}"
        return [note for note, writer in self._db.execute(query, (f'"{term}"', *values)) if writer not in hidden]

    def _prepare(self) -> None:
        db = self._db
        if self.path is not None and (mode := enter_wal(db, timeout_s=LOCK_WAIT_S)) != "wal":
            raise StoreError(f"{self._name} is on a file system without shared memory for SQLite ({mode})\n  fix: use a local disk")
        db.execute("PRAGMA synchronous = FULL")
        make_tables(db, _SCHEMA)
        if read_pragma(db, "application_id") != _APPLICATION_ID or read_pragma(db, "user_version") != _SCHEMA_VERSION:
            raise StoreError(f"{self._name} is not a database of notes, or belongs to a different version of agentrl\n  fix: {_REBUILD}")

    @property
    def _name(self) -> str:
        return str(self.path or "the notes of an evaluation")

    @contextmanager
    def _access(self) -> Iterator[None]:
        with self._translate_errors(), query_deadline(self._db, _QUERY_S):
            yield

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            rebuild = is_damaged(error) or isinstance(error, ForeignDatabase)
            raise StoreError(
                f"{self._name}: {error}\n  fix: {_REBUILD if rebuild else 'free disk space, then resume the run with --resume'}"
            ) from error
        except OSError as error:
            raise StoreError(f"{self._name}: {error}") from error


_REBUILD = "delete it; the run rebuilds it from its experience store"
_NOTE = "SELECT text, episode FROM notes JOIN writers ON writers.id = writer WHERE notes.id = ?"


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT COALESCE(MAX(step) + 1, 0) FROM steps").fetchone()[0])


def _add(db: sqlite3.Connection, step: int, written: WrittenNotes) -> None:
    """Stores the notes of one episode, and its sources: the episodes whose notes it read. Skips notes that the scope already has."""
    writer = db.execute("INSERT INTO writers (episode, task_key) VALUES (?, ?)", (written.episode, written.task_key)).lastrowid
    sources = [db.execute("SELECT id FROM writers WHERE episode = ?", (episode,)).fetchone() for episode in written.memo.read]
    if None in sources:
        raise StoreError(f"episode {written.episode} read notes of {written.memo.read[sources.index(None)]}, which wrote no notes")
    db.executemany("INSERT OR IGNORE INTO sources VALUES (?, ?)", [(writer, source[0]) for source in sources])
    for text in written.memo.notes:
        row = (step, writer, written.memo.scope, text)
        added = db.execute("INSERT OR IGNORE INTO notes (step, writer, scope, text) VALUES (?, ?, ?, ?)", row)
        if added.rowcount:
            db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (added.lastrowid, text))


def _delete_old(db: sqlite3.Connection, *, version: int) -> None:
    """Deletes the notes that neither `version` nor a later version shows. The sources of later notes are kept."""
    for (scope,) in db.execute("SELECT scope FROM notes GROUP BY scope HAVING COUNT(*) > ?", (KEEP,)).fetchall():
        old = db.execute("SELECT id, text FROM notes WHERE scope = ? AND id < ?", (scope, _oldest_shown(db, scope, version))).fetchall()
        db.executemany("INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", old)
        db.executemany("DELETE FROM notes WHERE id = ?", [(note,) for note, _ in old])


def _oldest_shown(db: sqlite3.Connection, scope: str, version: int) -> int:
    """Returns the id of the oldest note that a version shows in a scope. A version shows the `KEEP` newest notes."""
    query = "SELECT id FROM notes WHERE scope = ? AND step < ? ORDER BY id DESC LIMIT 1 OFFSET ?"
    row = db.execute(query, (scope, version, KEEP - 1)).fetchone()
    return 0 if row is None else int(row[0])


def _ranked(by_term: Mapping[str, Sequence[int]], total: int) -> list[int]:
    ranks: dict[int, float] = defaultdict(float)
    for notes in by_term.values():
        for note in notes:
            ranks[note] += math.log(1.0 + total / len(notes))
    return sorted(ranks, key=lambda note: (-ranks[note], -note))


def _text_values(row: Sequence[object] | None) -> tuple[str, ...]:
    """Returns the values of a row. Raises `ForeignDatabase` if a value is not a string, because SQLite stores values of any type."""
    values = tuple(value for value in row or () if isinstance(value, str))
    if row is None or len(values) < len(row):
        raise ForeignDatabase("a note is not a string, or has no writer")
    return values
