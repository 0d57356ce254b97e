"""Means with their 95% confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
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
        if not 0 <= successes <= n or n == 0:
            raise ValueError(f"a rate needs 0 <= successes <= n and n > 0, got {successes} of {n}")
        share, z2 = successes / n, NormalDist().inv_cdf((1 + _LEVEL) / 2) ** 2
        center = (successes + z2 / 2) / (n + z2)
        half = math.sqrt(z2 * (share * (1 - share) * n + z2 / 4)) / (n + z2)
        return cls(value=share, ci_low=max(0.0, min(center - half, share)), ci_high=min(1.0, max(center + half, share)), n=n)

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
        half = _t(n - 1) * statistics.stdev(scores) / math.sqrt(n) if n > 1 else 0.0
        return cls(value=mean, ci_low=mean - half, ci_high=mean + half, n=n)


def _t(freedom: int) -> float:
    """The t that Student's distribution with so many degrees of freedom keeps within, up or down, with probability `_LEVEL`."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < _LEVEL:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < _LEVEL else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Probability of |T| <= t: a finite sum for a whole number of degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
