"""Means with their 95% confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from agentrl.base.estimates import student_t_quantile, wilson_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A mean over `n` episodes and its 95% interval: `Rate.from_successes(9, 10)`."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    @classmethod
    def from_successes(cls, successes: int, n: int) -> Self:
        """Share of successes with Wilson's score interval (Wilson 1927), which stays honest near 0 and 1 and for small n.

        Raises `ValueError` when n is 0 or successes are not within [0, n].
        """
        if not 0 <= successes <= n or n == 0:
            raise ValueError(f"a rate needs 0 <= successes <= n and n > 0, got {successes} of {n}")
        low, high = wilson_interval(successes / n, n)
        return cls(value=successes / n, ci_low=low, ci_high=high, n=n)

    @classmethod
    def from_scores(cls, scores: Sequence[float]) -> Self:
        """Mean score: Wilson's interval when every score is 0 or 1, Student's t interval otherwise.

        One graded score alone says nothing about the spread; its interval is the point itself. Raises `ValueError` when there is
        no score or one is not finite.
        """
        if not scores or not all(math.isfinite(score) for score in scores):
            raise ValueError(f"a rate needs at least one score, all finite; got {len(scores)} scores")
        if all(score in (0.0, 1.0) for score in scores):
            return cls.from_successes(round(sum(scores)), len(scores))
        n, mean = len(scores), statistics.fmean(scores)
        half = student_t_quantile(n - 1) * statistics.stdev(scores) / math.sqrt(n) if n > 1 else 0.0
        return cls(value=mean, ci_low=mean - half, ci_high=mean + half, n=n)


def rate_difference(before: Rate, after: Rate) -> tuple[float, float]:
    """95% interval of `after.value - before.value` from the intervals of both, whatever their n (MOVER, Zou and Donner 2008).

    It treats the two as independent. If both are from the same tasks, it is rather too wide than too narrow.
    """
    change = after.value - before.value
    low = math.hypot(after.value - after.ci_low, before.ci_high - before.value)
    high = math.hypot(after.ci_high - after.value, before.value - before.ci_low)
    return change - low, change + high
