"""Scores all attempts of a group together, once they are done: a judge that compares them, alone or beside the verifiers of the task.

An attempt that was left out is not shown. What the judge gives no value for is unscored and masked, never 0. An attempt whose words make
the judge fail gets the lowest value: it cannot take its group out.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.base import user_code
from agentrl.base.outages import outage_of
from agentrl.errors import InfrastructureError, PluginError, TaskError
from agentrl.plugins.protocol_checks import protocol_errors
from agentrl.plugins.references import resolve
from agentrl.protocols.group_judge import AWAITING_GROUP_JUDGE as WAITS
from agentrl.protocols.group_judge import GroupJudge
from agentrl.records import Blame, Episode, Score, ScoredEpisode, Task
from agentrl.reward.scorer import TaskScorer
from agentrl.reward.verifier_call import (
    CONTROL_ANSWERS,
    InvalidScore,
    bounds_of,
    control_episode,
    episode_texts,
    missing_data_error,
    timeout_of,
    validate_score,
    with_checked_data,
)

log = logging.getLogger(__name__)

_FEWEST = 2  # attempts that can be compared
_REASON = 2000  # characters


def load_group_judge(reference: str) -> GroupJudge:
    """The judge that a recipe names in `tasks.group_judge`. Raises `PluginError` for anything that cannot be asked about a group."""
    found = resolve(reference)
    if lacks := protocol_errors(found, GroupJudge) if callable(found) else []:
        raise PluginError(f"tasks.group_judge {reference!r}: {lacks[0].problem}", fix=lacks[0].fix)
    if not callable(found) or isinstance(found, type):
        raise PluginError(f"tasks.group_judge {reference!r} is no judge of groups", fix="name an object such as Listwise(endpoint=...)")
    if "episode" in inspect.signature(found).parameters:
        raise PluginError(
            f"tasks.group_judge {reference!r} judges one episode at a time",
            fix="name it in tasks.verifiers, or one that takes (task, episodes), such as Listwise",
        )
    judge: GroupJudge = found
    return judge


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJudgeScorer:
    """`first` when an attempt has ended, `together` when all of its group have.

    With a `weight` of 1 the judge's value is the score, and the task's verifiers are not asked; below 1 it is that share of it, and an
    attempt that they could not score is not shown to the judge.
    """

    judge: GroupJudge
    name: str  # of the judge's part of a score
    weight: float
    task_scorer: TaskScorer  # the verifiers of a task, and the audit

    async def score_attempt(self, task: Task, episode: Episode) -> Score:
        return Score(value=None, reason=WAITS) if self.weight == 1 else await self.task_scorer(task, episode)

    async def score_group(self, task: Task, scored: Sequence[ScoredEpisode]) -> tuple[Score, ...]:
        """The scores of all attempts, in their order; an attempt that is not shown keeps what it has."""
        shown = [index for index, one in enumerate(scored) if self._is_shown(one)]
        episodes = [scored[index].episode for index in shown]
        scores = [one.score for one in scored]
        for index, judged in zip(shown, await self._judged(task, episodes), strict=True):
            scores[index] = await self._joined(task, scored[index], judged)
        return tuple(scores)

    def _is_shown(self, one: ScoredEpisode) -> bool:
        return not one.episode.left_out and (one.score.value is not None or one.score.reason == WAITS)

    async def _judged(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score]:
        """One score for each episode; the same reason for all where the judge gave nothing."""
        if len(episodes) < _FEWEST:
            return [Score(value=None, reason="a judge of groups compares, and there is no other attempt to compare with")] * len(episodes)
        for attempt in range(self.task_scorer.max_retries + 1):
            try:
                scores = await self._asked(task, episodes)
                return scores if scores[0].blame is not Blame.POLICY else await self._provoked(task, episodes, scores)
            except InfrastructureError as error:
                log.warning("group judge %s on %s: %s", self.name, task.id, user_code.describe_error(error))
                reason = f"group judge: {user_code.describe_error(error, _REASON)}"
            if attempt < self.task_scorer.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        return [Score(value=None, reason=reason, blame=Blame.INFRASTRUCTURE)] * len(episodes)

    async def _provoked(self, task: Task, episodes: Sequence[Episode], failed: Sequence[Score]) -> Sequence[Score]:
        """The scores after the judge failed at what an attempt may have said. Each attempt is judged next to a harmless one: those at which
        the judge fails get the lowest value, and the others are compared among themselves. A judge that fails at two harmless ones is
        broken, and so is one that fails at no attempt alone: then there is no value. Raises `InfrastructureError` of the judge."""
        unscored = [replace(score, blame=None) for score in failed]
        for answer in CONTROL_ANSWERS:
            plain = control_episode(episodes[0], answer)
            if (await self._asked(task, (plain, plain)))[0].blame is not Blame.POLICY:
                break
        else:
            return unscored
        asked = await asyncio.gather(*(self._asked(task, (one, plain)) for one in episodes))
        provoking = [one[0].blame is Blame.POLICY for one in asked]
        others = [one for one, provokes in zip(episodes, provoking, strict=True) if not provokes]
        if len(others) == len(episodes):
            return unscored
        judged = await self._judged(task, others) if others else ()
        bounds = bounds_of(self.judge)
        lowest = min((0.0, *(one.value for one in judged if one.value is not None))) if bounds is None else bounds[0]
        told = f"{failed[0].reason}, at what this attempt says; it judges one that hands in {answer!r}"
        log.warning("group judge %s on %s: %s", self.name, task.id, told)
        rest = iter(judged)
        return [Score(value=lowest, evidence=told[:_REASON]) if provokes else next(rest) for provokes in provoking]

    async def _asked(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score]:
        """Scores without a value whose blame is the policy's where the judge failed at what an attempt may have said.

        Raises `InfrastructureError` of the judge, or for a server that it did not reach.
        """
        what, since = f"group judge {self.name}", user_code.cancellation_count()
        try:
            limit = timeout_of(self.judge, self.task_scorer.timeout_s)
            seen = with_checked_data(task)
            given = await user_code.call_user_code(lambda: self.judge(seen, tuple(episodes)), what=what, timeout_s=limit)
            return self._checked(given, episodes)
        except user_code.CallTimeout as error:
            user_code.log_unexpected(what, error, trace=False)
            reason, blame = f"group judge gave no scores within {limit:g} s", Blame.POLICY
        except InvalidScore as error:
            user_code.log_unexpected(what, error, trace=False)
            reason, blame = f"group judge gave {user_code.error_text(error, 500)}", Blame.POLICY
        except BaseException as error:  # user code may raise anything; the episodes are then unscored
            if isinstance(error, KeyboardInterrupt | GeneratorExit) or user_code.cancellation_count() > since:
                raise
            if (fault := user_code.first_cause(error, InfrastructureError)) is not None:
                raise fault from None
            broken = user_code.first_cause(error, TaskError) or missing_data_error(task, error, what)
            if broken is None and (down := outage_of(error, said=[said for one in episodes for said in episode_texts(one)])) is not None:
                raise InfrastructureError(f"{what} reached nothing that answers: {down.text}") from error
            user_code.log_unexpected(what, error, trace=broken is None)
            reason = f"group judge raised {user_code.describe_error(broken or error, _REASON)}"
            blame = Blame.TASK if broken is not None else Blame.POLICY
        return [Score(value=None, reason=reason, blame=blame)] * len(episodes)

    def _checked(self, given: object, episodes: Sequence[Episode]) -> Sequence[Score]:
        if not isinstance(given, tuple | list) or len(given) != len(episodes):
            told = f"{len(given)} scores" if isinstance(given, tuple | list) else type(given).__name__
            raise InvalidScore(f"{told}, not a tuple of {len(episodes)} scores")
        limits = bounds_of(self.judge)
        turns = ([len(line.turns) for line in episode.trajectories] for episode in episodes)
        return [validate_score(one, counts, bounds=limits) for one, counts in zip(given, turns, strict=True)]

    async def _joined(self, task: Task, one: ScoredEpisode, judged: Score) -> Score:
        """An attempt's score, from the judge's and from the verifiers'."""
        if judged.value is None:
            return replace(judged, reason=f"{self.name}: {judged.reason}"[:_REASON])
        own = {self.name: judged.value, **{f"{self.name}/{part}": value for part, value in judged.parts.items()}}
        if one.score.value is None:
            return await self.task_scorer.audit_score(task, one.episode, replace(judged, parts=own))
        value = self.weight * judged.value + (1 - self.weight) * one.score.value
        evidence = "\n".join(filter(None, [one.score.evidence, judged.evidence]))
        turns = _weighted([(self.weight, judged), (1 - self.weight, one.score)])
        return Score(value=value, parts={**one.score.parts, **own}, evidence=evidence, turn_rewards=turns)


def _weighted(scores: Sequence[tuple[float, Score]]) -> tuple[tuple[float, ...], ...]:
    """The weighted sum of turn rewards; a score without any counts as zeros."""
    given = [[[weight * turn for turn in line] for line in score.turn_rewards] for weight, score in scores if score.turn_rewards]
    return tuple(tuple(map(sum, zip(*lines, strict=True))) for lines in zip(*given, strict=True))
