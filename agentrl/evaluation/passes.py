"""pass@k: the probability that at least one of k attempts passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(passed: int, tries: int, k: int) -> float:
    """The unbiased estimate from `tries` attempts at one case: 1 - C(tries - passed, k) / C(tries, k) (Chen et al. 2021).

    Raises `ValueError` for counts that are none, and where there are fewer than `k` attempts.
    """
    if not (0 <= passed <= tries and 1 <= k <= tries):
        raise ValueError(f"pass@{k} of {passed} passes in {tries} attempts is not defined")
    return float(1 - Fraction(math.comb(tries - passed, k), math.comb(tries, k)))


def mean_pass_at_k(cases: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean over the cases (passed, tries) that were tried `k` times or more; None where none was."""
    found = [pass_at_k(passed, tries, k) for passed, tries in cases if tries >= k]
    return sum(found) / len(found) if found else None
