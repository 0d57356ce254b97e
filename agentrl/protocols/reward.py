"""The protocols for verifiers, which score an episode, and for judges of groups.

A group judge scores all attempts of a group together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentrl.protocols.sandbox import SandboxBackend
from agentrl.records import Episode, Score, Task


class Verifier(Protocol):
    """Scores a finished episode. A verifier runs on the host, can read the ground truth in `task.data`, and has no access to the agent's
    sandbox."""

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores one episode."""
        ...


class PreparedVerifier(Verifier, Protocol):
    """A verifier with set-up: it may reject its configuration, use the run folder, or set a longer deadline than the default."""

    @property
    def timeout_s(self) -> float:
        """The deadline for one score, in seconds."""

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Prepares the verifier. Called once before the first episode. A `UserError` prevents the run from starting.

        Args:
            root: the project folder.
            folder: the run folder, which may not exist yet; None if there is no run.
        """


class SandboxVerifier(Protocol):
    """A verifier that runs the agent's work in new sandboxes, which are opened after the agent's last action.

    The verifier sees the work only through `episode.outputs`. Errors in the work lower the score. A fault in the sandbox layer raises
    `InfrastructureError`: scoring is retried, and the episode remains unscored if the fault persists. Broken tests of the task raise
    `TaskError`, and the episode remains unscored.
    """

    needs_sandboxes: bool  # True; a plain `Verifier` lacks this attribute

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        """Scores one episode."""
        ...


AWAITING_GROUP_JUDGE = "waits for the judge of its group"
"""The `Score.reason` of a score that is set only when all attempts of the group have ended."""


class GroupJudge(Protocol):
    """Scores all attempts at one task together, for example by ranking them. A recipe sets a group judge as `tasks.group_judge`.

    A group judge may also have the members `prepare`, `timeout_s` and `bounds` of a `PreparedVerifier`.
    """

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """Returns one score per episode, in order. The score of an episode that cannot be judged has a reason and no value."""
        ...
