"""Scores all attempts of a group together after they have ended, with a judge that compares them and, optionally, the task's verifiers.

The judge does not see excluded attempts. An attempt for which the judge returns no value is unscored and masked; its score is never 0. An
attempt whose text makes the judge fail receives the lowest value, so it cannot cause its group to be excluded.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.base import user_code
from agentrl.errors import InfrastructureError, PluginError
from agentrl.plugins.protocol_checks import protocol_errors
from agentrl.plugins.references import resolve
from agentrl.protocols.reward import AWAITING_GROUP_JUDGE, GroupJudge
from agentrl.records import Blame, Episode, Score, ScoredEpisode, Task
from agentrl.reward.scorer import TaskScorer, add_branches, named_parts, weighted_turns
from agentrl.reward.verifier_call import (
    CONTROL_ANSWERS,
    InvalidScore,
    bounds_of,
    call_scoring_code,
    control_episode,
    timeout_of,
    validate_score,
    with_checked_data,
)

log = logging.getLogger(__name__)

_FEWEST = 2  # smallest number of attempts that a judge can compare
_REASON = 2000  # characters
_NO_LATE_SCORES = "tasks.group_judge does not support late scores: remove the group judge or the late verifier"


def load_group_judge(reference: str) -> GroupJudge:
    """Loads the judge that `tasks.group_judge` refers to. Raises `PluginError` if that does not resolve to a `GroupJudge`."""
    judge: Any = resolve(reference)
    if errors := protocol_errors(judge, GroupJudge) if callable(judge) else []:
        raise PluginError(f"tasks.group_judge {reference!r}: {errors[0].problem}", fix=errors[0].fix)
    if not callable(judge) or isinstance(judge, type):
        raise PluginError(f"tasks.group_judge {reference!r} is not a group judge", fix="refer to an object such as Listwise(endpoint=...)")
    if "episode" in inspect.signature(judge).parameters:
        raise PluginError(
            f"tasks.group_judge {reference!r} judges one episode at a time",
            fix="move it to tasks.verifiers, or use a judge that takes (task, episodes), such as Listwise",
        )
    group_judge: GroupJudge = judge
    return group_judge


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJudgeScorer:
    """Scores an attempt when it ends, and a group when all of its attempts have ended.

    With a `weight` of 1, the judge's value is the score, and the task's verifiers do not run. With a smaller weight, the score is the
    weighted mean of the judge's and the verifiers' values, and the judge does not see attempts that the verifiers could not score.
    """

    judge: GroupJudge
    name: str  # name of the score part with the judge's value
    weight: float
    task_scorer: TaskScorer  # the verifiers of a task, and the audit

    async def score_attempt(self, task: Task, episode: Episode) -> Score:
        """Returns the score of an attempt that has ended. If only the judge scores attempts, the score has no value yet.

        If a verifier declares a late score, the attempt is unscored.
        """
        if self.weight == 1:
            return Score(value=None, reason=AWAITING_GROUP_JUDGE)
        score = await self.task_scorer(task, episode)
        return Score(value=None, reason=_NO_LATE_SCORES) if score.pending else score

    async def score_group(self, task: Task, scored: Sequence[ScoredEpisode]) -> tuple[Score, ...]:
        """Returns the scores of all attempts, in the same order. An attempt that the judge does not see keeps its score.

        If there is only one attempt for the judge, that attempt is unscored.
        """
        shown = [index for index, attempt in enumerate(scored) if _is_shown(attempt)]
        scores = [attempt.score for attempt in scored]
        judged = await self._judge(task, [scored[index].episode for index in shown])
        for index, score in zip(shown, judged, strict=True):
            scores[index] = await self._combine(task, scored[index], score)
        return tuple(scores)

    async def _judge(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score]:
        """Returns one score for each episode. If the judge fails, no score has a value, and all have the same reason."""
        if len(episodes) < _FEWEST:
            return [Score(value=None, reason="there is no other attempt to compare with")] * len(episodes)
        for attempt in range(self.task_scorer.max_retries + 1):
            try:
                scores = await self._call_judge(task, episodes)
                provoked = any(score.blame is Blame.POLICY for score in scores)
                return await self._judge_provoked(task, episodes, scores) if provoked else scores
            except InfrastructureError as error:
                log.warning("group judge %s on %s: %s", self.name, task.id, user_code.describe_error(error))
                reason = f"group judge: {user_code.describe_error(error, _REASON)}"
            if attempt < self.task_scorer.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        return [Score(value=None, reason=reason, blame=Blame.INFRASTRUCTURE)] * len(episodes)

    async def _judge_provoked(self, task: Task, episodes: Sequence[Episode], failed: Sequence[Score]) -> Sequence[Score]:
        """Returns the attempts' scores after a failure of the judge that the text of an attempt may have caused. Raises the judge's
        `InfrastructureError`.

        The judge compares each attempt with a control episode. Attempts on which the judge fails receive the lowest value, and the judge
        compares the other attempts with one another. If the judge also fails on each of the control episodes alone, or fails on none of the
        attempts, the judge is broken and no attempt receives a value.
        """
        unscored = [replace(score, blame=None) for score in failed]
        for answer in CONTROL_ANSWERS:
            control = control_episode(episodes[0], answer)
            if (await self._call_judge(task, (control, control)))[0].blame is not Blame.POLICY:
                break
        else:
            return unscored
        pairs = await asyncio.gather(*(self._call_judge(task, (episode, control)) for episode in episodes))
        provoking = [scores[0].blame is Blame.POLICY for scores in pairs]
        if not any(provoking):
            return unscored
        others = [episode for episode, provokes in zip(episodes, provoking, strict=True) if not provokes]
        judged = await self._judge(task, others) if others else ()
        bounds = bounds_of(self.judge)
        lowest = min((0.0, *(score.value for score in judged if score.value is not None))) if bounds is None else bounds[0]
        reason = next(score.reason for score in failed if score.blame is Blame.POLICY)
        evidence = f"{reason}, because of this attempt's text; the judge accepts an attempt that submits {answer!r}"
        log.warning("group judge %s on %s: %s", self.name, task.id, evidence)
        remaining = iter(judged)
        return [Score(value=lowest, evidence=evidence[:_REASON]) if provokes else next(remaining) for provokes in provoking]

    async def _call_judge(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score]:
        """Calls the judge once. Raises the errors of `call_scoring_code`."""
        checked_task = with_checked_data(task)

        def validate(result: object) -> Sequence[Score]:
            if not isinstance(result, tuple | list) or len(result) != len(episodes):
                kind = f"{len(result)} scores" if isinstance(result, tuple | list) else type(result).__name__
                raise InvalidScore(f"{kind}, not a tuple of {len(episodes)} scores")
            bounds = bounds_of(self.judge)
            return [validate_score(score, episode, bounds=bounds) for score, episode in zip(result, episodes, strict=True)]

        scores = await call_scoring_code(
            lambda: self.judge(checked_task, tuple(episodes)),
            validate,
            what=f"group judge {self.name}",
            task=task,
            episodes=episodes,
            timeout_s=timeout_of(self.judge, self.task_scorer.timeout_s),
        )
        return [scores] * len(episodes) if isinstance(scores, Score) else scores

    async def _combine(self, task: Task, attempt: ScoredEpisode, judged: Score) -> Score:
        """Combines the judge's score and the verifiers' score for one attempt."""
        if judged.pending:
            return Score(value=None, reason=_NO_LATE_SCORES)
        if judged.value is None:
            return replace(judged, reason=f"{self.name}: {judged.reason}"[:_REASON])
        parts = named_parts({self.name: judged})
        if attempt.score.value is None:
            return await self.task_scorer.audit_score(task, attempt.episode, replace(judged, parts=parts))
        weighted = [(self.weight, judged), (1 - self.weight, attempt.score)]
        combined = Score(
            value=self.weight * judged.value + (1 - self.weight) * attempt.score.value,
            parts={**attempt.score.parts, **parts},
            evidence="\n".join(filter(None, [attempt.score.evidence, judged.evidence])),
            turn_rewards=weighted_turns(weighted),
        )
        return add_branches(combined, weighted)


def _is_shown(attempt: ScoredEpisode) -> bool:
    return not attempt.episode.left_out and (attempt.score.value is not None or attempt.score.reason == AWAITING_GROUP_JUDGE)
