"""Compares scores up to rounding. Sums such as 0.1 + 0.2 + 0.2 and 0.5 differ by rounding, which must not count as a preference.

All code that compares scores uses these functions: advantages, groups without a preference, preference pairs, thresholds and comparisons
of policies. Scores are compared to nine decimals, or to nine digits if they are larger than 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

ROUNDING = 1e-9
"""Largest difference of equal scores, relative to the larger one or to 1."""


def tolerance(*scores: float) -> float:
    """The largest difference at which these scores count as equal. Infinite scores have none."""
    largest = max((1.0, *map(abs, scores)))
    return ROUNDING * largest if largest < float("inf") else 0.0


def all_equal(scores: Iterable[float]) -> bool:
    """Whether all scores are equal up to rounding. True for fewer than two scores. NaN equals nothing."""
    some = list(scores)
    return len(some) < 2 or max(some) - min(some) <= tolerance(*some) or min(some) == max(some)


def is_above(one: float, other: float) -> bool:
    """Whether a score is higher than another by more than rounding."""
    return one - other > tolerance(one, other)


def is_at_least(score: float, bar: float) -> bool:
    """Whether a score is at least `bar`, up to rounding."""
    return score >= bar or bar - score <= tolerance(score, bar)


def all_negligible(credits: Iterable[float], scores: Iterable[float]) -> bool:
    """Whether credits computed from these scores are all zero up to rounding."""
    bound = tolerance(*scores)
    return all(abs(one) <= bound for one in credits)


def exact_fraction(score: float) -> Fraction:
    """A finite score as the fraction that it was before rounding, so that sums and ties of scores are exact."""
    return Fraction(f"{score:.9f}" if abs(score) <= 1 else f"{score:.9e}")
