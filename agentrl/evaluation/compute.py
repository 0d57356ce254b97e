"""Success against compute: the share of tasks solved by k attempts, each stopped after a budget of sampled tokens.

No episode is re-run. An agent does not know its budget, so an attempt that passed after n tokens passes with any budget of n or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.evaluation.statistics import mean_pass_at_k, pass_at_k

MAX_POINTS = 24
"""Most points of a curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAttempt:
    """One attempt at a task: whether it passed, and the tokens sampled in it, including sub-agents'."""

    passed: bool
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCurve:
    """The success of `attempts` attempts at a task, by budget."""

    attempts: int
    points: tuple[tuple[float, float], ...]  # (mean tokens sampled in all of them, share of tasks that at least one solves)


def attempt_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most`; empty if `most` is below 1."""
    if most < 1:
        return ()
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def pass_at_attempt_counts(tasks: Sequence[Sequence[CountedAttempt]]) -> dict[int, float]:
    """k -> pass@k for each of `attempt_counts`, over the tasks with at least k attempts."""
    counts = [(sum(attempt.passed for attempt in attempts), len(attempts)) for attempts in tasks]
    rates = {k: mean_pass_at_k(counts, k) for k in attempt_counts(max((tries for _, tries in counts), default=0))}
    return {k: rate for k, rate in rates.items() if rate is not None}


def compute_curves(tasks: Sequence[Sequence[CountedAttempt]]) -> tuple[ComputeCurve, ...]:
    """A curve for each number of attempts. Its points are token budgets per attempt: 0, those at which attempts pass, and the longest."""
    every = [attempt for attempts in tasks for attempt in attempts]
    if not every:
        return ()
    budgets = _budgets(sorted(attempt.tokens for attempt in every if attempt.passed), max(attempt.tokens for attempt in every))
    curves = []
    for k in attempt_counts(max(map(len, tasks))):
        tried = [attempts for attempts in tasks if len(attempts) >= k]
        curves.append(ComputeCurve(attempts=k, points=tuple((k * _tokens(tried, budget), _solved(tried, budget, k)) for budget in budgets)))
    return tuple(curves)


def _budgets(passed: Sequence[int], longest: int) -> list[int]:
    """Budgets at which success changes; evenly spaced among the passed attempts if there are many."""
    if len(passed) > MAX_POINTS - 2:
        passed = [passed[index * (len(passed) - 1) // (MAX_POINTS - 3)] for index in range(MAX_POINTS - 2)]
    return sorted({0, *passed, longest})


def _tokens(tasks: Sequence[Sequence[CountedAttempt]], budget: int) -> float:
    return sum(sum(min(attempt.tokens, budget) for attempt in attempts) / len(attempts) for attempts in tasks) / len(tasks)


def _solved(tasks: Sequence[Sequence[CountedAttempt]], budget: int, k: int) -> float:
    passed = [sum(attempt.passed and attempt.tokens <= budget for attempt in attempts) for attempts in tasks]
    return sum(pass_at_k(count, len(attempts), k) for count, attempts in zip(passed, tasks, strict=True)) / len(tasks)
