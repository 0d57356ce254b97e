"""Groups: several attempts at one task, each scored; infrastructure failures are retried in fresh sandboxes, then left out.

A group may be a forest instead of a row of attempts (`BranchingConfig`): some attempts run to a given turn, and others go on from
their state there. And it may go on where a process that died left it (`EpisodeKeeper`). A task that turns out to be wrong in
itself takes its whole group out: what is broken for one attempt says nothing about the policy in the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from agentrl.errors import PluginError, TaskError
from agentrl.protocols import EpisodeKeeper
from agentrl.recipe import BranchingConfig
from agentrl.records import Blame, Episode, EpisodeState, Failure, Group, Score, ScoredEpisode, Task, Trajectory
from agentrl.rollout.episode import Capture, EpisodeRunner, OnTurn, task_fault

log = logging.getLogger(__name__)

Scorer = Callable[[Task, Episode], Awaitable[Score]]
"""Judges a finished episode; gives a Score without a value when a verifier failed, and raises only for a task that is wrong."""


class _BrokenTask(Exception):
    """Ends the other attempts at a task that is wrong in itself."""

    def __init__(self, fault: Failure) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Fork:
    """A stem, and the members of the group that go on from its state after `turn`."""

    stem: int
    branches: range
    turn: int
    state: asyncio.Future[EpisodeState | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, state: EpisodeState | None) -> None:
        """Lets the branches begin: from `state`, or where the stem ended before its turn, as attempts of their own."""
        if not self.state.done():
            self.state.set_result(state)


@dataclass(frozen=True, slots=True)
class _Place:
    """One member of one group."""

    group: int
    member: int
    fork: _Fork | None
    oldest_version: int

    @property
    def name(self) -> str:
        return f"g{self.group:06d}-{self.member}"

    @property
    def stem_of(self) -> _Fork | None:
        return self.fork if self.fork is not None and self.fork.stem == self.member else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Runs groups and single episodes with at most `slots` episodes in flight."""

    runner: EpisodeRunner
    score: Scorer
    slots: asyncio.Semaphore
    group_size: int
    max_retries: int
    branching: BranchingConfig | None = None
    keeper: EpisodeKeeper | None = None

    async def group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """All attempts at one task, in order, those that are left out included; all are when the task is wrong in itself.

        Args:
            oldest_version: an attempt that the keeper has goes on only when no older version sampled any of its tokens.
        """
        broken: Failure | None = None
        jobs: list[asyncio.Task[ScoredEpisode]] = []
        try:
            async with asyncio.TaskGroup() as running:
                jobs += [running.create_task(self._member(place, task)) for place in self._places(index, oldest_version)]
        except* _BrokenTask as errors:
            broken = _first(errors).fault
        if broken is not None:
            return left_out_group(index, task.id, task.key, broken, size=self.group_size)
        return Group(index=index, task_id=task.id, task_key=task.key, episodes=tuple(job.result() for job in jobs))

    async def episode(self, task: Task, *, name: str, start: EpisodeState | None = None, on_turn: OnTurn | None = None) -> ScoredEpisode:
        """One scored episode, after at most `max_retries` fresh attempts when the infrastructure failed.

        Args:
            start: what the first attempt goes on from: the attempt of this name that it is a state of, or another one's, as a branch.
            on_turn: see `EpisodeRunner.run`.
        """
        continued = start is not None and start.episode_id == f"{name}-a{start.attempt}"
        for attempt in range(start.attempt if start is not None and continued else 0, self.max_retries + 1):
            async with self.slots:
                episode = await self.runner.run(task, episode_id=f"{name}-a{attempt}", attempt=attempt, start=start, on_turn=on_turn)
            start = None
            if not episode.left_out:
                try:
                    score = await self.score(task, episode)
                except (TaskError, PluginError) as error:  # a verifier that does not exist
                    fault = task_fault(error)
                else:
                    if score.blame is not Blame.TASK:
                        return ScoredEpisode(episode=episode, score=score)
                    fault = Failure(stage="grade", blame=Blame.TASK, kind="unscored", message=score.reason[:2000])
                episode = replace(episode, failures=(*episode.failures, fault))
            failure = next(one for one in reversed(episode.failures) if one.blame is not Blame.POLICY)
            if failure.blame is Blame.TASK:
                break
            if attempt < self.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))  # a restarting part gets a moment
        return _unscored(episode, failure)

    def _places(self, index: int, oldest_version: int) -> list[_Place]:
        if self.branching is None:
            return [_Place(index, member, None, oldest_version) for member in range(self.group_size)]
        width = self.branching.branches
        forks = [_Fork(stem, range(stem + 1, stem + width), self.branching.turn) for stem in range(0, self.group_size, width)]
        return [_Place(index, member, forks[member // width], oldest_version) for member in range(self.group_size)]

    async def _member(self, place: _Place, task: Task) -> ScoredEpisode:
        """One attempt, begun or continued. A branch waits for its stem without taking a slot, so stems never wait for branches."""
        fork = place.stem_of
        try:
            found = await self._found(place, task)
            if isinstance(found, ScoredEpisode):
                return found
            if fork is not None and found is not None and len(found.turns) >= fork.turn:
                fork.settle(found if len(found.turns) == fork.turn < task.limits.turns else None)  # past it, branches have their own
            if place.fork is not None and fork is None and found is None:
                found = await place.fork.state
            on_turn = None if fork is None and self.keeper is None else self._watching(place, task)
            scored = await self.episode(task, name=place.name, start=found, on_turn=on_turn)
        finally:
            if fork is not None:
                fork.settle(None)
        fault = next((failure for failure in scored.episode.failures if failure.blame is Blame.TASK), None)
        if fault is not None:
            raise _BrokenTask(fault)
        if self.keeper is not None:
            await self.keeper.finish(place.group, place.member, scored)
        return scored

    def _watching(self, place: _Place, task: Task) -> OnTurn:
        """Keeps the state of every turn durably, where there is a keeper, and hands the one to branch from to the branches."""

        async def on_turn(turns: int, capture: Capture) -> None:
            fork = place.stem_of
            forks = fork is not None and not fork.state.done() and turns == fork.turn < task.limits.turns
            if self.keeper is None and not forks:
                return
            state = await capture()
            if state is None:
                return
            if self.keeper is not None:
                # The stem's comes first: a stem that is found at its turn can branch again, branches of a lost one could not be told.
                for member in (place.member, *(fork.branches if fork is not None and forks else ())):
                    await self.keeper.keep(place.group, member, state)
            if fork is not None and forks:
                fork.settle(state)

        return on_turn

    async def _found(self, place: _Place, task: Task) -> EpisodeState | ScoredEpisode | None:
        """What a process that died left of this attempt, if it can still be used."""
        found = None if self.keeper is None else await self.keeper.find(place.group, place.member)
        if found is None:
            return None
        episode = found.episode if isinstance(found, ScoredEpisode) else found
        oldest = episode.oldest_version
        if episode.task_key != task.key:
            log.warning("attempt %s starts afresh: task %s is not the one it was begun with", place.name, task.id)
            return None
        if oldest is not None and oldest < place.oldest_version:
            log.warning("attempt %s starts afresh: version %d, at least %d needed", place.name, oldest, place.oldest_version)
            return None
        return found


def left_out_group(index: int, task_id: str, task_key: str, fault: Failure, *, size: int) -> Group:
    """The group of a task that is wrong in itself: nothing of it is trained or counted, and it says why."""
    nothing = (Trajectory(agent="main", turns=(), stop_reason="failed"),)
    episodes = tuple(
        Episode(id=f"g{index:06d}-{member}-a0", task_id=task_id, task_key=task_key, trajectories=nothing, failures=(fault,))
        for member in range(size)
    )
    return Group(index=index, task_id=task_id, task_key=task_key, episodes=tuple(_unscored(episode, fault) for episode in episodes))


def _unscored(episode: Episode, failure: Failure) -> ScoredEpisode:
    return ScoredEpisode(episode=episode, score=Score(value=None, reason=f"left out: {failure.blame} {failure.kind}: {failure.message}"))


def _first(errors: ExceptionGroup[_BrokenTask]) -> _BrokenTask:
    first = errors.exceptions[0]
    assert isinstance(first, _BrokenTask), "a task group's errors are not nested"
    return first
