"""Evaluates episodes on the first n held-out tasks, in the same sandboxes and with the same verifier as training."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.base import user_code
from agentrl.base.scores import is_at_least
from agentrl.errors import RecipeError
from agentrl.evaluation.compute import ComputeCurve, CountedAttempt, compute_curves, pass_at_attempt_counts
from agentrl.memory.run_memory import EvaluationNotes
from agentrl.observe.exclusions import count_exclusions
from agentrl.observe.stats import Rate
from agentrl.protocols import TaskFamily
from agentrl.records import Failure, ScoredEpisode, Split, Task
from agentrl.rollout import GroupRunner, excluded_group, task_fault
from agentrl.session.transcript import transcript
from agentrl.task import make_task

SOLVED_SCORE = 1.0
"""The score from which an attempt counts as solved, in pass@k and compute curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitEvaluation:
    """Scores of one split, with a confidence interval. Episodes without a finite score only count as excluded."""

    rate: Rate | None  # mean over tasks of the mean score of each; None if no episode was scored
    by_kind: dict[str, Rate]
    attempts: int  # per task
    episodes: int
    excluded: int
    excluded_reasons: dict[str, int]
    tokens_mean: float | None  # sampled tokens per attempt
    pass_at: dict[int, float]  # k -> share of the tasks that k attempts solve
    compute: tuple[ComputeCurve, ...]  # success by sampled tokens
    transcripts: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The attempts at one task."""

    task: Task | Failure
    attempts: tuple[ScoredEpisode, ...]

    @property
    def counted(self) -> list[tuple[float, int]]:
        """(score, sampled tokens) of the attempts with a score."""
        scores = [(scored.score.value, scored.episode.completion_tokens) for scored in self.attempts]
        return [(value, tokens) for value, tokens in scores if value is not None and math.isfinite(value)]


async def evaluate_split(
    runner: GroupRunner,
    family: TaskFamily,
    split: Split,
    count: int,
    *,
    phase: str,
    step: int,
    attempts: int = 1,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    on_scored: Callable[[Task, ScoredEpisode], None] = lambda task, scored: None,
    notes: EvaluationNotes | None = None,
    thinking_tokens: int | None = None,
) -> SplitEvaluation:
    """Evaluates tasks 0..count-1 of a split, or fewer if it is smaller.

    Raises `RecipeError` for an empty split, and for a thinking bound that a task has no room for.

    Args:
        attempts: episodes per task.
        on_done: called with the finished and total episodes.
        on_scored: called with each task and its scored episode.
        thinking_tokens: replaces the tasks' `Limits.thinking_tokens`; None keeps them.
        notes: read and extended by the episodes, round by round. None means one round with the memory of `runner`.
    """
    size = family.size(split)
    tasks = [_made(family, split, index) for index in range(count if size is None else min(count, size))]
    if thinking_tokens is not None:
        tasks = [task if isinstance(task, Failure) else with_thinking_bound(task, thinking_tokens) for task in tasks]
    if not tasks:
        raise RecipeError(f"task family {family.name!r} has no tasks in split {split}", fix=f"set evaluation.{split}=0")
    done = 0

    async def one(index: int, task: Task | Failure, attempt: int) -> ScoredEpisode:
        nonlocal done
        if isinstance(task, Failure):
            (scored,) = excluded_group(index, f"{split} {index}", "", task, size=1).episodes
        else:
            name = f"{phase}-{split}-{index:05d}"
            scored = await runner.run_episode(task, name=name if attempts == 1 else f"{name}-{attempt:03d}")
            on_scored(task, scored)
        done += 1
        on_done(done, len(tasks) * attempts)
        return scored

    runner = runner if notes is None else replace(runner, memory=notes.view)
    played: list[_Played] = []
    for part in [range(len(tasks))] if notes is None else notes.rounds(len(tasks)):
        async with asyncio.TaskGroup() as running:
            jobs = [[running.create_task(one(index, tasks[index], n)) for n in range(attempts)] for index in part]
        some = [_Played(task=tasks[index], attempts=tuple(job.result() for job in of)) for index, of in zip(part, jobs, strict=True)]
        played += some
        if notes is not None:
            notes.end_round([scored for one in some for scored in one.attempts])
    return _measured(
        played,
        phase=phase,
        step=step,
    )


def with_thinking_bound(task: Task, thinking_tokens: int) -> Task:
    """Returns the task with this bound on thinking. Raises `RecipeError` if a turn would have no room for an answer."""
    try:
        return replace(task, limits=replace(task.limits, thinking_tokens=thinking_tokens))
    except ValueError as error:
        raise RecipeError(f"evaluation.thinking_tokens: task {task.id!r}: {error}", fix="use smaller bounds") from None


def _measured(played: Sequence[_Played], *, phase: str, step: int) -> SplitEvaluation:
    """Computes the rates over tasks, because attempts at one task are not independent: their number must not narrow the interval."""
    means = [(_kind(one.task), statistics.fmean(value for value, _ in one.counted)) for one in played if one.counted]
    kinds = sorted({kind for kind, _ in means})
    tries = [[CountedAttempt(passed=is_at_least(value, SOLVED_SCORE), tokens=tokens) for value, tokens in one.counted] for one in played]
    tokens = [attempt.tokens for some in tries for attempt in some]
    episodes = sum(len(one.attempts) for one in played)
    return SplitEvaluation(
        rate=_rate(value for _, value in means),
        by_kind={kind: Rate.from_scores([value for other, value in means if other == kind]) for kind in kinds},
        attempts=max(len(one.attempts) for one in played),
        episodes=episodes,
        excluded=episodes - len(tokens),
        excluded_reasons=count_exclusions(scored for one in played for scored in one.attempts),
        tokens_mean=statistics.fmean(tokens) if tokens else None,
        pass_at=pass_at_attempt_counts(tries),
        compute=compute_curves(tries),
        transcripts=tuple(
            transcript(one.task, scored, phase=phase, step=step) for one in played if isinstance(one.task, Task) for scored in one.attempts
        ),
    )


def _rate(values: Iterable[float]) -> Rate | None:
    found = list(values)
    return Rate.from_scores(found) if found else None


def _made(family: TaskFamily, split: Split, index: int) -> Task | Failure:
    """Returns the task, or why it cannot be created; the other tasks are still evaluated."""
    try:
        return make_task(family, split, index)
    except Exception as error:  # a family may raise anything
        user_code.log_unexpected(f"{split} task {index}", error)
        return task_fault(error)


def _kind(task: Task | Failure) -> str:
    return "" if isinstance(task, Failure) else task.kind
