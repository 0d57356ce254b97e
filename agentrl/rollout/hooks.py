"""The protocols of the objects that `EpisodeRunner` and `GroupRunner` call: scorers, memory, routing and listeners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from agentrl.protocols import MemoryView
from agentrl.records import Episode, EpisodeState, Failure, Group, Score, ScoredEpisode, Task

if TYPE_CHECKING:
    from agentrl.rollout.active import ActiveEpisode


EpisodeScorer = Callable[[Task, Episode], Awaitable[Score]]
"""Returns the score of a finished episode, without a value if a verifier failed. Raises an error only if the task is broken.

An example is `agentrl.reward.TaskScorer`."""


class GroupSampler(Protocol):
    """Samples groups. `GroupRunner` samples them in this process, and `agentrl.rollout.leases.GroupLeases` in rollout workers."""

    @property
    def group_size(self) -> int:
        """Number of scored attempts per group."""
        ...

    async def run_group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """Returns all attempts at one task, including excluded attempts. See `GroupRunner.run_group`."""
        ...


class GroupScoring(Protocol):
    """Scores the attempts of a group together. An example is `agentrl.reward.group_judging.GroupJudgeScorer`."""

    async def score_attempt(self, task: Task, episode: Episode) -> Score:
        """Returns the score of an attempt that has just ended, like an `EpisodeScorer`."""
        ...

    async def score_group(self, task: Task, scored: Sequence[ScoredEpisode]) -> Sequence[Score]:
        """Returns the scores of all attempts, in the order of `scored`. Called after all attempts have ended."""
        ...


class MemorySource(Protocol):
    """Provides the notes that earlier episodes wrote. An example is `agentrl.memory.run_memory.RunMemory`."""

    def view(self, task: Task, group: int | None) -> MemoryView:
        """Returns the notes that the attempts of a group may read; `group` is None outside of groups."""
        ...


class RequestRouter(Protocol):
    """Distributes episodes across servers. An example is `agentrl.serving.server_pool.ServerPool`."""

    def episode(self, episode_id: str, task_key: str) -> AbstractContextManager[object]:
        """Returns a context manager within which all requests of an episode are sent."""
        ...


AttemptListener = Callable[[Failure | None], None]
"""Called for every attempt that ends, with its failure, or with None if it did not fail.

This includes attempts that are retried, but not attempts at a broken task. An example is `agentrl.failure.FaultRate.record_attempt`."""

StartListener = Callable[["ActiveEpisode"], None]
"""Called with an episode that starts, so that a caller that cancels it can read its progress."""

CaptureState = Callable[[], Awaitable[EpisodeState | None]]
"""Returns the state of an episode between two turns; None if it cannot be captured, for example because the working directory is too
large."""

TurnListener = Callable[[int, CaptureState], Awaitable[None]]
"""Called between two turns with the number of finished turns. The episode continues when the call returns."""
