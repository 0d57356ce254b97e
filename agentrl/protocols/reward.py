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
    """Scores a finished episode. It runs on the host, where `task.data` contains the truth, and never has access to the agent's sandbox."""

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
    `InfrastructureError` (retried, then unscored). If the task's tests are broken, `TaskError` is raised (unscored).
    """

    needs_sandboxes: bool  # True; a plain `Verifier` lacks this attribute

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        """Scores one episode."""
        ...


AWAITING_GROUP_JUDGE = "waits for the judge of its group"
"""The `Score.reason` of a score that is set only when all attempts of the group have ended."""


class GroupJudge(Protocol):
    """Scores all attempts at one task together, for example by ranking them. A recipe sets it as `tasks.group_judge`.

    It may also have the members `prepare`, `timeout_s` and `bounds` of a `PreparedVerifier`.
    """

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """Returns one score per episode, in order. The score of an episode that cannot be judged has a reason and no value."""
        ...
