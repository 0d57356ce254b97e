"""Runs and scores episodes on the first n tasks of a held-out split, with the same sandboxes and verifiers as in training."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.base import user_code
from agentrl.base.numbers import is_at_least
from agentrl.errors import RecipeError
from agentrl.evaluation.engine import PlannedAttempt, ScoredListener, run_attempts
from agentrl.evaluation.statistics import ComputeCurve, CountedAttempt, compute_curves, pass_at_attempt_counts
from agentrl.memory.run_memory import EvaluationNotes
from agentrl.observe.exclusions import count_exclusions, merge_counts
from agentrl.observe.stats import Rate
from agentrl.protocols import TaskFamily
from agentrl.records import Failure, ScoredEpisode, Split, Task
from agentrl.records.environment import PASS_THRESHOLD
from agentrl.rollout import GroupRunner, task_fault
from agentrl.session.transcript import transcript
from agentrl.task import make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitEvaluation:
    """The scores on one split, with a confidence interval. Episodes without a finite score count only as excluded."""

    rate: Rate | None  # mean over tasks of each task's mean score; None if no episode was scored
    by_kind: dict[str, Rate]
    attempts: int  # attempts per task
    episodes: int
    excluded: int
    excluded_reasons: dict[str, int]
    tokens_mean: float | None  # sampled tokens per attempt
    pass_at: dict[int, float]  # k -> share of tasks that at least one of k attempts passes; empty if a task has no threshold
    compute: tuple[ComputeCurve, ...]  # success by sampled tokens; empty if `pass_at` is empty
    transcripts: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class AttemptTotals:
    """Totals of the attempts at a set of tasks. Attempts without a finite score count only as excluded."""

    scored: dict[str, list[tuple[float, CountedAttempt]]] = field(default_factory=dict)  # task -> its scored attempts with their scores
    left_out: int = 0
    left_out_reasons: dict[str, int] = field(default_factory=dict)
    all_have_thresholds: bool = True

    def add(self, task: str, attempts: Iterable[ScoredEpisode], *, threshold: float | None) -> None:
        """Adds attempts at a task to the totals. `threshold` is the task's `pass_threshold`."""
        self.all_have_thresholds &= threshold is not None
        attempts = list(attempts)
        for attempt in attempts:
            value = attempt.score.value
            if value is None or not math.isfinite(value):
                self.left_out += 1
                continue
            counted = CountedAttempt(
                passed=threshold is not None and is_at_least(value, threshold), tokens=attempt.episode.completion_tokens
            )
            self.scored.setdefault(task, []).append((value, counted))
        self.left_out_reasons = merge_counts(self.left_out_reasons, count_exclusions(attempts))

    @property
    def tries(self) -> list[list[CountedAttempt]]:
        """The scored attempts of each task."""
        return [[counted for _, counted in attempts] for attempts in self.scored.values()]

    @property
    def rate(self) -> Rate | None:
        """The mean over tasks of each task's mean score; None if there are no scores.

        The interval is computed from the number of tasks, not of attempts, because attempts at one task are not independent.
        """
        means = [statistics.fmean(value for value, _ in attempts) for attempts in self.scored.values()]
        return Rate.from_scores(means) if means else None

    def evaluation(
        self, by_kind: Mapping[str, AttemptTotals], *, attempts: int, transcripts: Sequence[dict[str, Any]] = ()
    ) -> SplitEvaluation:
        """Returns the totals as a `SplitEvaluation`, with the rate for each kind of task. `attempts` is the number of attempts per task."""
        tries = self.tries
        tokens = [attempt.tokens for tried in tries for attempt in tried]
        return SplitEvaluation(
            rate=self.rate,
            by_kind={kind: rate for kind, totals in sorted(by_kind.items()) if (rate := totals.rate) is not None},
            attempts=attempts,
            episodes=len(tokens) + self.left_out,
            excluded=self.left_out,
            excluded_reasons=self.left_out_reasons,
            tokens_mean=statistics.fmean(tokens) if tokens else None,
            pass_at=pass_at_attempt_counts(tries) if self.all_have_thresholds else {},
            compute=compute_curves(tries) if self.all_have_thresholds else (),
            transcripts=tuple(transcripts),
        )


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
    on_scored: ScoredListener | None = None,
    notes: EvaluationNotes | None = None,
    thinking_tokens: int | None = None,
) -> SplitEvaluation:
    """Runs and scores episodes on tasks 0..count-1 of a split, or on all tasks if the split has fewer.

    The attempts at a task that cannot be created count as excluded. Raises `RecipeError` if the split is empty, or if `thinking_tokens`
    leaves a turn of a task no tokens for an answer.

    Args:
        attempts: episodes per task.
        on_done: called with the number of finished episodes and the total number of episodes.
        on_scored: called with each task and its scored episode.
        thinking_tokens: replaces the `Limits.thinking_tokens` of each task; None keeps the task's limit.
        notes: notes that the episodes read and extend, round by round. None means one round that uses the memory of `runner`.
    """
    tasks = _split_tasks(family, split, count, thinking_tokens)
    done, total = 0, len(tasks) * attempts

    async def count_attempt(attempt: PlannedAttempt, scored: ScoredEpisode) -> ScoredEpisode:
        nonlocal done
        done += 1
        on_done(done, total)
        if attempt.task is not None and on_scored is not None:
            await on_scored(attempt.task, scored)
        return scored

    def plan(index: int, number: int) -> PlannedAttempt:
        task, name = tasks[index], f"{phase}-{split}-{index:05d}" + (f"-{number:03d}" if attempts > 1 else "")
        return PlannedAttempt(name=name, task=None, fault=task) if isinstance(task, Failure) else PlannedAttempt(name=name, task=task)

    runner = runner if notes is None else replace(runner, memory=notes)
    episodes: list[ScoredEpisode] = []
    for part in [range(len(tasks))] if notes is None else notes.rounds(len(tasks)):
        planned = [plan(index, number) for index in part for number in range(attempts)]
        scored = await run_attempts(runner, planned, count_attempt)
        episodes += scored
        if notes is not None:
            await asyncio.to_thread(notes.end_round, scored)
    totals, kinds, transcripts = AttemptTotals(), defaultdict[str, AttemptTotals](AttemptTotals), list[dict[str, Any]]()
    for number, task in enumerate(tasks):
        attempted = episodes[number * attempts : (number + 1) * attempts]
        for counted in (totals, kinds["" if isinstance(task, Failure) else task.kind]):
            counted.add(str(number), attempted, threshold=PASS_THRESHOLD if isinstance(task, Failure) else task.pass_threshold)
        if isinstance(task, Task):
            transcripts += [transcript(task, scored, phase=phase, step=step) for scored in attempted]
    return totals.evaluation(kinds, attempts=attempts, transcripts=transcripts)


def _split_tasks(family: TaskFamily, split: Split, count: int, thinking_tokens: int | None) -> list[Task | Failure]:
    """Returns the tasks, with a `Failure` in place of each task that cannot be created.

    Raises `RecipeError` if the split is empty, or if `thinking_tokens` leaves a turn of a task no tokens for an answer.
    """
    size = family.size(split)
    tasks = [_create_task(family, split, index) for index in range(count if size is None else min(count, size))]
    if not tasks:
        raise RecipeError(f"task family {family.name!r} has no tasks in split {split}", fix=f"set evaluation.{split}=0")
    if thinking_tokens is None:
        return tasks
    return [task if isinstance(task, Failure) else with_thinking_bound(task, thinking_tokens) for task in tasks]


def with_thinking_bound(task: Task, thinking_tokens: int) -> Task:
    """Returns a copy of the task with this limit on thinking tokens.

    Raises `RecipeError` if the limit leaves a turn no tokens for an answer.
    """
    try:
        return replace(task, limits=replace(task.limits, thinking_tokens=thinking_tokens))
    except ValueError as error:
        raise RecipeError(f"evaluation.thinking_tokens: task {task.id!r}: {error}", fix="use smaller bounds") from None


def _create_task(family: TaskFamily, split: Split, index: int) -> Task | Failure:
    """Returns the task, or a `Failure` if it cannot be created, so that the other tasks are still evaluated."""
    try:
        return make_task(family, split, index)
    except Exception as error:  # a family may raise anything
        user_code.log_unexpected(f"{split} task {index}", error)
        return task_fault(error)
