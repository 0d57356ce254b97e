"""The protocols of verifiers, which score an episode.

The protocol of judges, which score all attempts of a group together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentrl.protocols.sandbox import SandboxBackend
from agentrl.records import Episode, Score, Task


class Verifier(Protocol):
    """Scores a finished episode. It runs on the host, where `task.data` contains the truth, and never gets the sandbox of the agent."""

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores one episode."""
        ...


class PreparedVerifier(Verifier, Protocol):
    """A verifier with set-up: it may reject its configuration, use the run folder, or need more time than others."""

    @property
    def timeout_s(self) -> float:
        """Deadline of one score, in seconds."""

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Prepares the verifier. Called once before the first episode. A `UserError` prevents the start of the run.

        Args:
            root: the folder of the project.
            folder: the run folder, which may not exist yet; None if there is no run.
        """


class SandboxVerifier(Protocol):
    """A verifier that runs the agent's work in new sandboxes, opened after the last action of the agent.

    The verifier sees the work only through `episode.outputs`. Errors of the work lower the score. A fault of the sandbox layer raises
    `InfrastructureError` (retried, then unscored), and a task with broken tests raises `TaskError` (unscored).
    """

    needs_sandboxes: bool  # True; a plain `Verifier` lacks this attribute

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        """Scores one episode."""
        ...


AWAITING_GROUP_JUDGE = "waits for the judge of its group"
"""Reason of a score that is set when all attempts of the group have ended."""


class GroupJudge(Protocol):
    """Scores all attempts at one task together, for example by ranking them. Set as `tasks.group_judge` in a recipe.

    It may also have the members `prepare`, `timeout_s` and `bounds` of a `PreparedVerifier`.
    """

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """Returns one score per episode, in order. An episode that cannot be judged gets a score with a reason and no value."""
        ...
