"""Scores that arrive after their episode: the parts that a score waits for, a part that a person or program sends, and the receipt for
it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.records.fields import Record

MAX_PENDING = 16
"""Maximum number of parts that one score may wait for."""

LAST_EXPIRY = 253_402_300_000.0
"""Latest possible expiry as a Unix time, at the end of the year 9999."""

MAX_NAME_CHARS = 200
"""Maximum length of a part's name, an idempotency key, an episode id or a scorer's name, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPart(Record):
    """A part of a score that has not arrived. The part adds `weight` times its value to the score."""

    name: str
    low: float = 0.0  # smallest valid value
    high: float = 1.0  # largest valid value
    weight: float = 1.0
    expires_at: float | None = None  # Unix time in seconds; None means never
    residual: bool = False  # train without the part and apply it later, instead of waiting for it (`agentrl.experience.residuals`)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        _check_names(self, "name")
        if not all(map(math.isfinite, (self.low, self.high, self.weight))) or self.low >= self.high or self.weight <= 0:
            raise ValueError(f"PendingPart needs finite low < high and weight > 0, got {self.low}, {self.high} and {self.weight}")
        if self.expires_at is not None and not 0 <= self.expires_at <= LAST_EXPIRY:
            raise ValueError(f"PendingPart.expires_at must be a Unix time up to the year 9999, got {self.expires_at}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LateScore(Record):
    """The value of a pending part. The sender chooses `key`. A repeated message must have the same key, so that it counts once.

    If `replace` is true, the value corrects an earlier value. A correction is accepted while the group still waits for a score.
    """

    episode_id: str
    part: str
    value: float
    scored_by: str
    key: str
    replace: bool = False

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        _check_names(self, "episode_id", "part", "scored_by", "key")
        if not math.isfinite(self.value):
            raise ValueError(f"LateScore.value must be finite, got {self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReceipt(Record):
    """The response to a late score that was stored."""

    group: int
    attempt: int  # index of the episode in its group
    remaining: int  # number of parts that the group still waits for
    repeated: bool  # whether the same value was already stored
    replaced: float | None = None  # the value that was replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingScore(Record):
    """A part that can be scored now."""

    episode_id: str
    group: int
    attempt: int  # index of the episode in its group
    task_id: str
    part: str
    low: float
    high: float
    expires_at: float | None  # Unix time in seconds; None means never


def _check_names(record: Record, *fields: str) -> None:
    for field in fields:
        if not 0 < len(getattr(record, field)) <= MAX_NAME_CHARS:
            raise ValueError(f"{type(record).__name__}.{field} must have 1 to {MAX_NAME_CHARS} characters")
