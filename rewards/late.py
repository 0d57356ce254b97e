"""A score that a person or another program sends after the episode.

    rewards.late:late                                    with task.data = {"late": {"part": "review", "expires_s": 86400}}
    review = Late(part="review", low=1, high=5)          in rewards/mine.py, referenced as rewards.mine:review

The episode's group is parked in the ledger and trained when its scores have arrived or, with `residual`, trained at once. The run does not
wait. If there are other verifiers, the late value is averaged with theirs. Evaluations and `agentrl check` do not wait either, and treat
the episode as unscored.
"""

from __future__ import annotations

import time
from typing import ClassVar, Self

from pydantic import Field, model_validator

from agentrl.records import Episode, PendingPart, Score, Task
from agentrl.records.late_score import MAX_NAME_CHARS
from agentrl.reward.configured import ConfiguredVerifier

LONGEST_S = 366 * 86_400.0


class Late(ConfiguredVerifier):
    """Declares one value of the score as late. Settings are in `task.data["late"]`."""

    name: ClassVar[str] = "late"
    is_late: ClassVar[bool] = True  # a run that does not accept late scores does not start with this verifier

    part: str = Field("human", min_length=1, max_length=MAX_NAME_CHARS)
    """Name of the part that is sent later."""
    low: float = Field(0.0, allow_inf_nan=False)
    high: float = Field(1.0, allow_inf_nan=False)
    """Smallest and largest valid value."""
    expires_s: float | None = Field(None, gt=0, le=LONGEST_S)
    """Seconds after the episode within which the value must arrive. If it does not, the episode is excluded. None means no limit."""

    residual: bool = False
    """Train the group at once without the value, and apply the value when it has arrived."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low < high is required")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Returns a score that has a pending part and no value."""
        rules = self.for_task(task)
        expires_at = None if rules.expires_s is None else time.time() + rules.expires_s
        part = PendingPart(name=rules.part, low=rules.low, high=rules.high, expires_at=expires_at, residual=rules.residual)
        return Score(value=None, pending=(part,))


late = Late()
