"""Runs groups: several attempts at one task, each scored. An attempt that ends with an infrastructure fault is retried in a fresh sandbox,
and excluded if the retries fail too.

A group may be a forest (`GroupConfig.branches`): some attempts run to a given turn, and other attempts branch from their state after that
turn. More attempts may start than the group needs, so that it does not wait for the slowest (`agentrl.rollout.scheduling`). After a process
has died, its groups may continue from their saved episodes (`EpisodeCheckpoints`). A broken task excludes its group, because no attempt at
such a task measures the policy. Any other fault, even an unexpected fault, affects only one attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from agentrl.base import user_code
from agentrl.base.activity import ACTIVITY, ATTEMPTS, SCORING
from agentrl.errors import EnvironmentCrash
from agentrl.protocols import EpisodeCheckpoints
from agentrl.protocols.reward import AWAITING_GROUP_JUDGE
from agentrl.records import Blame, Episode, EpisodeState, Failure, Group, Score, ScoredEpisode, Task, Trajectory
from agentrl.records.failure import NEIGHBOR_CRASH, NO_ACTION
from agentrl.rollout.active import ActiveEpisode
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.faults import NOT_TAKEN, failure_from_error, infrastructure_fault
from agentrl.rollout.hooks import AttemptListener, CaptureState, EpisodeScorer, GroupScoring, MemorySource, StartListener, TurnListener
from agentrl.rollout.repeats import PROVOKED, FaultHistory, SampledTurns, may_be_provoked, part_in
from agentrl.rollout.requests import loop_time
from agentrl.rollout.scheduling import AttemptScheduler, GroupAttempt

log = logging.getLogger(__name__)

MAX_RETRIES = 2
"""Maximum number of retries of an episode after infrastructure faults. If the last retry also fails, the episode is excluded or, if its
actions provoked the fault, scored."""
RETRY_S = 0.2
"""Seconds before the first retry. The pause doubles with each further retry, up to 5 seconds."""


class _BrokenTask(Exception):
    """Raised to stop the other attempts at a broken task."""

    def __init__(self, fault: Failure) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Fork:
    """A stem attempt, and the attempts that branch from its state after `turn`."""

    stem: int
    branches: range
    turn: int
    state: asyncio.Future[EpisodeState | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, state: EpisodeState | None) -> None:
        """Starts the branches from `state`. If `state` is None, the branches start from the task, because the stem ended before `turn`."""
        if not self.state.done():
            self.state.set_result(state)


@dataclass(frozen=True, slots=True)
class _Member:
    """An attempt in a group."""

    group: int
    number: int
    fork: _Fork | None
    oldest_version: int

    @property
    def name(self) -> str:
        return f"g{self.group:06d}-{self.number}"

    @property
    def stem_of(self) -> _Fork | None:
        return self.fork if self.fork is not None and self.fork.stem == self.number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Runs groups and single episodes. `slots` limits how many attempts run at once."""

    runner: EpisodeRunner
    scorer: EpisodeScorer
    group_scoring: GroupScoring | None = None  # replaces `scorer` in groups
    slots: AbstractAsyncContextManager[object]  # context manager that each attempt enters before it starts
    group_size: int
    max_retries: int = MAX_RETRIES
    spare_attempts: int = 0  # extra attempts; when `group_size` attempts count, the rest are cancelled. 0 with `branches`
    stop_equal_after: int = 0  # number of attempts that start first; the group stops if their scores are equal. 0 starts all at once
    branches: int = 1  # number of attempts that continue from one state, after `branch_turn`; 1 for independent attempts
    branch_turn: int = 1
    checkpoints: EpisodeCheckpoints | None = None
    memory: MemorySource | None = None
    on_attempt: AttemptListener = lambda failure: None
    history: FaultHistory = field(default_factory=FaultHistory)

    async def run_group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """Runs all attempts at one task and returns the group, with excluded attempts. If the task is broken, all attempts are excluded.

        Args:
            oldest_version: a stored attempt is continued only if no version older than this one sampled any of its tokens.

        Raises:
            ExceptionGroup: contains `SandboxUnavailable`, because this machine cannot open any sandbox of this kind.
        """
        broken: Failure | None = None
        members = self._members(index, oldest_version)
        stored = [await self._stored_attempt(member, task) for member in members]

        async def play(slot: GroupAttempt) -> None:
            member = members[slot.number]
            try:
                scored = await self._scored(member, task, stored[slot.number], slot)
            except _BrokenTask:
                race.stop()
                raise
            finally:
                if member.stem_of is not None:
                    member.stem_of.settle(None)
            race.record_end(slot, scored)

        def begin(slot: GroupAttempt) -> asyncio.Task[None] | None:
            attempt = play(slot)
            try:
                return running.create_task(attempt)
            except RuntimeError:  # the group is shutting down
                attempt.close()
                return None

        race = AttemptScheduler(
            [member.name for member in members], group=index, size=self.group_size, begin=begin, first=self.stop_equal_after
        )
        try:
            async with asyncio.TaskGroup() as running:
                race.start([number for number, one in enumerate(stored) if isinstance(one, ScoredEpisode)])
        except* _BrokenTask as errors:
            broken = _first(errors).fault
        if broken is not None:
            return excluded_group(index, task.id, task.key, broken, size=self.group_size)
        scored = race.episodes
        if self.group_scoring is not None:
            scored = await self._judged(self.group_scoring, task, scored)
            faults = (failure for attempt in scored for failure in attempt.episode.failures)
            if (broken := next((fault for fault in faults if fault.blame is Blame.TASK), None)) is not None:
                return excluded_group(index, task.id, task.key, broken, size=self.group_size)
        scored = _capped(scored, task.pass_threshold)
        return Group(index=index, task_id=task.id, task_key=task.key, episodes=scored, cancelled=race.cancelled)

    async def _judged(self, judge: GroupScoring, task: Task, scored: tuple[ScoredEpisode, ...]) -> tuple[ScoredEpisode, ...]:
        """Returns the attempts with the scores from the group's scorer. If the scorer fails, the attempts are unscored."""
        with user_code.fault_boundary() as fault, ACTIVITY.doing(SCORING):
            scores = await judge.score_group(task, scored)
        if fault.error is not None:
            why = failure_from_error(fault.error, stage="score")
            unscored = Score(value=None, reason=f"group judge: {why.message}"[:2000])
            scores = [attempt.score if attempt.episode.left_out else unscored for attempt in scored]
        judged = []
        for one, score in zip(scored, scores, strict=True):
            if one.episode.left_out:  # `on_attempt` was called when it ended
                judged.append(one)
                continue
            episode = one.episode
            if score.blame is Blame.TASK:
                failure = Failure(stage="grade", blame=Blame.TASK, kind="unscored", message=score.reason[:2000])
                episode = replace(episode, failures=(*episode.failures, failure))
            self.on_attempt(infrastructure_fault("score", "unscored", score.reason) if score.is_absent else None)
            judged.append(self._ended(ScoredEpisode(episode=episode, score=score), final=True))
        return tuple(judged)

    async def run_episode(
        self,
        task: Task,
        *,
        name: str,
        start: EpisodeState | None = None,
        always: bool = False,
        on_turn: TurnListener | None = None,
    ) -> ScoredEpisode:
        """Runs one scored episode. After infrastructure faults, retries it up to `max_retries` times.

        Args:
            start: state from which the first attempt starts. If it is a state of the attempt with this name, the attempt continues;
                otherwise, it branches.
            always: whether retries also start from `start`, because the task starts there.
            on_turn: see `EpisodeRunner.run`.

        Raises:
            SandboxUnavailable: this machine cannot open any sandbox of this kind.
        """
        return await self._episode(task, name, start, on_turn, self.scorer, always=always)

    async def _episode(
        self,
        task: Task,
        name: str,
        start: EpisodeState | None,
        on_turn: TurnListener | None,
        scorer: EpisodeScorer,
        *,
        final: bool = True,
        always: bool = False,
        slot: GroupAttempt | None = None,
    ) -> ScoredEpisode:
        """See `run_episode`.

        `final`: whether the score is final, so that `on_attempt` is called for it. A group scorer may still change a score that is not
        final. `slot`: the attempt's entry in its group's schedule; None outside of groups. After a fault, the attempt is not retried if the
        group does not need it and the policy cannot have provoked the fault.
        """
        continued = start is not None and start.episode_id == f"{name}-a{start.attempt}"
        group, faults, since = name if slot is None else str(slot.group), list[Failure](), 0
        environment = "" if task.environment is None else task.environment.ref
        sampled = SampledTurns(partial(self._record_use, group, name, environment))
        for attempt in range(start.attempt if start is not None and continued else 0, self.max_retries + 1):
            with self.history.running(group), ACTIVITY.doing(ATTEMPTS):
                episode, score = await self._attempt(task, f"{name}-a{attempt}", attempt, start, on_turn, scorer, slot, sampled)
            start = start if always else None
            if score is not None:
                unscored = infrastructure_fault("score", "unscored", score.reason) if score.is_absent else None
                if final:
                    self.on_attempt(unscored)
                return self._ended(ScoredEpisode(episode=episode, score=score), final=final)
            failure = next(failure for failure in reversed(episode.failures) if failure.blame is not Blame.POLICY)
            if failure.blame is Blame.TASK:
                break
            self.on_attempt(failure)
            if not faults:
                self.history.record_fault(group, name, failure)
                since = self.history.events
            faults.append(failure)
            repeats = may_be_provoked(failure)
            alone = failure.kind == EnvironmentCrash.__name__ or [fault.kind for fault in faults[-2:]] == [NEIGHBOR_CRASH] * 2
            sampled.end_attempt(repeat=repeats, alone=alone)
            if slot is not None:
                slot.suspect = repeats
            if attempt < self.max_retries:
                if slot is not None and not repeats and slot.abandon():
                    break
                await asyncio.sleep(min(RETRY_S * 2**attempt, 5.0))  # gives a failed part time to restart
                if repeats and attempt == self.max_retries - 1:
                    await self.history.wait_for_others(failure, group, since=since, environment=environment)
        if (provoked := self.history.provoked(faults, group, since=since, environment=environment)) is not None:
            return self._ended(await self._score_provoked(task, episode, provoked, scorer), final=final)
        return self._ended(_unscored(episode, failure), final=True)

    def _record_use(self, group: str, episode: str, environment: str, part: str) -> None:
        self.history.record_use(group, episode, part)
        if environment:
            self.history.record_use(group, episode, part_in(environment, part))

    def _ended(self, scored: ScoredEpisode, *, final: bool) -> ScoredEpisode:
        """Returns the attempt, and reports it to the listener if its score is final."""
        if final or scored.episode.left_out:
            self.runner.listener.scored(scored)
        return scored

    def _watched(self, slot: GroupAttempt | None, task: Task, attempt: int) -> StartListener:
        """Returns a listener that reports the start of an episode and stores the running episode in its `GroupAttempt`."""

        def on_start(episode: ActiveEpisode) -> None:
            group = None if slot is None else slot.group
            self.runner.listener.started(task, episode.id, group=group, attempt=attempt, turns=episode.turn_count)
            if slot is not None:
                slot.episode = episode

        return on_start

    async def _score_provoked(self, task: Task, episode: Episode, provoked: Failure, scorer: EpisodeScorer) -> ScoredEpisode:
        """Scores an episode that ended because the policy provoked a fault. If scoring fails, the episode is excluded."""
        own = tuple(failure for failure in episode.failures if failure.blame is Blame.POLICY)
        episode = replace(episode, failures=(*own, provoked))
        with user_code.fault_boundary() as fault:
            return ScoredEpisode(episode=episode, score=await scorer(task, episode))
        assert fault.error is not None
        failure = failure_from_error(fault.error, stage="score")
        return _unscored(replace(episode, failures=(*episode.failures, failure)), failure)

    async def _attempt(
        self,
        task: Task,
        episode_id: str,
        attempt: int,
        start: EpisodeState | None,
        on_turn: TurnListener | None,
        scorer: EpisodeScorer,
        slot: GroupAttempt | None,
        sampled: SampledTurns,
    ) -> tuple[Episode, Score | None]:
        """Runs one attempt and scores it.

        The score is None if a fault excludes the attempt. Such a fault is the last item in the episode's `failures`.
        """
        episode = _empty_episode(episode_id, task.id, task.key, attempt)
        stage = "episode"
        with user_code.fault_boundary() as fault:
            memory = None if self.memory is None else self.memory.view(task, None if slot is None else slot.group)
            async with self.slots:
                episode = await self.runner.run(
                    task,
                    episode_id=episode_id,
                    attempt=attempt,
                    start=start,
                    on_turn=on_turn,
                    memory=memory,
                    on_start=self._watched(slot, task, attempt),
                    sampled=sampled,
                )
            if episode.left_out:
                return episode, None
            stage, began = "score", loop_time()
            with ACTIVITY.doing(SCORING):
                score = await scorer(task, episode)
            score = replace(score, wall_s=loop_time() - began)
            if score.blame is not Blame.TASK:
                ScoredEpisode(episode=episode, score=score)  # raises if the two are inconsistent
                return episode, score
            failure = Failure(stage="grade", blame=Blame.TASK, kind="unscored", message=score.reason[:2000])
        if fault.error is not None:
            failure = failure_from_error(fault.error, stage=stage)
        return replace(episode, failures=(*episode.failures, failure)), None

    def _members(self, index: int, oldest_version: int) -> list[_Member]:
        if self.branches == 1:
            return [_Member(index, member, None, oldest_version) for member in range(self.group_size + self.spare_attempts)]
        width = self.branches
        forks = [_Fork(stem, range(stem + 1, stem + width), self.branch_turn) for stem in range(0, self.group_size, width)]
        return [_Member(index, member, forks[member // width], oldest_version) for member in range(self.group_size)]

    async def _scored(self, member: _Member, task: Task, stored: EpisodeState | ScoredEpisode | None, slot: GroupAttempt) -> ScoredEpisode:
        """Starts or continues one attempt, and returns it with its score.

        A branch waits for its stem outside of `slots`, so stems never wait for branches.
        """
        fork = member.stem_of
        with user_code.fault_boundary() as fault:
            if isinstance(stored, ScoredEpisode):
                if self.group_scoring is not None or stored.score.reason != AWAITING_GROUP_JUDGE:
                    return stored
                return replace(stored, score=await self.scorer(task, stored.episode))  # the recipe no longer has a group scorer
            if fork is not None and stored is not None and stored.turn_count >= fork.turn:
                fork.settle(stored if stored.turn_count == fork.turn < task.limits.turns else None)  # then branches have their own states
            if member.fork is not None and fork is None and stored is None:
                stored = await member.fork.state
            on_turn = None if fork is None and self.checkpoints is None else self._watching(member, task)
            scorer, alone = (self.scorer, True) if self.group_scoring is None else (self.group_scoring.score_attempt, False)
            scored = await self._episode(task, member.name, stored, on_turn, scorer, final=alone, slot=slot)
        if fault.error is not None:
            scored = excluded_attempt(member.name, task.id, task.key, failure_from_error(fault.error, stage="group"))
        broken = next((failure for failure in scored.episode.failures if failure.blame is Blame.TASK), None)
        if broken is not None:
            raise _BrokenTask(broken)
        if self.checkpoints is not None:
            with user_code.logging_faults("storing a scored attempt"):
                await self.checkpoints.save_scored(member.group, member.number, scored)
        return scored

    def _watching(self, member: _Member, task: Task) -> TurnListener:
        """Returns a listener that passes the fork's state to the branches and, with checkpoints, stores the state after every turn."""

        async def on_turn(turns: int, capture: CaptureState) -> None:
            fork = member.stem_of
            forks = fork is not None and not fork.state.done() and fork.turn <= turns < task.limits.turns
            if self.checkpoints is None and not forks:
                return
            state = await capture()
            if state is None:
                return
            if self.checkpoints is not None:
                # The stem's state is stored first: branches can be recreated from it, but the stem cannot be recreated from the branches.
                for number in (member.number, *(fork.branches if fork is not None and forks else ())):
                    with user_code.logging_faults("storing a running episode"):
                        await self.checkpoints.save_state(member.group, number, state)
            if fork is not None and forks:
                fork.settle(state)

        return on_turn

    async def _stored_attempt(self, member: _Member, task: Task) -> EpisodeState | ScoredEpisode | None:
        """Returns the state or scored episode of this attempt that an earlier process stored, if it is still usable."""
        stored: EpisodeState | ScoredEpisode | None = None
        if self.checkpoints is not None:
            with user_code.logging_faults("loading a stored attempt"):
                stored = await self.checkpoints.load(member.group, member.number)
        if stored is None:
            return None
        episode = stored.episode if isinstance(stored, ScoredEpisode) else stored
        oldest = episode.oldest_version
        if episode.task_key != task.key:
            log.warning("attempt %s restarts: task %s changed after the attempt started", member.name, task.id)
            return None
        if oldest is not None and oldest < member.oldest_version:
            log.warning(
                "attempt %s restarts: it used version %d, but at least version %d is required", member.name, oldest, member.oldest_version
            )
            return None
        return stored


def _capped(scored: tuple[ScoredEpisode, ...], threshold: float | None) -> tuple[ScoredEpisode, ...]:
    """Lowers the score of each attempt that ended because of the policy's output or actions to the lowest score of the other attempts.

    Otherwise, provoking such an end would be better than receiving a negative score. A pass threshold of at most 0 means that each step has
    a cost; the score of such an attempt is then also lowered below the threshold.
    """

    def ended_itself(one: ScoredEpisode) -> bool:
        return any(failure.kind in (NOT_TAKEN, PROVOKED, NO_ACTION) and failure.blame is Blame.POLICY for failure in one.episode.failures)

    others = (attempt.score.value for attempt in scored if not attempt.episode.left_out and not ended_itself(attempt))
    values = [value for value in others if value is not None]
    if threshold is not None and threshold <= 0:
        values.append(math.nextafter(threshold, -math.inf))
    return tuple(
        replace(attempt, score=replace(attempt.score, value=min(attempt.score.value, *values)))
        if values and attempt.score.value is not None and ended_itself(attempt)
        else attempt
        for attempt in scored
    )


def excluded_group(index: int, task_id: str, task_key: str, failure: Failure, *, size: int) -> Group:
    """Returns a group in which all attempts are excluded because of a failure, such as a broken task."""
    attempts = tuple(excluded_attempt(f"g{index:06d}-{member}", task_id, task_key, failure) for member in range(size))
    return Group(index=index, task_id=task_id, task_key=task_key, episodes=attempts)


def excluded_attempt(name: str, task_id: str, task_key: str, failure: Failure) -> ScoredEpisode:
    """Returns an attempt without turns, excluded because of a failure."""
    return _unscored(replace(_empty_episode(f"{name}-a0", task_id, task_key), failures=(failure,)), failure)


def _empty_episode(episode_id: str, task_id: str, task_key: str, attempt: int = 0) -> Episode:
    trajectories = (Trajectory(agent="main", turns=(), stop_reason="failed"),)
    return Episode(id=episode_id, task_id=task_id, task_key=task_key, trajectories=trajectories, attempt=attempt)


def _unscored(episode: Episode, failure: Failure) -> ScoredEpisode:
    return ScoredEpisode(episode=episode, score=Score(value=None, reason=f"excluded: {failure.blame} {failure.kind}: {failure.message}"))


def _first(errors: ExceptionGroup[_BrokenTask]) -> _BrokenTask:
    first = errors.exceptions[0]
    assert isinstance(first, _BrokenTask), "a task group's errors are not nested"
    return first
