"""How many cases it takes to see a difference, told beforehand; and how likely it is to be seen with so many."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

MAX_CASES = 1_000_000


def spread_of_pairs(difference: float, discordance: float) -> float:
    """Standard deviation of the difference of a pair of single attempts that pass or fail.

    Args:
        difference: rate after minus rate before.
        discordance: share of pairs that flip, up or down; at least |difference|.

    Raises `ValueError` for shares that cannot be.
    """
    if not abs(difference) <= discordance <= 1:
        raise ValueError(
            f"a difference of {difference:g} needs pairs that flip: from {abs(difference):g} to 1 of them, not {discordance:g}"
        )
    return math.sqrt(discordance - difference**2)


def attempt_noise(by_case: Sequence[Sequence[float]]) -> float:
    """Variance of the difference of two attempts at one case by the same policy, the mean over cases.

    A case with one attempt does not tell its own: it counts with that of all attempts at all cases, which is no less on average.

    Args:
        by_case: [N][tries] scores. Raises `ValueError` without a case that has one.
    """
    tried = [scores for scores in by_case if scores]
    if not tried:
        raise ValueError("nothing was scored")
    overall = statistics.pvariance([score for scores in tried for score in scores])
    return 2 * statistics.fmean(statistics.variance(scores) if len(scores) > 1 else overall for scores in tried)


def planned_spread(difference: float, noise: float, *, repeats: int = 1) -> float:
    """Standard deviation of a case's difference to plan with, where only one policy is known, or none.

    The difference is taken to be all in a few cases, which are lost or won for good: spread over many it is no harder to see. The
    others differ by chance alone, each tried `repeats` times by both.

    Args:
        noise: as `attempt_noise` gives it; 2 p (1 - p) for attempts that pass with probability p, whatever the case.
    """
    share = abs(difference)
    return math.sqrt(share + (1 - share) * noise / repeats - share**2)


def cases_needed(difference: float, spread: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Cases that a two-sided paired test needs to see `difference` with probability `power` (Connor 1987, normal approximation).

    Where nothing differs, their standard deviation would be sqrt(spread^2 + difference^2). 1 / |difference| more cases make up for the
    steps of an exact test (continuity correction); without them a large difference would be seen half the time with few cases.

    `spread`: standard deviation of the differences of single cases, as observed or planned (`spread_of_pairs`). With `spread` 0 one
    flip decides, and what is needed is enough of them. At most `MAX_CASES` are told.

    Raises `ValueError` for a difference of 0.
    """
    if not difference:
        raise ValueError("no number of cases shows a difference of 0")
    z, size = NormalDist().inv_cdf, abs(difference)
    flips = min(-z(alpha / 2) * math.hypot(spread / size, 1.0) + z(power) * spread / size, float(MAX_CASES))
    least = math.ceil(1 - math.log2(alpha))  # so many cases, all flipped one way, are what an exact test needs at the very least
    return max(least, math.ceil(min(flips**2 + 1 / size, MAX_CASES)))


def pairs_for(difference: float, discordance: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Cases with one attempt each that McNemar's exact test needs, so that no larger number within a tenth has less power.

    Raises `ValueError` as `spread_of_pairs` and `cases_needed` do.
    """
    n = max(1, int(0.8 * cases_needed(difference, spread_of_pairs(difference, discordance), alpha=alpha, power=power)))
    step = max(1, n // 100)
    while n < MAX_CASES:
        ahead = range(n, n + max(2, n // 10), step)
        short = [one for one in ahead if power_of_pairs(one, difference, discordance, alpha=alpha) < power]
        if not short:
            return n
        n = short[-1] + step
    return MAX_CASES


@cache
def power_of_pairs(cases: int, difference: float, discordance: float, *, alpha: float = 0.05) -> float:
    """Probability that McNemar's exact two-sided test of so many pairs is significant, in the direction of `difference`.

    Summed over the number of flips; no approximation. Raises `ValueError` as `spread_of_pairs` does.
    """
    spread_of_pairs(difference, discordance)
    toward = (discordance + abs(difference)) / (2 * discordance) if discordance else 0.5
    mean, deviation = cases * discordance, math.sqrt(cases * discordance * (1 - discordance))
    first, last = max(0, math.floor(mean - 8 * deviation - 1)), min(cases, math.ceil(mean + 8 * deviation + 1))
    return math.fsum(
        math.exp(_log_binomial(cases, flips, discordance)) * _upper(flips, _critical(flips, alpha), toward)
        for flips in range(first, last + 1)
    )


@cache
def _critical(flips: int, alpha: float) -> int:
    """Fewest flips one way, of `flips`, that are significant two-sided; `flips` + 1 where none are."""
    tail = 0.0
    for k in range(flips, -1, -1):
        tail += math.exp(_log_binomial(flips, k, 0.5))
        if 2 * tail > alpha:
            return k + 1
    return 0


def _upper(n: int, least: int, share: float) -> float:
    return math.fsum(math.exp(_log_binomial(n, k, share)) for k in range(least, n + 1))


def _log_binomial(n: int, k: int, share: float) -> float:
    if share in (0.0, 1.0):
        return 0.0 if k == n * share else -math.inf
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(share) + (n - k) * math.log1p(-share)


def smallest_detectable(cases: int, noise: float, *, repeats: int = 1, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """The smallest difference, in hundredths, that so many cases show with that power, planned as above; None: not even one of 1."""
    for hundredths in range(1, 101):
        difference = hundredths / 100
        if cases_needed(difference, planned_spread(difference, noise, repeats=repeats), alpha=alpha, power=power) <= cases:
            return difference
    return None
