"""The late parts of scores in the SQLite store. Each part that a stored group waits for or waited for has a row.

The body of a group is written only once, so parts are applied when the group is read. The transaction that closes the last part of a group
recomputes the group's counts.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentrl.errors import ScoreRejected
from agentrl.experience.episode_rows import update_scores
from agentrl.experience.ledger import new_entry
from agentrl.records import Group, LateScore, PendingScore, ScoreReceipt

log = logging.getLogger(__name__)

SCHEMA = (
    # A part is open until `closed_at` is set. A closed part has a value, or has expired and has no value.
    "CREATE TABLE late_parts (episode_id TEXT NOT NULL, part TEXT NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL,"
    " low REAL NOT NULL, high REAL NOT NULL, expires_at REAL, value REAL, scored_by TEXT, key TEXT UNIQUE, closed_at REAL,"
    " PRIMARY KEY (episode_id, part))",
    "CREATE TABLE replaced_scores (key TEXT PRIMARY KEY, episode_id TEXT NOT NULL, part TEXT NOT NULL, value REAL NOT NULL,"
    " scored_by TEXT NOT NULL, scored_at REAL NOT NULL, replaced_at REAL NOT NULL)",
    "CREATE INDEX late_parts_by_group ON late_parts (idx)",
    "CREATE INDEX open_parts ON late_parts (idx) WHERE closed_at IS NULL",
)
MAX_PAGE = 10_000
"""Maximum number of episodes on one page of pending scores."""
_COLUMNS = "idx, attempt, low, high, expires_at, value, scored_by, key, closed_at"


class Clock:
    """Unix time without jumps: the wall-clock time at creation plus the time since then, including time while the machine was suspended.

    A deadline is an absolute time, so it can pass while no process is running. If the wall clock is changed while a process is running,
    that process is not affected. If the clock is wrong when a process starts, deadlines are shifted by its error until the next start. An
    expiry is final when it is recorded, and only `expire_scores` records it. A score that was rejected as expired before its expiry was
    recorded may be sent again.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def now(self) -> float:
        """Returns the seconds since 1970."""
        return self._offset + time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class LatePart:
    """The state of a part of a score that a stored group waits for or waited for. The fields have the names and the order of `_COLUMNS`."""

    group: int
    attempt: int
    low: float
    high: float
    expires_at: float | None
    value: float | None = None  # None until the score arrives, and for an expired part
    scored_by: str | None = None
    key: str | None = None
    closed_at: float | None = None  # time at which the score arrived or the expiry was recorded; None for an open part

    def accept(self, score: LateScore, *, now: float, parked: bool, consumed: bool) -> bool:
        """Returns True if a score for this part must be stored, and False if it is already stored. Raises `ScoreRejected`.

        Args:
            parked: whether the group waits for any part.
            consumed: whether a learner step has consumed the group.
        """
        what = f"part {score.part!r} of episode {score.episode_id!r}"
        if self.value is not None:
            if self.value == score.value and (self.key != score.key or self.scored_by == score.scored_by):
                return False
            if consumed or (score.replace and not parked):
                end = "has been trained" if consumed else "waits for no other score"
                raise ScoreRejected(f"{what} has the score {self.value:g}, and its group {end}", cause="finished", fix=_FINAL)
            if not score.replace:
                raise ScoreRejected(f"{what} has the score {self.value:g} by {self.scored_by!r}", cause="contradictory", fix=_REPLACE)
            if self.key == score.key:  # otherwise a repetition of the earlier message could not be recognized
                raise reused_key(score)
        if (self.value is None and self.closed_at is not None) or (self.expires_at is not None and now >= self.expires_at):
            raise ScoreRejected(f"{what} has expired", cause="expired", fix="score earlier, or set a later expiry in the verifier")
        if not self.low <= score.value <= self.high:
            raise ScoreRejected(
                f"{what} must have a score from {self.low:g} to {self.high:g}, got {score.value:g}",
                cause="out_of_range",
                fix="send a value in this range",
            )
        return True


_FINAL = "scores are final when the group has all of them"
_REPLACE = 'replace it (--replace, or "replace": true), or send the same value to repeat a message'


def reused_key(score: LateScore) -> ScoreRejected:
    """Returns the error for an idempotency key that was used for a different part, or for a score that was or would be replaced."""
    return ScoreRejected(
        f"key {score.key!r} belongs to the score of a different part, or to a score that is replaced",
        cause="contradictory",
        fix="send each score with its own key",
    )


def unknown_part(score: LateScore) -> ScoreRejected:
    """Returns the error for a part that no stored group waits for or waited for."""
    return ScoreRejected(
        f"no stored group waits for part {score.part!r} of episode {score.episode_id!r}",
        cause="unknown",
        fix="agentrl score RUN --list shows the parts that wait for a score",
    )


def insert_parts(db: sqlite3.Connection, group: Group) -> None:
    """Inserts the parts that a new group waits for."""
    db.executemany(
        "INSERT INTO late_parts (episode_id, part, idx, attempt, low, high, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        {
            (scored.episode.id, part.name): (scored.episode.id, part.name, group.index, attempt, part.low, part.high, part.expires_at)
            for attempt, scored, part in group.pending
        }.values(),
    )


def add_score(db: sqlite3.Connection, score: LateScore, *, now: float, read: Callable[[int], Group]) -> ScoreReceipt:
    """Stores a late score. The caller must have opened a transaction. `read` returns a stored group with its closed parts.

    Raises `ScoreRejected`.
    """
    if not math.isfinite(now):
        raise ValueError(f"now must be a finite time, got {now}")
    row = db.execute(f"SELECT {_COLUMNS} FROM late_parts WHERE episode_id = ? AND part = ?", (score.episode_id, score.part)).fetchone()
    if row is None:
        raise unknown_part(score)
    part = LatePart(*row)
    group = part.group
    known = (
        "SELECT 1 FROM late_parts WHERE key = ?1 AND NOT (episode_id = ?2 AND part = ?3)"
        " UNION ALL SELECT 1 FROM replaced_scores WHERE key = ?1"
    )
    if db.execute(known, (score.key, score.episode_id, score.part)).fetchone():
        raise reused_key(score)
    consumed = db.execute("SELECT 1 FROM taken WHERE idx = ? AND checkpoint IS NOT NULL", (group,)).fetchone() is not None
    new = part.accept(score, now=now, parked=_open_parts(db, group) > 0, consumed=consumed)
    if new:
        if part.value is not None:
            log.info("%s: %g by %r replaces %g by %r", score.episode_id, score.value, score.scored_by, part.value, part.scored_by)
            old = (part.key, score.episode_id, score.part, part.value, part.scored_by, part.closed_at, now)
            db.execute("INSERT INTO replaced_scores VALUES (?, ?, ?, ?, ?, ?, ?)", old)
        db.execute(
            "UPDATE late_parts SET value = ?, scored_by = ?, key = ?, closed_at = ? WHERE episode_id = ? AND part = ?",
            (score.value, score.scored_by, score.key, now, score.episode_id, score.part),
        )
        update_counts(db, [group], read=read)
    replaced = part.value if new else None
    return ScoreReceipt(group=group, attempt=part.attempt, remaining=_open_parts(db, group), repeated=not new, replaced=replaced)


def _open_parts(db: sqlite3.Connection, group: int) -> int:
    return int(db.execute("SELECT count(*) FROM late_parts WHERE idx = ? AND closed_at IS NULL", (group,)).fetchone()[0])


def has_expired(db: sqlite3.Connection, *, now: float) -> bool:
    """Whether an open part has expired."""
    return db.execute("SELECT 1 FROM late_parts WHERE closed_at IS NULL AND expires_at <= ? LIMIT 1", (now,)).fetchone() is not None


def expire_scores(db: sqlite3.Connection, *, now: float, read: Callable[[int], Group]) -> tuple[int, ...]:
    """Closes all open parts of each episode that has an expired part. Returns the indices of the affected groups, in ascending order."""
    overdue = "SELECT episode_id FROM late_parts WHERE closed_at IS NULL AND expires_at <= ?"
    groups = [row[0] for row in db.execute(f"SELECT DISTINCT idx FROM late_parts WHERE episode_id IN ({overdue}) ORDER BY idx", (now,))]
    if groups:
        db.execute(f"UPDATE late_parts SET closed_at = ? WHERE closed_at IS NULL AND episode_id IN ({overdue})", (now, now))
        update_counts(db, groups, read=read)
    return tuple(groups)


def update_counts(db: sqlite3.Connection, groups: Iterable[int], *, read: Callable[[int], Group]) -> None:
    """Recomputes the counts of those of the given groups that no longer wait for a part."""
    for index in groups:
        if not _open_parts(db, index):
            entry = new_entry(group := read(index))
            db.execute("UPDATE groups SET counted = ?, has_spread = ? WHERE idx = ?", (entry.counted, entry.has_spread, index))
            update_scores(db, group)


def closed_parts(db: sqlite3.Connection, groups: Sequence[int]) -> dict[int, dict[tuple[str, str], float | None]]:
    """Returns the parts that arrived or expired, as group -> (episode id, part) -> value. The value of an expired part is None."""
    closed: dict[int, dict[tuple[str, str], float | None]] = {}
    query = "SELECT idx, episode_id, part, value FROM late_parts WHERE closed_at IS NOT NULL AND idx IN (SELECT value FROM json_each(?))"
    for index, episode_id, part, value in db.execute(query, (json.dumps(groups),)):
        closed.setdefault(index, {})[episode_id, part] = value
    return closed


def pending_scores(db: sqlite3.Connection, *, limit: int, after: str) -> tuple[PendingScore, ...]:
    """Returns the open parts of at most `limit` episodes whose ids follow `after`, in ascending order of id."""
    page = "SELECT DISTINCT episode_id FROM late_parts WHERE closed_at IS NULL AND episode_id > ? ORDER BY episode_id LIMIT ?"
    query = (
        'SELECT episode_id, late_parts.idx AS "group", attempt, task_id, part, low, high, expires_at'
        " FROM late_parts JOIN groups USING (idx)"
        f" WHERE closed_at IS NULL AND episode_id IN ({page}) ORDER BY episode_id, part"
    )
    rows = db.execute(query, (after, min(limit, MAX_PAGE)))
    fields = [column for column, *_ in rows.description]
    return tuple(PendingScore(**dict(zip(fields, row, strict=True))) for row in rows)


def parked_groups(db: sqlite3.Connection) -> tuple[int, ...]:
    """Returns the indices of the groups with open parts, in ascending order."""
    return tuple(row[0] for row in db.execute("SELECT DISTINCT idx FROM late_parts WHERE closed_at IS NULL ORDER BY idx"))
