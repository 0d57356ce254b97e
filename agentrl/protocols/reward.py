"""Verifiers: what scores an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from agentrl.protocols.sandbox import SandboxBackend
from agentrl.records import Episode, Score, Task


class Verifier(Protocol):
    """Judges a finished episode. Runs on the host, gets the truth in `task.data`, and never the sandbox of the agent."""

    async def __call__(self, task: Task, episode: Episode) -> Score: ...


class PreparedVerifier(Verifier, Protocol):
    """A verifier that may refuse to be used, keeps something in the run folder, or takes longer than others."""

    @property
    def timeout_s(self) -> float:
        """Seconds that one score may take."""

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Called once before the first episode; `UserError` keeps the run from starting.

        Args:
            root: the project.
            folder: the run folder, which may not exist yet; None: there is no run.
        """


class SandboxVerifier(Protocol):
    """A verifier that judges in sandboxes of its own, opened after the agent's last action; it never gets the agent's.

    It knows the agent's work from `episode.outputs` alone. What the work does wrong is a score; a fault of the sandbox layer
    is raised (`InfrastructureError`: tried again, then unscored), and so is a task whose tests are broken (`TaskError`: unscored).
    """

    needs_sandboxes: bool  # True; a plain `Verifier` has no such attribute

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score: ...
