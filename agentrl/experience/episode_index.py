"""Reads the episodes of a run: lists, filters, sorts and searches them, and opens single episodes with all of their tokens.

    with EpisodeIndex(run_dir) as index:
        page = index.search(EpisodeQuery(kind="join", outcome="failed", text="KeyError", sort="tokens"))
        record = index.episode(page.rows[0].id)

The index only reads, and never blocks the run that writes. It reads `experience.sqlite`, whose table of episodes is written with the groups
(`agentrl.experience.episode_rows`). A run that an older version wrote, or that has a user-supplied store, has no such table. For such a
run, `agentrl store RUN --index` copies the episodes to `episodes.sqlite`, which is read instead. Every query has a deadline. All strings in
the results are untrusted.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.base import user_code
from agentrl.base.database import connect_read_only, decompress, query_deadline, read_pragma, require_schema
from agentrl.errors import StoreError, UserError
from agentrl.experience import late_parts
from agentrl.experience.episode_query import EpisodeQuery, Position, QueryPlan, Statement, plan_query
from agentrl.experience.episode_rows import NAME_CHARS
from agentrl.experience.store import APPLICATION_ID, DELETED, SCHEMA, deleted_error, translated_errors
from agentrl.records import Group, ScoredEpisode, codec

STORE_FILE, COPY_FILE = "experience.sqlite", "episodes.sqlite"
MAX_PAGE = 1000
"""Maximum number of rows on one page."""
MAX_TOTAL = 10_000
"""Maximum number of matching episodes that are counted. A page reports whether there are more."""
TIMEOUT_S = 5.0
"""Maximum duration of one query, in seconds."""
MAX_FACETS = 200
"""Maximum number of values per facet."""
_WALK_S = 0.05  # maximum time to collect a page in index order; after that, all episodes are compared
_CACHE_KIB = 64 << 10  # size of SQLite's page cache
_MOST_GROUPS = 100_000  # maximum rows from a GROUP BY
_FIX = "agentrl store RUN --index builds the index"

_ROWS = (
    "SELECT number, id, episodes.idx, attempt, coalesce(taken.step + 1, episodes.step), taken.step, checkpoint, tokens_trained, reason,"
    " score, parts, oldest, newest, tokens, turns, seconds, sampled_at, task_id, tools, phase, kind, split, outcome, stop, exclusion, blame"
    " FROM episodes LEFT JOIN taken ON taken.idx = episodes.idx WHERE number IN (SELECT value FROM json_each(?))"
)
_BATCH = 256  # rows that `records` reads at once
_LABELS = 7  # number of labels, which are the last columns of `_ROWS`


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """The summary of an episode, for lists. Its strings are untrusted."""

    number: int  # ascending in the order in which episodes were stored
    id: str
    group: int | None  # None for an episode of an evaluation
    attempt: int  # index in its group
    step: int | None  # learner step of its group or of the evaluated version, counted from 1; None if there is none yet
    state: str  # state of its group: parked, ready, assigned, trained or excluded; "evaluated" if it has no group
    unused: str  # why its group was not trained; empty if it was trained, or if this is not decided
    phase: str
    task_id: str
    kind: str
    split: str
    outcome: str
    stop_reason: str
    score: float | None
    parts: Mapping[str, float]  # parts of the score
    exclusion: str  # kind of the failure that excludes it; empty if it is not excluded
    blame: str
    oldest_version: int | None
    newest_version: int | None
    tokens: int  # sampled tokens
    turns: int
    tools: tuple[str, ...]  # tool names in the order of their first calls
    seconds: float
    sampled_at: float  # Unix time at which its last turn ended


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePage:
    """A page of the rows that match a query."""

    rows: tuple[EpisodeRow, ...]
    next: str  # value of `EpisodeQuery.after` for the next page; empty on the last page
    total: int  # number of matching episodes; if not exact, `MAX_TOTAL`
    is_exact: bool  # whether exactly `total` episodes match


@dataclass(frozen=True, slots=True, kw_only=True)
class Facets:
    """For each filter, the number of episodes by value. The most frequent values come first; each filter has at most `MAX_FACETS`
    values."""

    phases: Mapping[str, int]
    kinds: Mapping[str, int]
    splits: Mapping[str, int]
    outcomes: Mapping[str, int]
    stop_reasons: Mapping[str, int]
    exclusions: Mapping[str, int]
    tools: Mapping[str, int]
    episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """A stored episode with its turns and tokens, and the other attempts in its group."""

    row: EpisodeRow
    group: Group  # with the prompt of the task; for an evaluation, a group that contains only this episode

    @property
    def scored(self) -> ScoredEpisode:
        """The episode and its score."""
        return self.group.episodes[self.row.attempt]


class EpisodeIndex:
    """The episodes of one run. Safe for several threads; a context manager.

    Args:
        run_dir: a run folder, which a third party may have written.
        timeout_s: maximum duration of a query, in seconds.

    Raises `UserError` if the run has no index. The constructor and every method raise `StoreError` if a file is damaged or a query takes
    too long.
    """

    def __init__(self, run_dir: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # one connection, used by one thread at a time
        self.path, self._db = _open(run_dir, timeout_s=timeout_s)

    def search(self, query: EpisodeQuery) -> EpisodePage:
        """Returns a page of the matching episodes, with 1 to `MAX_PAGE` rows. Raises `UserError` if the query is invalid."""
        limit = min(max(query.limit, 1), MAX_PAGE)
        with self._reading() as db:
            plan = plan_query(db, query)
            if plan is None:
                return EpisodePage(rows=(), next="", total=0, is_exact=True)
            page, total = self._page(query, plan, limit + 1)
            rows = self._rows([number for number, _ in page[:limit]])
        more = Position(*page[limit - 1]).encode() if len(page) > limit else ""
        is_exact = query.is_all or total <= MAX_TOTAL
        return EpisodePage(rows=rows, next=more, total=total if is_exact else MAX_TOTAL, is_exact=is_exact)

    def row(self, episode_id: str) -> EpisodeRow | None:
        """Returns the newest row with an episode's id; None if the episode is not stored."""
        with self._reading():
            (newest,) = self._all("SELECT max(number) FROM episodes WHERE id = ?", (episode_id[:NAME_CHARS],))[0]
            return None if newest is None else next(iter(self._rows([newest])), None)

    def episode(self, episode_id: str) -> EpisodeRecord | None:
        """Returns an episode with its turns and tokens; None if the episode is not stored."""
        row = self.row(episode_id)
        return None if row is None else self._record(row)

    def group(self, index: int) -> Group | None:
        """Returns a stored group with its episodes and all late scores so far; None if the group is not stored. Raises `StoreError` if its
        episodes were deleted."""
        with self._reading():
            return self._group(index) if self._all("SELECT 1 FROM groups WHERE idx = ?", (index,)) else None

    def numbers(self, query: EpisodeQuery) -> list[int]:
        """Returns the row numbers of all matching episodes, in ascending order. Raises `UserError` if the query is invalid."""
        with self._reading() as db:
            plan = plan_query(db, query)
            return [] if plan is None else sorted(row[0] for row in self._all(plan.matches.sql, plan.matches.values))

    def rows(self, numbers: Sequence[int]) -> tuple[EpisodeRow, ...]:
        """Returns the rows with these numbers, in the given order. Numbers without a row are omitted."""
        with self._reading():
            return self._rows(numbers)

    def records(self, numbers: Iterable[int]) -> Iterator[EpisodeRecord]:
        """Yields the episodes with these row numbers, in the given order. A group is read only once if its episodes are adjacent.

        Raises `StoreError` if an episode is damaged.
        """
        group: tuple[int, Group] | None = None
        left = iter(numbers)
        while part := list(islice(left, _BATCH)):
            for row in self.rows(part):
                if row.group is None or group is None or group[0] != row.group:
                    record = self._record(row)
                    group = None if row.group is None else (row.group, record.group)
                else:
                    record = EpisodeRecord(row=row, group=group[1])
                yield record

    def facets(self) -> Facets:
        """Returns, for each filter, its values and their numbers of episodes."""
        columns = ("phase", "kind", "split", "outcome", "stop", "exclusion")
        counts = {column: Counter[str]() for column in columns}
        with self._reading():
            names = dict(self._all(f"SELECT id, name FROM labels LIMIT {_MOST_GROUPS}"))
            by = ", ".join(columns)
            query = f"SELECT count(*), {by} FROM episodes INDEXED BY episodes_scan GROUP BY {by} LIMIT {_MOST_GROUPS}"
            for count, *labels in self._all(query):
                for column, label in zip(columns, labels, strict=True):
                    counts[column][str(names.get(label, ""))] += count
            rows = self._all(f"SELECT tool, count(*) FROM episode_tools GROUP BY tool LIMIT {_MOST_GROUPS}")
            tools = Counter({str(names.get(tool, "")): count for tool, count in rows})
        exclusions = Counter({name: count for name, count in counts["exclusion"].items() if name})
        return Facets(
            phases=_frequent(counts["phase"]),
            kinds=_frequent(counts["kind"]),
            splits=_frequent(counts["split"]),
            outcomes=_frequent(counts["outcome"]),
            stop_reasons=_frequent(counts["stop"]),
            exclusions=_frequent(exclusions),
            tools=_frequent(tools),
            episodes=counts["phase"].total(),
        )

    def has_deleted(self) -> bool:
        """Whether the episodes of the oldest group were deleted because of `store.options.keep_steps`.

        Lists do not contain deleted episodes.
        """
        with self._reading():
            oldest = self._all("SELECT substr(body, 1, 7) FROM groups WHERE idx >= 0 ORDER BY idx LIMIT 1")
            return bool(oldest) and oldest[0][0] == DELETED

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> EpisodeIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, row: EpisodeRow) -> EpisodeRecord:
        with self._reading():
            if row.group is not None:
                group = self._group(row.group)
            else:
                body = self._all("SELECT body FROM evaluated WHERE number = ?", (row.number,))
                group = self._decode(f"episode {row.number}", body)
        if not 0 <= row.attempt < len(group.episodes):
            raise StoreError(f"episode {row.number} in {self.path} is not in its group")
        return EpisodeRecord(row=row, group=group)

    def _page(self, query: EpisodeQuery, plan: QueryPlan, most: int) -> tuple[list[tuple[int, float]], int]:
        """Returns the row numbers and sort values of the first `most` matching episodes, and the number of all matches. The number of
        matches is exact up to `MAX_TOTAL`; if more episodes match, it may be any number above `MAX_TOTAL`."""
        if query.is_all:
            return self._first(plan.walk, most), int(self._all("SELECT count(*) FROM episodes")[0][0])
        matches = [row[0] for row in self._first(plan.matches, MAX_TOTAL + 1)]
        if len(matches) <= MAX_TOTAL:  # for their pages, the other episodes need not be queried
            chosen = Statement(sql=plan.chosen.sql, values=(json.dumps(matches), *plan.chosen.values))
            return self._first(chosen, most), len(matches)
        try:
            return self._first(plan.walk, most, seconds=_WALK_S), len(matches)
        except sqlite3.OperationalError as error:
            if "a query took longer" not in str(error):  # see `query_deadline`
                raise
        return self._first(plan.scan, most), len(matches)

    def _first(self, statement: Statement, most: int, *, seconds: float | None = None) -> list[Any]:
        return self._all(f"{statement.sql} LIMIT {most}", statement.values, seconds=seconds)

    def _all(self, sql: str, values: Sequence[Any] = (), *, seconds: float | None = None) -> list[Any]:
        """Returns all rows that a query yields, or raises an error at its deadline. The caller must hold the lock."""
        with query_deadline(self._db, self._timeout_s if seconds is None else seconds):
            return self._db.execute(sql, values).fetchall()

    def _rows(self, numbers: Sequence[int]) -> tuple[EpisodeRow, ...]:
        """Returns the rows with these numbers, in the given order."""
        stored = {row[0]: row for row in self._all(_ROWS, (json.dumps(numbers),))}
        labels = {label for row in stored.values() for label in row[-_LABELS:]}
        query = "SELECT id, name FROM labels WHERE id IN (SELECT value FROM json_each(?))"
        names = dict(self._all(query, (json.dumps(sorted(labels)),)))
        try:
            return tuple(_row(stored[number], names) for number in numbers if number in stored)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreError(f"a row of the episode table in {self.path} is damaged: {user_code.describe_error(error, 200)}") from error

    def _group(self, index: int) -> Group:
        rows = self._all("SELECT body FROM groups WHERE idx = ?", (index,))
        if rows and isinstance(rows[0][0], bytes) and rows[0][0].startswith(DELETED):
            raise deleted_error(index, self.path)
        group = self._decode(f"group {index}", rows)
        with query_deadline(self._db, self._timeout_s):
            return group.with_parts(late_parts.closed_parts(self._db, [index]).get(index, {}))

    def _decode(self, what: str, rows: Sequence[Sequence[object]]) -> Group:
        if not rows:
            raise StoreError(f"{what} is not in {self.path}")
        try:
            return codec.from_json(Group, decompress(rows[0][0]))
        except ValueError as error:
            raise StoreError(f"{what} in {self.path} is damaged: {user_code.describe_error(error, 500)}") from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated_errors(self.path):
            yield self._db


def _row(row: Sequence[Any], names: Mapping[int, str]) -> EpisodeRow:
    number, id_, group, attempt, step, taken, checkpoint, trained, reason, score, parts, oldest, newest, *rest = row
    tokens, turns, seconds, sampled_at, task_id, tools, *labels = rest
    phase, kind, split, outcome, stop, exclusion, blame = (names[label] for label in labels)
    if group is None:
        state = "evaluated"
    elif taken is None:
        state = "parked" if outcome == "pending" else "ready"
    else:
        state = "assigned" if checkpoint is None else "trained" if trained else "excluded"
    return EpisodeRow(
        number=int(number),
        id=str(id_),
        group=group if group is None else int(group),
        attempt=int(attempt),
        step=step if step is None else int(step),
        state=state,
        unused=str(reason or ""),
        phase=phase,
        task_id=str(task_id),
        kind=kind,
        split=split,
        outcome=outcome,
        stop_reason=stop,
        score=None if score is None else float(score),
        parts={str(name): float(value) for name, value in json.loads(parts).items()},
        exclusion=exclusion,
        blame=blame,
        oldest_version=oldest if oldest is None else int(oldest),
        newest_version=newest if newest is None else int(newest),
        tokens=int(tokens),
        turns=int(turns),
        tools=tuple(map(str, json.loads(tools))),
        seconds=float(seconds),
        sampled_at=float(sampled_at),
    )


def _frequent(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common(MAX_FACETS))


def _open(run_dir: Path, *, timeout_s: float) -> tuple[Path, sqlite3.Connection]:
    """Opens the file that contains the table of episodes: the store or, if it has none, the copy. Raises `UserError` if neither file
    contains the table."""
    paths = [path for name in (STORE_FILE, COPY_FILE) if (path := run_dir / name).is_file()]
    for path in paths:
        with translated_errors(path):
            if (db := _connect(path, timeout_s=timeout_s)) is not None:
                return path, db
    if paths:
        raise UserError(f"{paths[0]} has no index of its episodes", fix=_FIX)
    if not (run_dir / "recipe.json").is_file():
        raise UserError(f"{run_dir} is not a run folder", fix="give the folder of a run, such as runs/quickstart")
    raise UserError(f"{run_dir} has no stored groups yet", fix=f"wait until the first group is stored; for a user-supplied store, {_FIX}")


def _connect(path: Path, *, timeout_s: float) -> sqlite3.Connection | None:
    """Opens a store for reading. Returns None if the store has no table of episodes."""
    db = connect_read_only(path, SCHEMA, timeout_s=timeout_s)
    try:
        with query_deadline(db, timeout_s):
            db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            if read_pragma(db, "application_id") != APPLICATION_ID:
                raise StoreError(f"{path} is an SQLite file but not an experience store")
            if indexed := bool(db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'episodes'").fetchone()):
                require_schema(db, SCHEMA)
    except BaseException:
        db.close()
        raise
    if indexed:
        return db
    db.close()
    return None
