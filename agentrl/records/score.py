"""The score of an episode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.records.failure import Blame
from agentrl.records.fields import Record, Text
from agentrl.records.late_score import MAX_PENDING, PendingPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Record):
    """The result of a verifier. If an episode has no score, `value` is None and `reason` says why. A missing score never counts as 0.

    A score with `pending` parts has no value yet. When all parts have arrived, the value is `partial` plus the sum of weight times value
    over these parts.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Text = ""
    reason: Text = ""
    turn_rewards: tuple[
        tuple[float, ...], ...
    ] = ()  # [trajectory][turn] credit for individual turns, in addition to `value`; empty if there is none
    blame: Blame | None = None  # who caused the missing value, if that is known
    branches: tuple[float | None, ...] = ()  # [trajectory] score of each trajectory, None if not scored; empty if not given
    without: tuple[float | None, ...] = ()  # [trajectory] `value` without this trajectory, None if unknown; empty if not given
    pending: tuple[PendingPart, ...] = ()  # parts that have not arrived; empty for a complete score
    partial: float = 0.0  # weighted sum of the parts that have arrived while other parts are pending
    wall_s: float = field(default=0.0, compare=False)  # seconds that scoring took; 0 if unknown

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.value is None and not self.reason and not self.pending:
            raise ValueError("Score without a value needs a reason")
        if any(reward != reward for rewards in self.turn_rewards for reward in rewards):
            raise ValueError("Score.turn_rewards contains NaN")
        if self.value is not None and self.blame is not None:
            raise ValueError("Score.blame must be None for a score with a value")
        if self.pending and (self.value is not None or not math.isfinite(self.partial)):
            raise ValueError("Score with pending parts must have no value and a finite partial sum")
        if len(self.pending) > MAX_PENDING or len({part.name for part in self.pending}) < len(self.pending):
            raise ValueError(f"Score.pending must have at most {MAX_PENDING} parts with different names")

    @property
    def is_absent(self) -> bool:
        """Whether the episode has no score and no part of its score is pending."""
        return self.value is None and not self.pending

    def with_part(self, name: str, value: float | None) -> Score:
        """Returns the score after a pending part arrived or expired. If the part expired (`value` is None) or the sum is not finite, the
        episode remains unscored."""
        part = next(part for part in self.pending if part.name == name)
        pending = tuple(other for other in self.pending if other is not part)
        if value is None:
            return replace(self, pending=(), partial=0.0, reason=f"late score expired: {name}")
        partial, parts = self.partial + part.weight * value, {**self.parts, name: value}
        if not math.isfinite(partial):
            return replace(self, parts=parts, pending=(), partial=0.0, reason="the sum of the score's parts is not finite")
        if pending:
            return replace(self, parts=parts, pending=pending, partial=partial)
        return replace(self, parts=parts, pending=(), partial=0.0, value=partial, reason="", blame=None)
