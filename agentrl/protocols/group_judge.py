"""Judges that score all attempts of a group together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.records import Episode, Score, Task

AWAITING_GROUP_JUDGE = "waits for the judge of its group"
"""Reason of a score that is set when the whole group has ended."""


class GroupJudge(Protocol):
    """Scores all attempts at one task together, for example by ranking them. Set as `tasks.group_judge` in a recipe.

    It may also have the members `prepare`, `timeout_s` and `bounds` of a `PreparedVerifier`.
    """

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """One score per episode, in order. An episode that cannot be judged gets a score with a reason and no value."""
        ...
