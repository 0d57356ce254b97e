"""Cache and usage counters of judges, in one SQLite file that several processes may share.

The key of a cached reply is a hash of the query and the model's settings, so a repeated query returns the stored reply at no cost. Only
readable replies are stored. Usage is counted per judge, and is limited by the judge's budget.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentrl.base.database import connect, enter_wal, make_tables, query_deadline
from agentrl.base.liveness import LOCK_WAIT_S
from agentrl.errors import JudgeError, StoreError, UserError

FILE = "judges.sqlite"  # file name in a run folder

_QUERY_S = 60.0
_LONGEST = 1 << 28  # maximum size of a value in bytes
_SCHEMA = (
    "CREATE TABLE answers (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE spent (judge TEXT PRIMARY KEY, calls INTEGER NOT NULL DEFAULT 0, answered INTEGER NOT NULL DEFAULT 0,"
    " cached INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, unreadable INTEGER NOT NULL DEFAULT 0,"
    " abstained INTEGER NOT NULL DEFAULT 0, repeated INTEGER NOT NULL DEFAULT 0, estimated INTEGER NOT NULL DEFAULT 0,"
    " prompt_tokens INTEGER NOT NULL DEFAULT 0, completion_tokens INTEGER NOT NULL DEFAULT 0, money REAL NOT NULL DEFAULT 0.0"
    ") WITHOUT ROWID",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits on a judge's usage in one ledger, that is, in one run: `Budget(calls=10_000, money=5.0)`. None means no limit.

    A query is sent only if no limit has been reached. The limit on calls is exact. The tokens and the cost of a query are known only after
    the reply, so the limits on tokens and cost may be exceeded by the queries in flight when a limit is reached (at most
    `Endpoint.concurrency` queries).
    """

    calls: int | None = None
    tokens: int | None = None  # total of prompt and reply tokens
    money: float | None = None  # in the currency of `Endpoint.prices`

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise UserError(f"Budget.{limit.name} must be positive, got {value}", fix="omit it to set no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeUsage:
    """The queries, tokens and cost of one judge, or of several judges in total."""

    calls: int = 0  # queries that were sent
    answered: int = 0
    cached: int = 0  # queries that were answered from the cache
    failed: int = 0  # queries without a reply
    unreadable: int = 0
    abstained: int = 0
    repeated: int = 0  # requests after the first request of a query
    estimated: int = 0  # replies whose tokens the server did not count
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    @classmethod
    def from_figures(cls, figures: Mapping[str, float]) -> JudgeUsage:
        """Returns the usage in a mapping from field names to figures, as stored in a run's summary."""
        counts = {name: int(figures.get(name, 0)) for name in _NAMES if name != "money"}
        return cls(**counts, money=figures.get("money", 0.0))

    def plus(self, other: JudgeUsage) -> JudgeUsage:
        """Returns the sum of this usage and `other`."""
        return JudgeUsage(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def minus(self, before: JudgeUsage) -> JudgeUsage:
        """Returns this usage minus the usage `before`."""
        return JudgeUsage(**{name: getattr(self, name) - getattr(before, name) for name in _NAMES})

    def summary(self) -> str:
        """Returns a one-line summary of the usage."""
        money = f", money {self.money:.4g}" if self.money else ""
        lost = ", ".join(f"{getattr(self, name)} {name}" for name in ("abstained", "unreadable", "failed") if getattr(self, name))
        tokens = self.prompt_tokens + self.completion_tokens
        return f"{self.calls} judge queries, {self.cached} cached, {tokens:,} tokens{money}{f'; {lost}' if lost else ''}"


_NAMES = tuple(figure.name for figure in fields(JudgeUsage))


def usage_in(folder: Path) -> JudgeUsage | None:
    """Returns the total usage of all judges in a run, from the ledger in the run folder; None if no query was made.

    Raises `StoreError` if the ledger cannot be read.
    """
    if not (folder / FILE).is_file():
        return None
    ledger = JudgeLedger(folder / FILE)
    try:
        usage = ledger.total()
    finally:
        ledger.close()
    return usage if usage.calls or usage.cached else None


class JudgeLedger:
    """A thread-safe cache of replies with usage counters. The database is opened on first use, in memory if `path` is None.

    The methods block, and raise `StoreError` if the database cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: sqlite3.Connection | None = None

    def reserve(self, judge: str, budget: Budget) -> None:
        """Counts a query of `judge` before it is sent. Raises `JudgeError` if the budget is exhausted."""
        limits = {"calls": budget.calls, "prompt_tokens + completion_tokens": budget.tokens, "money": budget.money}
        limits = {figure: limit for figure, limit in limits.items() if limit is not None}
        self.count(judge)
        where = "".join(f" AND {figure} < ?" for figure in limits)
        if self._do(f"UPDATE spent SET calls = calls + 1 WHERE judge = ?{where} RETURNING calls", (judge, *limits.values())) is None:
            texts = ", ".join(f"{limit.name} {value:g}" for limit in fields(budget) if (value := getattr(budget, limit.name)) is not None)
            raise JudgeError(f"the judge's budget is exhausted ({texts}); increase the budget and resume the run")

    def count(self, judge: str, **figures: float) -> None:
        """Adds `figures` to a judge's counters."""
        columns, marks = ", ".join(("judge", *figures)), ", ".join("?" * (1 + len(figures)))
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in figures)
        then = f"DO UPDATE SET {sums}" if sums else "DO NOTHING"
        self._do(f"INSERT INTO spent ({columns}) VALUES ({marks}) ON CONFLICT (judge) {then}", (judge, *figures.values()))

    def cached_answer(self, key: str) -> str | None:
        """Returns the reply stored under a key; None if no reply is stored."""
        row = self._do("SELECT text FROM answers WHERE key = ?", (key,))
        return str(row[0]) if row else None

    def cache_answer(self, key: str, text: str) -> None:
        """Stores a reply under a key, unless a reply is already stored under this key."""
        self._do("INSERT OR IGNORE INTO answers (key, text) VALUES (?, ?)", (key, text))

    def spent(self, judge: str) -> JudgeUsage:
        """Returns the usage of one judge."""
        return self._usage(self._do(f"SELECT {', '.join(_NAMES)} FROM spent WHERE judge = ?", (judge,)))

    def total(self) -> JudgeUsage:
        """Returns the total usage of all judges."""
        return self._usage(self._do(f"SELECT {', '.join(f'sum({name})' for name in _NAMES)} FROM spent", ()))

    def _usage(self, row: Sequence[object] | None) -> JudgeUsage:
        """Returns the usage in a row of the database. Raises `StoreError` if a value has the wrong type, which SQLite does not prevent."""
        values = [0 if value is None else value for value in row or [0] * len(_NAMES)]
        figures: dict[str, Any] = dict(zip(_NAMES, values, strict=True))
        for name, value in figures.items():
            if not isinstance(value, int) and not (name == "money" and isinstance(value, float)):
                raise StoreError(f"the judges' ledger {self.path} is damaged: {name} has a value of type {type(value).__name__}")
        return JudgeUsage(**figures)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def _do(self, statement: str, values: tuple[object, ...]) -> tuple[object, ...] | None:
        """Executes one statement in its own transaction and returns its first row."""
        with self._lock:
            try:
                if self._open is None:
                    self._open = self._connected()
                with query_deadline(self._open, _QUERY_S):
                    rows: list[tuple[object, ...]] = self._open.execute(statement, values).fetchall()
                    return rows[0] if rows else None
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"the judges' ledger {self.path or 'in memory'}: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        db = connect(self.path, _SCHEMA, timeout_s=LOCK_WAIT_S, longest=_LONGEST)
        try:
            if self.path is not None:
                enter_wal(db, timeout_s=LOCK_WAIT_S)
                db.execute("PRAGMA synchronous=NORMAL")
            make_tables(db, _SCHEMA)
        except BaseException:
            db.close()
            raise
        return db
