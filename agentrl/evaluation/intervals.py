"""Intervals of rates and of differences over cases, where the repeats of a case are one cluster."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agentrl.base.estimates import student_t_quantile, wilson_interval

RESAMPLES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure between two bounds."""

    value: float
    low: float
    high: float


def difference_interval(by_case: Sequence[float], *, level: float = 0.95, made_up: float = 1.0, seed: int = 0) -> Interval:
    """Percentile interval of the mean difference, by a bootstrap that draws whole cases (Davison and Hinkley 1997, 3.8).

    Its percentiles are those at which an interval from few cases is as wide as Student's t asks for (the expanded percentile interval
    of Hesterberg 2015).

    Made-up cases, as many up as down, join those that are drawn from: with few flips the plain bootstrap is too sure of itself, and
    without one its interval is a point. `made_up` is the sum of their squares. 1 gives the pseudo-pairs of Agresti and Min (2005), who
    add half an observation to each cell; 3.5 makes the bound from N cases without a flip the exact one, log(1/alpha) / N.

    Args:
        by_case: [N] mean difference of each case, each within [-1, 1] for scores within [0, 1].

    Raises `ValueError` without a case.
    """
    if not by_case:
        raise ValueError("an interval needs at least one case")
    each_way = math.ceil(made_up)
    size = math.sqrt(made_up / (2 * each_way))
    pool = [*by_case, *[size] * each_way, *[-size] * each_way]
    rng, n = random.Random(seed), len(pool)
    means = sorted(math.fsum(rng.choices(pool, k=n)) / n for _ in range(RESAMPLES))
    value, edge = statistics.fmean(by_case), NormalDist().cdf(-student_t_quantile(n - 1, level=level) * math.sqrt(n / (n - 1)))
    return Interval(value=value, low=min(_quantile(means, edge), value), high=max(_quantile(means, 1 - edge), value))


def rate_interval(by_case: Sequence[float], tries: int, *, level: float = 0.95) -> Interval:
    """The mean of case rates with Wilson's interval, at the number of independent tries that cases with repeats are worth.

    That number is what would give a mean of single tries the variance that the case rates show (Kish 1965): from the number of
    cases, where repeats say the same, to `tries`, where they are independent.

    Args:
        by_case: [N] share of each case's attempts that passed.
        tries: attempts of all cases together.

    Raises `ValueError` without a case.
    """
    if not by_case:
        raise ValueError("a rate needs at least one case")
    cases, share = len(by_case), statistics.fmean(by_case)
    spread, alone = statistics.variance(by_case) if cases > 1 else 0.0, share * (1 - share)
    worth = alone * cases / spread if spread else math.inf if alone and cases > 1 else float(cases)
    low, high = wilson_interval(share, min(max(worth, float(cases)), float(max(tries, cases))), level=level)
    return Interval(value=share, low=low, high=high)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]
