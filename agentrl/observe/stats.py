"""Means with their 95% confidence intervals, and the formatting of figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from agentrl.base.numbers import student_t_quantile, wilson_interval

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A mean over `n` episodes and its 95% interval: `Rate.from_successes(9, 10)`."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    @classmethod
    def from_successes(cls, successes: int, n: int) -> Self:
        """Returns the share of successes with the Wilson score interval (Wilson 1927), which is accurate near 0 and 1 and for small n.

        Raises `ValueError` if `n` is 0, or if `successes` is not from 0 to `n`.
        """
        if not 0 <= successes <= n or n == 0:
            raise ValueError(f"a rate needs 0 <= successes <= n and n > 0, got {successes} of {n}")
        low, high = wilson_interval(successes / n, n)
        return cls(value=successes / n, ci_low=low, ci_high=high, n=n)

    @classmethod
    def from_scores(cls, scores: Sequence[float]) -> Self:
        """Returns the mean score, with the Wilson interval if every score is 0 or 1, otherwise with Student's t interval.

        For a single graded score, both bounds of the interval equal the score. Raises `ValueError` if there are no scores, or if a score is
        not finite.
        """
        if not scores or not all(math.isfinite(score) for score in scores):
            raise ValueError(f"a rate needs at least one score, and all scores must be finite; got {len(scores)} scores")
        if all(score in (0.0, 1.0) for score in scores):
            return cls.from_successes(round(sum(scores)), len(scores))
        n, mean = len(scores), statistics.fmean(scores)
        half = student_t_quantile(n - 1) * statistics.stdev(scores) / math.sqrt(n) if n > 1 else 0.0
        return cls(value=mean, ci_low=mean - half, ci_high=mean + half, n=n)


def rate_difference(before: Rate, after: Rate) -> tuple[float, float]:
    """Returns the 95% interval of `after.value - before.value`, computed from the intervals of both rates (MOVER, Zou and Donner 2008).

    The two rates are treated as independent. If both rates come from the same tasks, the interval is conservative.
    """
    change = after.value - before.value
    low = math.hypot(after.value - after.ci_low, before.ci_high - before.value)
    high = math.hypot(after.ci_high - after.value, before.value - before.ci_low)
    return change - low, change + high


def in_unit_interval(rate: Rate | None) -> bool:
    """Whether a rate and its interval are within [0, 1]; True for None."""
    return rate is None or (rate.ci_low >= 0 and rate.ci_high <= 1)


def format_rate(value: Rate | None) -> str:
    """Returns a rate as text such as `85.0%`, or `1.250` if its interval is not within [0, 1]; `n/a` for None."""
    if value is None:
        return "n/a"
    return f"{100 * value.value:.1f}%" if in_unit_interval(value) else f"{value.value:.3f}"


def format_interval(value: Rate) -> str:
    """Returns the interval of a rate as text such as `80.1-89.2%`, or `1.100 to 1.300` if it is not within [0, 1]."""
    if in_unit_interval(value):
        return f"{100 * value.ci_low:.1f}-{100 * value.ci_high:.1f}%"
    return f"{value.ci_low:.3f} to {value.ci_high:.3f}"


def format_optional(value: float | None, form: Format) -> str:
    """Returns the value formatted with `form`; `n/a` for None."""
    return "n/a" if value is None else form(value)


def format_count(value: float) -> str:
    """Returns a count as text such as `1,234`, `12.3k`, `4.56M`, `7.89B` or `1.2T`."""
    for least, size, unit in ((999.5e9, 1e12, "T"), (999.5e6, 1e9, "B"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}"


def format_duration(seconds: float) -> str:
    """Returns a duration as text such as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
