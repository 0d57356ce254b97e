"""What rollouts and rewards agree on where all attempts of a group are judged together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.records import Episode, Score, Task

AWAITING_GROUP_JUDGE = "waits for the judge of its group"
"""Reason in the score of an attempt that has ended, and is judged when its whole group has."""


class GroupJudge(Protocol):
    """Judges all attempts at one task together, such as by ranking them. A recipe names one as `tasks.group_judge`.

    `prepare`, `timeout_s` and `bounds` of an `agentrl.protocols.PreparedVerifier` are its to have, too.
    """

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """One score for each episode, in their order; one that cannot be judged has no value, and a reason."""
        ...
