"""The score of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.records.failure import Blame
from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Record):
    """A verifier's judgement. `value` None means unscored, with the reason; it is never 0 by default."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Text = ""
    reason: Text = ""
    turn_rewards: tuple[tuple[float, ...], ...] = ()  # [trajectory][turn] credit for single turns, beside `value`; empty: none is given
    blame: Blame | None = None  # who is to blame that there is no value, where that is known
    branches: tuple[float | None, ...] = ()  # [trajectory] what each is worth by itself; None: it was not judged; empty: none was
    without: tuple[float | None, ...] = ()  # [trajectory] what `value` would be without it; None: unknown; empty: all are

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.value is None and not self.reason:
            raise ValueError("Score without a value needs a reason")
        if any(reward != reward for rewards in self.turn_rewards for reward in rewards):
            raise ValueError("Score.turn_rewards holds NaN")
        if self.value is not None and self.blame is not None:
            raise ValueError("Score.blame says why there is no value, and there is one")
