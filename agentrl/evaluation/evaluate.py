"""Evaluation: episodes on each of the first n held-out tasks, in the same sandboxes and with the same verifier as training."""

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
"""The score from which an attempt has solved its task, in pass@k and against compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitEvaluation:
    """Scores of one split, with a confidence interval; episodes without a finite score count in no figure but `left_out`."""

    rate: Rate | None  # over the tasks, of the mean score of each; None: not one episode was scored, so that no rate would mean anything
    by_kind: dict[str, Rate]
    attempts: int  # at each task
    episodes: int
    excluded: int
    excluded_reasons: dict[str, int]
    tokens_mean: float | None  # sampled in an attempt
    pass_at: dict[int, float]  # k -> share of the tasks that k attempts solve
    compute: tuple[ComputeCurve, ...]  # success against sampled tokens
    transcripts: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The attempts at one task."""

    task: Task | Failure
    attempts: tuple[ScoredEpisode, ...]

    @property
    def counted(self) -> list[tuple[float, int]]:
        """(score, sampled tokens) of those that have a score."""
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
    """Evaluates on tasks 0..count-1 of a split (fewer where it has fewer).

    Raises `RecipeError` when it has none, and for a bound on thinking that a task has no room for.

    Args:
        attempts: episodes on each task.
        on_done: told how many episodes of how many are done.
        on_scored: told each task's episode when it is scored.
        thinking_tokens: in place of the tasks' own `Limits.thinking_tokens`; None: that.
        notes: what its episodes read and add to, part by part; None: all tasks are one part, and what `runner` has of memory is left.
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
    """The task with this bound on thinking. Raises `RecipeError` where a turn of it has no room for an answer then."""
    try:
        return replace(task, limits=replace(task.limits, thinking_tokens=thinking_tokens))
    except ValueError as error:
        raise RecipeError(f"evaluation.thinking_tokens: task {task.id!r}: {error}", fix="take smaller bounds") from None


def _measured(played: Sequence[_Played], *, phase: str, step: int) -> SplitEvaluation:
    """The figures. Attempts at one task are alike, so a rate is taken over tasks: its interval does not shrink with their attempts."""
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
    """The task, or what is wrong with it: the other tasks are evaluated all the same."""
    try:
        return make_task(family, split, index)
    except Exception as error:  # a family may raise anything
        user_code.log_unexpected(f"{split} task {index}", error)
        return task_fault(error)


def _kind(task: Task | Failure) -> str:
    return "" if isinstance(task, Failure) else task.kind
