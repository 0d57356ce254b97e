"""Decides whether two numbers are equal up to rounding.

The verifiers in `rewards/` that compare numeric answers with the truth use `same_number` or `is_near`, and failure triage uses
`same_number`. Plug-in verifiers may compare numbers differently.

A tolerance applies only to numbers that arithmetic has rounded. Whole numbers (counts, ids, amounts in cents) are exact, so two different
whole numbers never count as equal.

The module also computes the Wilson interval of a proportion, and Student's t distribution for the interval of a mean, and writes a count
with its noun. It uses only the standard library.

It also compares scores up to rounding. The sum 0.1 + 0.2 + 0.2 and the number 0.5 may differ by rounding, which must not count as a
preference.

All code that compares scores uses these functions: advantages, groups with equal scores, preference pairs, thresholds and comparisons of
policies. Scores are compared to nine decimals, or to nine digits if they are larger than 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

LONGEST_NUMBER = 1000  # characters
LARGEST_EXPONENT = 400  # exponent of ten, positive or negative; far beyond the range of floats
_EXACT_FLOAT = 2.0**53  # every float from here on is whole, even if it was rounded
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4}))?", re.ASCII)


def finite(value: float | None) -> float | None:
    """Returns the value if it is finite, otherwise None, because JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def parse_number(text: str) -> Fraction | None:
    """Returns the exact value of a decimal or scientific number in ASCII; None for other strings (`nan`, `inf`, `1e999`, `1_000`, `٣`)."""
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or (match[1] is not None and abs(int(match[1])) > LARGEST_EXPONENT):
        return None
    return Fraction(text)


def is_whole(value: Fraction | float) -> bool:
    """Whether a finite number is whole and known exactly. A float of 2**53 or more is not exact, because it may have been rounded."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) < _EXACT_FLOAT
    return value.denominator == 1


def same_number(number: Fraction | float, wanted: Fraction | float, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether two numbers are equal up to rounding.

    The tolerances do not apply if both numbers are whole (`is_whole`): such numbers are equal only if they have the same value. Floats of
    2**53 or more do not count as whole, because they may have been rounded. If only one of the numbers is whole and they differ by more
    than 0.5, they are not equal. Otherwise `is_near` decides. An infinite number equals only itself, and NaN equals nothing.
    """
    if number == wanted:
        return True
    if any(isinstance(value, float) and not math.isfinite(value) for value in (number, wanted)):
        return False
    exact = is_whole(number) + is_whole(wanted)
    if exact == 2 or (exact == 1 and abs(Fraction(number) - Fraction(wanted)) > Fraction(1, 2)):
        return False
    return is_near(number, wanted, relative=relative, absolute=absolute)


def is_near(number: Fraction | float, wanted: Fraction | float, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether two finite numbers differ by at most max(relative * |wanted|, absolute).

    A constant such as 0 must not be near every small value of `wanted`. Therefore, if `wanted` is not 0, then 0 and numbers of the opposite
    sign are never near it. In this case `absolute` is also capped at |wanted| / 2, and ignored if it exceeds |wanted|.
    """
    if number == wanted:
        return True
    if wanted == 0:
        return -absolute <= number <= absolute
    if (number > 0) is not (wanted > 0) or number == 0:
        return False
    if isinstance(number, float) and isinstance(wanted, float):  # the same as below, 20 times faster
        return abs(number - wanted) <= max(relative * abs(wanted), min(absolute, abs(wanted) / 2) if absolute <= abs(wanted) else 0.0)
    size, difference = abs(Fraction(wanted)), abs(Fraction(number) - Fraction(wanted))
    allowed = _written(relative) * size
    if absolute <= size:
        allowed = max(allowed, min(_written(absolute), size / 2))
    return difference <= allowed


@lru_cache(maxsize=64)
def _written(tolerance: float) -> Fraction:
    """Returns the exact value of the decimal number that was written as a tolerance: 0.001 becomes exactly a thousandth."""
    return Fraction(repr(float(tolerance)))


LEVEL = 0.95


def wilson_interval(share: float, n: float, *, level: float = LEVEL) -> tuple[float, float]:
    """Returns the Wilson score interval of a proportion (Wilson 1927), which is accurate near 0 and 1 and for small n.

    Args:
        share: the observed proportion.
        n: number of observations, which may be fractional if repeated observations count less.
    """
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    center = (share * n + z2 / 2) / (n + z2)
    half = math.sqrt(z2 * (share * (1 - share) * n + z2 / 4)) / (n + z2)
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))


def student_t_quantile(freedom: int, *, level: float = LEVEL) -> float:
    """Returns the t with P(|T| <= t) = `level` for Student's distribution with `freedom` degrees of freedom.

    Raises `ValueError` unless `freedom` is at least 1 and `level` is at least 0 and below 1.
    """
    if freedom < 1 or not 0 <= level < 1:
        raise ValueError(f"the t distribution has no quantile for {freedom} degrees of freedom and level {level}")
    low, high = 0.0, 1.0
    while student_t_probability(high, freedom) < level:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_t_probability(middle, freedom) < level else (low, middle)
    return high


def student_t_probability(t: float, freedom: int) -> float:
    """Returns P(|T| <= t), which is a finite sum for an integer number of degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and
    26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


ROUNDING = 1e-9
"""Maximum difference at which two scores count as equal, relative to the larger score or to 1."""


def tolerance(*scores: float) -> float:
    """Returns the maximum difference at which these scores count as equal; 0 if a score is infinite."""
    largest = max((1.0, *map(abs, scores)))
    return ROUNDING * largest if largest < float("inf") else 0.0


def all_equal(scores: Iterable[float]) -> bool:
    """Whether all scores are equal up to rounding. True for fewer than two scores. NaN equals nothing."""
    some = list(scores)
    if len(some) < 2 or any(map(math.isnan, some)):
        return len(some) < 2
    return max(some) - min(some) <= tolerance(*some) or min(some) == max(some)


def is_above(one: float, other: float) -> bool:
    """Whether the score `one` is higher than `other` by more than rounding."""
    return one - other > tolerance(one, other)


def is_at_least(score: float, bar: float) -> bool:
    """Whether a score is at least `bar`, up to rounding."""
    return score >= bar or bar - score <= tolerance(score, bar)


def all_negligible(credits: Iterable[float], scores: Iterable[float]) -> bool:
    """Whether credits computed from these scores are all zero up to rounding."""
    bound = tolerance(*scores)
    return all(abs(credit) <= bound for credit in credits)


def exact_fraction(score: float) -> Fraction:
    """Returns a finite score as a fraction, rounded to nine decimals (ten digits above 1), so that sums and ties of scores are exact."""
    return Fraction(f"{score:.9f}" if abs(score) <= 1 else f"{score:.9e}")


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `3 tasks` or `1 task`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
