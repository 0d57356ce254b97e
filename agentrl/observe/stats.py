"""Means with their 95% confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_LEVEL = 0.95


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
        from scipy.stats import binomtest

        if not 0 <= successes <= n or n == 0:
            raise ValueError(f"a rate needs 0 <= successes <= n and n > 0, got {successes} of {n}")
        interval = binomtest(successes, n).proportion_ci(confidence_level=_LEVEL, method="wilson")
        return cls(value=successes / n, ci_low=float(interval.low), ci_high=float(interval.high), n=n)

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
        from scipy.stats import t

        n, mean = len(scores), statistics.fmean(scores)
        half = float(t.ppf((1 + _LEVEL) / 2, n - 1)) * statistics.stdev(scores) / math.sqrt(n) if n > 1 else 0.0
        return cls(value=mean, ci_low=mean - half, ci_high=mean + half, n=n)
