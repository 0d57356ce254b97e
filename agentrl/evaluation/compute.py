"""Success against compute: what share of tasks is solved by k attempts, each stopped after so many sampled tokens.

No episode is played again for it. An agent does not know where it would be stopped, so that an attempt which passed after n tokens is
one that passes within any budget of n or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.evaluation.passes import mean_pass_at_k, pass_at_k

MAX_POINTS = 24
"""Most points of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAttempt:
    """One attempt at a task: whether it passed, and the tokens that the policy sampled in it, those of sub-agents included."""

    passed: bool
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCurve:
    """What `attempts` attempts at a task come to."""

    attempts: int
    points: tuple[tuple[float, float], ...]  # (mean tokens that they sample together, share of tasks that one of them solves)


def attempt_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`, which is among them; none below 1."""
    if most < 1:
        return ()
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def pass_at_attempt_counts(tasks: Sequence[Sequence[CountedAttempt]]) -> dict[int, float]:
    """k -> pass@k, for the k of `attempt_counts`, over the tasks that have so many attempts."""
    counts = [(sum(one.passed for one in tries), len(tries)) for tries in tasks]
    found = {k: mean_pass_at_k(counts, k) for k in attempt_counts(max((tries for _, tries in counts), default=0))}
    return {k: value for k, value in found.items() if value is not None}


def compute_curves(tasks: Sequence[Sequence[CountedAttempt]]) -> tuple[ComputeCurve, ...]:
    """A line for each number of attempts. Its points are budgets of tokens for each attempt: none, where attempts pass, and as many as
    the longest took."""
    taken = [one for tries in tasks for one in tries]
    if not taken:
        return ()
    budgets = _budgets(sorted(one.tokens for one in taken if one.passed), max(one.tokens for one in taken))
    lines = []
    for k in attempt_counts(max(map(len, tasks))):
        tried = [tries for tries in tasks if len(tries) >= k]
        lines.append(ComputeCurve(attempts=k, points=tuple((k * _spent(tried, budget), _solved(tried, budget, k)) for budget in budgets)))
    return tuple(lines)


def _budgets(passed: Sequence[int], longest: int) -> list[int]:
    """Budgets at which something changes, evenly among the attempts that passed where these are many."""
    among = (
        [passed[place * (len(passed) - 1) // (MAX_POINTS - 3)] for place in range(MAX_POINTS - 2)]
        if len(passed) > MAX_POINTS - 2
        else passed
    )
    return sorted({0, *among, longest})


def _spent(tasks: Sequence[Sequence[CountedAttempt]], budget: int) -> float:
    return sum(sum(min(one.tokens, budget) for one in tries) / len(tries) for tries in tasks) / len(tasks)


def _solved(tasks: Sequence[Sequence[CountedAttempt]], budget: int, k: int) -> float:
    passed = [sum(one.passed and one.tokens <= budget for one in tries) for tries in tasks]
    return sum(pass_at_k(count, len(tries), k) for count, tries in zip(passed, tasks, strict=True)) / len(tasks)
