"""When two numbers are the same value: the one comparison of every verifier, and of triage.

A tolerance is for numbers that arithmetic has rounded. Whole numbers (counts, ids, amounts in cents) are exact, so a tolerance for
floats never makes two of them equal, whatever their size.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

LONGEST_NUMBER = 1000  # characters
LARGEST_EXPONENT = 400  # of ten, either way: beyond every float
_EXACT_FLOAT = 2.0**53  # from here on every float is whole, whatever it was computed from
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4}))?", re.ASCII)


def number(text: str) -> Fraction | None:
    """The exact value of a number in plain ASCII, decimal or scientific; None for anything else (`nan`, `inf`, `1e999`, `1_000`, `٣`)."""
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or abs(int(match[1] or 0)) > LARGEST_EXPONENT:
        return None
    return Fraction(text)


def whole(value: Fraction | float) -> bool:
    """Whether a finite number is a whole one that is known exactly. A float from 2**53 on is not: it may stand for its neighbours."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) < _EXACT_FLOAT
    return value.denominator == 1


def same_number(given: Fraction | float, wanted: Fraction | float, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether a number is the true one, up to rounding.

    Equal numbers are. Two whole numbers that differ are not. If one of the two is whole, they differ by at most 0.5. Otherwise `near`
    decides. Infinite numbers equal only themselves, NaN equals nothing.
    """
    if given == wanted:
        return True
    if any(isinstance(value, float) and not math.isfinite(value) for value in (given, wanted)):
        return False
    exact = whole(given) + whole(wanted)
    if exact == 2 or (exact == 1 and abs(Fraction(given) - Fraction(wanted)) > Fraction(1, 2)):
        return False
    return near(given, wanted, relative=relative, absolute=absolute)


def near(given: Fraction | float, wanted: Fraction | float, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether two finite numbers differ by at most the tolerance, max(relative * |wanted|, absolute).

    A tolerance must not make a constant right: 0 and a number of the other sign are never near a true number that is not 0. An absolute
    tolerance counts for 0 and for true numbers that are at least as large as it; of those it is at most half.
    """
    if given == wanted:
        return True
    if wanted == 0:
        return -absolute <= given <= absolute
    if (given > 0) is not (wanted > 0) or given == 0:
        return False
    if isinstance(given, float) and isinstance(wanted, float):  # as below, and 20 times faster
        return abs(given - wanted) <= max(relative * abs(wanted), min(absolute, abs(wanted) / 2) if absolute <= abs(wanted) else 0.0)
    size, difference = abs(Fraction(wanted)), abs(Fraction(given) - Fraction(wanted))
    allowed = _written(relative) * size
    if absolute <= size:
        allowed = max(allowed, min(_written(absolute), size / 2))
    return difference <= allowed


@lru_cache(maxsize=64)
def _written(tolerance: float) -> Fraction:
    """The decimal that a tolerance was written as: 0.001 is a thousandth, which its float is not."""
    return Fraction(repr(float(tolerance)))
