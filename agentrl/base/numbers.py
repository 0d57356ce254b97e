"""Decides whether two numbers are equal up to rounding. All verifiers and triage use this comparison.

A tolerance is for numbers that arithmetic has rounded. Whole numbers (counts, ids, amounts in cents) are exact, so two different whole
numbers are never equal within a tolerance.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

LONGEST_NUMBER = 1000  # characters
LARGEST_EXPONENT = 400  # of ten, positive or negative: beyond every float
_EXACT_FLOAT = 2.0**53  # every float from here on is whole, also a rounded one
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4}))?", re.ASCII)


def parse_number(text: str) -> Fraction | None:
    """The exact value of a decimal or scientific number in ASCII; None for anything else (`nan`, `inf`, `1e999`, `1_000`, `٣`)."""
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or (match[1] is not None and abs(int(match[1])) > LARGEST_EXPONENT):
        return None
    return Fraction(text)


def is_whole(value: Fraction | float) -> bool:
    """Whether a finite number is whole and known exactly. A float from 2**53 on is not exact: it may be rounded."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) < _EXACT_FLOAT
    return value.denominator == 1


def same_number(given: Fraction | float, wanted: Fraction | float, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether two numbers are equal up to rounding.

    Two different whole numbers are never equal. If one of the numbers is whole, they must differ by at most 0.5. Otherwise `is_near`
    decides. Infinite numbers equal only themselves, and NaN equals nothing.
    """
    if given == wanted:
        return True
    if any(isinstance(value, float) and not math.isfinite(value) for value in (given, wanted)):
        return False
    exact = is_whole(given) + is_whole(wanted)
    if exact == 2 or (exact == 1 and abs(Fraction(given) - Fraction(wanted)) > Fraction(1, 2)):
        return False
    return is_near(given, wanted, relative=relative, absolute=absolute)


def is_near(given: Fraction | float, wanted: Fraction | float, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether two finite numbers differ by at most max(relative * |wanted|, absolute).

    No constant may be near all small truths. So 0 and a number of the other sign are never near a truth other than 0, and for such a truth
    `absolute` counts as at most |wanted| / 2, and as 0 if it exceeds |wanted|.
    """
    if given == wanted:
        return True
    if wanted == 0:
        return -absolute <= given <= absolute
    if (given > 0) is not (wanted > 0) or given == 0:
        return False
    if isinstance(given, float) and isinstance(wanted, float):  # the same as below, 20 times faster
        return abs(given - wanted) <= max(relative * abs(wanted), min(absolute, abs(wanted) / 2) if absolute <= abs(wanted) else 0.0)
    size, difference = abs(Fraction(wanted)), abs(Fraction(given) - Fraction(wanted))
    allowed = _written(relative) * size
    if absolute <= size:
        allowed = max(allowed, min(_written(absolute), size / 2))
    return difference <= allowed


@lru_cache(maxsize=64)
def _written(tolerance: float) -> Fraction:
    """The decimal number that a tolerance was written as: 0.001 is exactly a thousandth, unlike its float."""
    return Fraction(repr(float(tolerance)))
