"""Judging all attempts of a group together: what rollouts and rewards share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.records import Episode, Score, Task

AWAITING_GROUP_JUDGE = "waits for the judge of its group"
"""Reason in the score of an attempt that has ended, until its group is judged."""


class GroupJudge(Protocol):
    """Judges all attempts at one task together, such as by ranking them. A recipe refers to one as `tasks.group_judge`.

    It may also have `prepare`, `timeout_s` and `bounds` of an `agentrl.protocols.PreparedVerifier`.
    """

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """One score for each episode, in order. An episode that cannot be judged has no value, and a reason."""
        ...
