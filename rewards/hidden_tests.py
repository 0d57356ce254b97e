"""Scores code with hidden tests: the clean room (`agentrl.reward.cleanroom`), and a verifier that rewards the share of passing tests.

    agentrl.reward.cleanroom:grade       1 if every test passes, else 0; the default of task folders
    rewards.hidden_tests:share           the share of tests that pass, for tasks that are too hard to solve completely at first

The clean room runs the agent's outputs and grades them in fresh sandboxes, with tests that the agent cannot access. `Share` is an example
of a verifier that uses the clean room: it declares a parameter for the sandbox backend and passes the backend to the clean room.
"""

from __future__ import annotations

from typing import ClassVar

from agentrl.protocols import SandboxBackend
from agentrl.records import Episode, Score, Task
from agentrl.reward.cleanroom import grade


class Share:
    """The share of hidden tests that pass. Tests that pass without any work are also rewarded, so check that your tests require work."""

    needs_sandboxes = True
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        """Scores the outputs."""
        score = await grade(task, episode, sandboxes)
        if score.value is None:
            return score
        return Score(value=score.parts["tests"], parts={"all": score.value, **score.parts}, evidence=score.evidence)


share = Share()
