"""The Wilson interval of a proportion, and Student's t distribution for the interval of a mean. Standard library only."""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL = 0.95


def wilson_interval(share: float, n: float, *, level: float = LEVEL) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson 1927), which is accurate near 0 and 1 and for small n.

    Args:
        share: the observed proportion.
        n: number of observations; a fraction if repeated observations count less.
    """
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    center = (share * n + z2 / 2) / (n + z2)
    half = math.sqrt(z2 * (share * (1 - share) * n + z2 / 4)) / (n + z2)
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))


def student_t_quantile(freedom: int, *, level: float = LEVEL) -> float:
    """The t with P(|T| <= t) = `level` for Student's distribution with `freedom` degrees of freedom."""
    low, high = 0.0, 1.0
    while student_t_probability(high, freedom) < level:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_t_probability(middle, freedom) < level else (low, middle)
    return high


def student_t_probability(t: float, freedom: int) -> float:
    """P(|T| <= t), a finite sum for an integer number of degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
