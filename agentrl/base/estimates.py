"""Intervals that more than one room needs: of a share, and Student's distribution for a mean. Standard library only."""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL = 0.95


def wilson_interval(share: float, n: float, *, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` (Wilson 1927), which stays honest near 0 and 1 and for small n; it holds `share`.

    Args:
        n: observations; a fraction where repeats are worth less than so many.
    """
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    center = (share * n + z2 / 2) / (n + z2)
    half = math.sqrt(z2 * (share * (1 - share) * n + z2 / 4)) / (n + z2)
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))


def student_t_quantile(freedom: int, *, level: float = LEVEL) -> float:
    """The t that Student's distribution with so many degrees of freedom keeps within, up or down, with probability `level`."""
    low, high = 0.0, 1.0
    while student_t_probability(high, freedom) < level:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_t_probability(middle, freedom) < level else (low, middle)
    return high


def student_t_probability(t: float, freedom: int) -> float:
    """Probability of |T| <= t: a finite sum for a whole number of degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
