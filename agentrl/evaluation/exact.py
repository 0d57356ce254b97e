"""Exact tests on counts: their probabilities are sums of whole numbers, so no sample is too small for them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

_LARGEST = 1 << 26  # bits of the number that holds the exact distribution of a sum
_FLIPS = 9_999


@dataclass(frozen=True, slots=True, kw_only=True)
class TailProbabilities:
    """Probabilities, under the null hypothesis, of a sum as low or lower, and as high or higher, than the one observed."""

    low: float
    high: float
    exact: bool  # False: from seeded random flips

    @property
    def both(self) -> float:
        """The two-sided p-value."""
        return min(1.0, 2 * min(self.low, self.high))


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p-value for pairs of single attempts: under the null every flip is a fair coin (McNemar 1947; exact binomial)."""
    n = lost + gained
    tail = sum(math.comb(n, k) for k in range(min(lost, gained) + 1))
    return min(1.0, float(Fraction(2 * tail, 1 << n)))


def sign_flip_test(differences: Sequence[Fraction], *, seed: int = 0) -> TailProbabilities:
    """The test of a sum of case differences against every choice of their signs.

    A case is one cluster: its repeats keep together, and its sign is flipped as a whole. Valid wherever a case could as well have
    come out the other way round, whatever its repeats have in common. Single attempts that pass or fail make it McNemar's test.
    The distribution is exact if it fits in 2^26 bits: (n + 1) * sum(|d|) * m, for n differences d that are not 0 and their least common
    denominator m. Differences of attempts that pass or fail fit. Other distributions are estimated from 9,999 seeded random flips and
    the observed signs (Phipson and Smyth 2010).
    """
    unit = math.lcm(*(one.denominator for one in differences))
    steps = [int(one * unit) for one in differences if one]
    sizes, risen = [abs(step) for step in steps], sum(max(step, 0) for step in steps)
    total = 1 << len(sizes)
    width = total.bit_length()  # bits of a count: none exceeds `total`
    if width * sum(sizes) > _LARGEST:
        return _sampled(sizes, risen, seed)
    ways = 1  # digit t, in base 2^width: the choices of signs in which the rises sum to t
    for size in sizes:
        ways += ways << (width * size)
    low = _digits(ways & ((1 << (width * (risen + 1))) - 1), width)
    high = _digits(ways >> (width * risen), width)
    return TailProbabilities(low=float(Fraction(low, total)), high=float(Fraction(high, total)), exact=True)


def _digits(number: int, width: int) -> int:
    """The sum of the digits in base 2^width, where it is below 2^width - 1: the number modulo that, as with nines in base ten."""
    return number if width == 1 else number % ((1 << width) - 1)


def _sampled(sizes: Sequence[int], risen: int, seed: int) -> TailProbabilities:
    """`risen`: the sum of the sizes whose observed sign is positive. The sum of the differences grows with it."""
    rng = random.Random(seed)
    low = high = 1  # the observed signs
    for _ in range(_FLIPS):
        signs = rng.getrandbits(len(sizes))
        flipped = sum(size for place, size in enumerate(sizes) if signs >> place & 1)
        low += flipped <= risen
        high += flipped >= risen
    return TailProbabilities(low=low / (_FLIPS + 1), high=high / (_FLIPS + 1), exact=False)


@cache
def fisher_p_value(passed: int, tries: int, before_passed: int, before_tries: int) -> float:
    """One-sided p-value of Fisher's exact test: as few passes as `passed` of `tries`, were they drawn from the same urn as before's.

    Raises `ValueError` for counts that are none.
    """
    if not (0 <= passed <= tries and 0 <= before_passed <= before_tries):
        raise ValueError(f"{passed} of {tries} and {before_passed} of {before_tries} are no counts")
    all_tries, all_passed = tries + before_tries, passed + before_passed
    first = max(0, all_passed - before_tries)
    tail = sum(math.comb(tries, k) * math.comb(before_tries, all_passed - k) for k in range(first, passed + 1))
    return float(Fraction(tail, math.comb(all_tries, all_passed)))


def holm_rejections(p_values: Sequence[float], alpha: float, *, hypotheses: int) -> tuple[bool, ...]:
    """The rejected hypotheses, with a chance of at most `alpha` of any false rejection under any dependence (Holm 1979).

    Args:
        hypotheses: their number, at least that of the p-values. Those without a p-value count as if it were 1.
    """
    rejected = [False] * len(p_values)
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (hypotheses - place):
            break
        rejected[index] = True
    return tuple(rejected)
