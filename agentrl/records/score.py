"""The score of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.records.failure import Blame
from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Record):
    """The result of a verifier. An episode without a score has `value` None and a reason; it never counts as 0."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Text = ""
    reason: Text = ""
    turn_rewards: tuple[
        tuple[float, ...], ...
    ] = ()  # [trajectory][turn] credit for single turns, in addition to `value`; empty if not given
    blame: Blame | None = None  # who caused the missing value, if that is known
    branches: tuple[float | None, ...] = ()  # [trajectory] score of each trajectory; None: not scored; empty if not given
    without: tuple[float | None, ...] = ()  # [trajectory] `value` without this trajectory; None: unknown; empty if not given

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.value is None and not self.reason:
            raise ValueError("Score without a value needs a reason")
        if any(reward != reward for rewards in self.turn_rewards for reward in rewards):
            raise ValueError("Score.turn_rewards contains NaN")
        if self.value is not None and self.blame is not None:
            raise ValueError("Score.blame must be None for a score with a value")
