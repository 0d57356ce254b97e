"""Code against hidden tests: the clean room (`agentrl.reward.cleanroom`), and a verifier that pays for the share of tests that pass.

    agentrl.reward.cleanroom:grade       1 when every test passes, else 0; task folders name it by themselves
    rewards.hidden_tests:share           the share of tests that pass, for tasks that nobody solves whole at first

The clean room runs what the agent handed in and judges it in fresh sandboxes, with tests that were never where the agent was. What follows
shows how to build on it: a verifier that judges in sandboxes says so, and hands them on.
"""

from __future__ import annotations

from typing import ClassVar

from agentrl.protocols import SandboxBackend
from agentrl.records import Episode, Score, Task
from agentrl.reward.cleanroom import grade


class Share:
    """The share of hidden tests that pass. A share pays for tests that pass without work, so look at what they check."""

    needs_sandboxes = True
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        score = await grade(task, episode, sandboxes)
        if score.value is None:
            return score
        return Score(value=score.parts["tests"], parts={"all": score.value, **score.parts}, evidence=score.evidence)


share = Share()
