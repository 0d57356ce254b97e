"""The protocols of the objects that `EpisodeRunner` and `GroupRunner` call: scorers, memory, routing and listeners."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from agentrl.protocols import MemoryView
from agentrl.records import Episode, EpisodeState, Failure, Group, Score, ScoredEpisode, Task

if TYPE_CHECKING:
    from agentrl.rollout.active import ActiveEpisode


class EpisodeScorer(Protocol):
    """Scores a finished episode, such as `agentrl.reward.TaskScorer`."""

    async def __call__(self, task: Task, episode: Episode, /) -> Score:
        """Returns the score. It has no value if a verifier failed. Raises only if the task is broken."""
        ...


class GroupSampler(Protocol):
    """Samples groups: `GroupRunner` in this process, or `agentrl.rollout.leases.GroupLeases` in rollout workers."""

    @property
    def group_size(self) -> int:
        """Scored attempts per group."""
        ...

    async def run_group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """Returns all attempts at one task, including excluded attempts. See `GroupRunner.run_group`."""
        ...


class GroupScoring(Protocol):
    """Scores the attempts of a group together, such as `agentrl.reward.group_judging.GroupJudgeScorer`."""

    async def score_attempt(self, task: Task, episode: Episode) -> Score:
        """Returns the score of an attempt that just ended, like an `EpisodeScorer`."""
        ...

    async def score_group(self, task: Task, scored: Sequence[ScoredEpisode]) -> Sequence[Score]:
        """Returns the scores of all attempts, in their order, after all have ended."""
        ...


class MemorySource(Protocol):
    """Provides the notes of earlier episodes, such as `agentrl.memory.run_memory.RunMemory`."""

    def view(self, task: Task, group: int | None) -> MemoryView:
        """Returns the notes that the attempts of a group may read; `group` is None outside of groups."""
        ...


class RequestRouter(Protocol):
    """Distributes episodes over servers, such as `agentrl.serving.server_pool.ServerPool`."""

    def episode(self, episode_id: str, task_key: str) -> AbstractContextManager[object]:
        """Returns a context. All requests of an episode are sent inside of it."""
        ...


class AttemptListener(Protocol):
    """Observes attempts, such as `agentrl.failure.FaultRate.record_attempt`."""

    def __call__(self, failure: Failure | None, /) -> None:
        """Called for every attempt that ends, with its failure or None.

        This includes attempts that are retried, but not attempts at a broken task.
        """
        ...


class StartListener(Protocol):
    """Observes the start of an episode."""

    def __call__(self, episode: ActiveEpisode, /) -> None:
        """Called with the running episode, so that a caller that cancels it can read its progress."""
        ...


class CaptureState(Protocol):
    """Captures the state of an episode between two turns."""

    async def __call__(self) -> EpisodeState | None:
        """Returns the state; None if the working directory or the tools' state is too large."""
        ...


class TurnListener(Protocol):
    """Observes the turns of an episode."""

    async def __call__(self, turns: int, capture: CaptureState, /) -> None:
        """Called between two turns with the number of turns. The episode continues when the call returns."""
        ...
