"""What judges have said and what they have cost, in one SQLite file that several processes may share.

The cache is by content: who asks the same model the same thing gets the same answer, and it costs nothing. Only answers that could be
read are kept. Counts are kept for each judge, and its budget is held against them.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentrl.base.database import connect, enter_wal, make_tables, query_deadline
from agentrl.errors import JudgeError, StoreError, UserError
from agentrl.judge.endpoint import Reply

FILE = "judges.sqlite"
"""Its name in a run folder."""

_BUSY_S = 20.0
_QUERY_S = 60.0
_LONGEST = 1 << 28  # bytes of a value
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
    """What a judge may spend in one ledger, that is in one run: `Budget(calls=10_000, money=5.0)`. None: no bound.

    A question begins only while every bound holds. Calls are exact; tokens and money are known afterwards, so that the questions that
    are under way at that moment (at most `Endpoint.concurrency`) may go beyond.
    """

    calls: int | None = None
    tokens: int | None = None  # of prompts and answers together
    money: float | None = None  # in the currency of `Endpoint.prices`

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not value > 0:
                raise UserError(f"Budget.{one.name} must be positive, got {value}", fix="leave it out for no bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeUsage:
    """What one judge has been asked and has cost so far."""

    calls: int = 0  # questions that were sent
    answered: int = 0
    cached: int = 0  # questions that were answered from the cache
    failed: int = 0  # questions without an answer
    unreadable: int = 0
    abstained: int = 0
    repeated: int = 0  # requests beyond the first of a question
    estimated: int = 0  # answers whose tokens the server did not count
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    @classmethod
    def from_figures(cls, figures: Mapping[str, float]) -> JudgeUsage:
        """From a summary, where all are numbers alike."""
        counts = {name: int(figures.get(name, 0)) for name in _NAMES if name != "money"}
        return cls(**counts, money=figures.get("money", 0.0))

    def plus(self, other: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def minus(self, before: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    def summary(self) -> str:
        """For a person, in a line."""
        money = f", money {self.money:.4g}" if self.money else ""
        lost = ", ".join(f"{getattr(self, name)} {name}" for name in ("abstained", "unreadable", "failed") if getattr(self, name))
        tokens = self.prompt_tokens + self.completion_tokens
        return f"{self.calls} questions to judges, {self.cached} answered before, {tokens:,} tokens{money}{f'; {lost}' if lost else ''}"


_NAMES = tuple(one.name for one in fields(JudgeUsage))


def usage_in(folder: Path) -> JudgeUsage | None:
    """What the judges of a run were asked and have cost, in the run folder's ledger; None where no judge was asked there.

    Raises `StoreError` for a ledger that cannot be read.
    """
    if not (folder / FILE).is_file():
        return None
    ledger = JudgeLedger(folder / FILE)
    try:
        found = ledger.total()
    finally:
        ledger.close()
    return found if found.calls or found.cached else None


class JudgeLedger:
    """A cache and its counts. Made at the first use; `path` None keeps them in memory, for this process alone.

    Raises `StoreError` where the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: sqlite3.Connection | None = None

    async def reserve(self, judge: str, budget: Budget) -> None:
        """Counts a question that is about to be sent. Raises `JudgeError` when the budget of `judge` is spent."""
        await asyncio.to_thread(self._begin, judge, budget)

    async def record(self, judge: str, reply: Reply | None, *, money: float = 0.0, unreadable: bool = False) -> None:
        """Counts what came of it; None: nothing."""
        if reply is None:
            return await self.count(judge, failed=1)
        await self.count(
            judge,
            answered=1,
            unreadable=int(unreadable),
            repeated=reply.tries - 1,
            estimated=int(not reply.counted),
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            money=money,
        )

    async def count(self, judge: str, **more: float) -> None:
        await asyncio.to_thread(self._add, judge, more)

    async def cached_answer(self, key: str) -> str | None:
        """The answer kept under a key."""
        return await asyncio.to_thread(self._find, key)

    async def cache_answer(self, key: str, text: str) -> None:
        """Keeps an answer; the first one of a key stays."""
        await asyncio.to_thread(self._do, "INSERT OR IGNORE INTO answers (key, text) VALUES (?, ?)", (key, text))

    def spent(self, judge: str) -> JudgeUsage:
        row = self._do(f"SELECT {', '.join(_NAMES)} FROM spent WHERE judge = ?", (judge,))
        return JudgeUsage(**self._figures(row or (0,) * len(_NAMES)))

    def total(self) -> JudgeUsage:
        """Of all judges together."""
        row = self._do(f"SELECT {', '.join(f'sum({name})' for name in _NAMES)} FROM spent", ())
        return JudgeUsage(**self._figures([0 if value is None else value for value in row or (0,) * len(_NAMES)]))

    def _figures(self, row: Sequence[object]) -> dict[str, Any]:
        """Figures by name. Raises `StoreError` for values of other types, because SQLite stores any."""
        for name, value in zip(_NAMES, row, strict=True):
            if not isinstance(value, int) and not (name == "money" and isinstance(value, float)):
                raise StoreError(f"the judges' ledger {self.path} is damaged: {name} has a value of type {type(value).__name__}")
        return dict(zip(_NAMES, row, strict=True))

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def _begin(self, judge: str, budget: Budget) -> None:
        bounds = {"calls": budget.calls, "prompt_tokens + completion_tokens": budget.tokens, "money": budget.money}
        held = {what: most for what, most in bounds.items() if most is not None}
        self._add(judge, {})
        where = "".join(f" AND {what} < ?" for what in held)
        if self._do(f"UPDATE spent SET calls = calls + 1 WHERE judge = ?{where} RETURNING calls", (judge, *held.values())) is None:
            told = ", ".join(f"{one.name} {value:g}" for one in fields(budget) if (value := getattr(budget, one.name)) is not None)
            raise JudgeError(f"the judge's budget is spent ({told}); raise it, and resume the run")

    def _add(self, judge: str, more: dict[str, float]) -> None:
        columns, marks = ", ".join(("judge", *more)), ", ".join("?" * (1 + len(more)))
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in more)
        then = f"DO UPDATE SET {sums}" if sums else "DO NOTHING"
        self._do(f"INSERT INTO spent ({columns}) VALUES ({marks}) ON CONFLICT (judge) {then}", (judge, *more.values()))

    def _find(self, key: str) -> str | None:
        row = self._do("SELECT text FROM answers WHERE key = ?", (key,))
        return str(row[0]) if row else None

    def _do(self, statement: str, values: tuple[object, ...]) -> tuple[object, ...] | None:
        """Runs one statement in a transaction of its own; its first row."""
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
        db = connect(self.path, _SCHEMA, timeout_s=_BUSY_S, longest=_LONGEST)
        try:
            if self.path is not None:
                enter_wal(db, timeout_s=_BUSY_S)
                db.execute("PRAGMA synchronous=NORMAL")
            make_tables(db, _SCHEMA)
        except BaseException:
            db.close()
            raise
        return db
