"""Groups: several attempts at one task, each scored; infrastructure failures are retried in fresh sandboxes, then left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.records import Episode, Group, Score, ScoredEpisode, Task
from agentrl.rollout.episode import EpisodeRunner

Scorer = Callable[[Task, Episode], Awaitable[Score]]
"""Judges a finished episode; gives a Score without a value, never an exception, when a verifier failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Runs groups and single episodes with at most `slots` episodes in flight."""

    runner: EpisodeRunner
    score: Scorer
    slots: asyncio.Semaphore
    group_size: int
    max_retries: int

    async def group(self, index: int, task: Task) -> Group:
        """All attempts at one task, in order, those that are left out included."""
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(self.episode(task, name=f"g{index:06d}-{member}")) for member in range(self.group_size)]
        return Group(index=index, task_id=task.id, task_key=task.key, episodes=tuple(job.result() for job in jobs))

    async def episode(self, task: Task, *, name: str) -> ScoredEpisode:
        """One scored episode, after at most `max_retries` fresh attempts when the infrastructure failed."""
        for attempt in range(self.max_retries + 1):
            async with self.slots:
                episode = await self.runner.run(task, episode_id=f"{name}-a{attempt}", attempt=attempt)
            if not episode.left_out:
                return ScoredEpisode(episode=episode, score=await self.score(task, episode))
            if attempt < self.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))  # a restarting part gets a moment
        failure = episode.failures[-1]
        return ScoredEpisode(
            episode=episode, score=Score(value=None, reason=f"left out: {failure.blame} {failure.kind}: {failure.message}")
        )
