"""Tests, intervals, sample sizes and compute curves for evaluations. All attempts at a case form one cluster.

The tests need only the standard library, because the gate uses them. Bootstrap intervals need scipy (extra `statistics`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import Any

from agentrl.base.installation import import_optional
from agentrl.base.numbers import student_t_quantile, wilson_interval

RESAMPLES = 4_000
MAX_CASES = 1_000_000
MAX_POINTS = 24
"""Maximum number of points on a compute curve."""
_MAX_BITS = 1 << 26  # maximum bits of the number that holds the exact distribution of a sum
_FLIPS = 9_999
_MAX_LOG = 700.0  # maximum logarithm of the e-value for one stake; a larger value would overflow
_STAKES = tuple(0.05 + 0.1 * index for index in range(10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails:
    """The probability, under the null hypothesis, of a sum at most as large as the observed sum (`low`) or at least as large (`high`)."""

    low: float
    high: float
    exact: bool  # False means that they are estimated from seeded random flips

    @property
    def both(self) -> float:
        """The two-sided p-value."""
        return min(1.0, 2 * min(self.low, self.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimated value and its confidence bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAttempt:
    """One attempt at a task: whether it passed, and the number of tokens sampled in it, including those of sub-agents."""

    passed: bool
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCurve:
    """The share of tasks solved by `attempts` attempts per task, as a function of the token budget at which each attempt is stopped.

    The curve is computed without running episodes again: an agent does not know its budget, so an attempt that passed after n tokens would
    pass with any budget of n or more.
    """

    attempts: int
    points: tuple[tuple[float, float], ...]  # (mean tokens sampled in all attempts, share of tasks that at least one attempt solves)


def sign_flip_test(differences: Sequence[Fraction], *, seed: int = 0) -> Tails:
    """Tests the sum of the case differences against the distribution of this sum over all choices of signs.

    A case has one sign, whatever the number of repeats. The test is valid if, under the null hypothesis, both signs of a case's difference
    are equally likely. For single attempts that pass or fail, the test is McNemar's test. The distribution is exact if its size, (n + 1) *
    sum(|d|) * m bits for n nonzero differences d with least common denominator m, is at most 2^26 bits. For single attempts that pass or
    fail, this allows n up to 8,191. Larger distributions are estimated from 9,999 seeded random choices of signs and the observed signs
    (Phipson and Smyth 2010).
    """
    unit = math.lcm(*(difference.denominator for difference in differences))
    steps = [int(difference * unit) for difference in differences if difference]
    sizes, risen = [abs(step) for step in steps], sum(max(step, 0) for step in steps)
    total = 1 << len(sizes)
    width = total.bit_length()  # bits of a count, which is at most `total`
    if width * sum(sizes) > _MAX_BITS:
        return _sampled_flips(sizes, risen, seed)
    ways = 1  # digit t, in base 2^width, is the number of sign choices whose positive differences sum to t
    for size in sizes:
        ways += ways << (width * size)
    low = _digit_sum(ways & ((1 << (width * (risen + 1))) - 1), width)
    high = _digit_sum(ways >> (width * risen), width)
    return Tails(low=float(Fraction(low, total)), high=float(Fraction(high, total)), exact=True)


@cache
def fisher_p_value(passed: int, tries: int, before_passed: int, before_tries: int) -> float:
    """Returns the one-sided p-value of Fisher's exact test for `passed / tries` being below `before_passed / before_tries`.

    The p-value is computed exactly and then rounded to a float. Raises `ValueError` if a count of passed tries is negative or exceeds its
    number of tries.
    """
    if not (0 <= passed <= tries and 0 <= before_passed <= before_tries):
        raise ValueError(
            f"{passed} of {tries} and {before_passed} of {before_tries} are not counts of passed tries: each must be from 0 to tries"
        )
    all_tries, all_passed = tries + before_tries, passed + before_passed
    first = max(0, all_passed - before_tries)
    tail = sum(math.comb(tries, k) * math.comb(before_tries, all_passed - k) for k in range(first, passed + 1))
    return float(Fraction(tail, math.comb(all_tries, all_passed)))


def holm_rejections(p_values: Sequence[float], alpha: float, *, hypotheses: int) -> tuple[bool, ...]:
    """Returns, for each p-value, whether its hypothesis is rejected (Holm 1979).

    The probability of one or more false rejections is at most `alpha`, even if the p-values depend on each other.

    Args:
        hypotheses: number of hypotheses, at least the number of p-values. For a hypothesis without a p-value, a p-value of 1 is assumed.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (hypotheses - rank):
            break
        rejected[index] = True
    return tuple(rejected)


def e_value(differences: Sequence[float], *, null: float = 0.0) -> float:
    """Returns an e-value, the evidence that the mean difference is below `null`. The e-value may be inspected after each new case.

    For each stake of 0.05, 0.15, ..., 0.95, the factors 1 - stake * (d - null) / (1 - null) of all cases are multiplied, where d is the
    difference of a case. The result is the mean of these ten products (Waudby-Smith and Ramdas 2024); without cases, it is 1. If the
    expected difference of each case, given the cases before it, is at least `null`, the probability that the result ever reaches 1/alpha is
    at most alpha (Ville 1939). The bound holds if each difference is from a new case, not from a repeat.

    Args:
        differences: [N] score after minus score before for each case, within [-1, 1], in the order in which the cases were tried.
        null: within [-1, 1). The e-value never decreases as `null` increases.

    Raises `ValueError` if a difference is outside [-1, 1].
    """
    if any(not -1 <= difference <= 1 for difference in differences):
        raise ValueError("a difference of scores is outside [-1, 1]: scores must be within [0, 1]")
    scaled = [(difference - null) / (1 - null) for difference in differences]  # at most 1, so no factor is below 1 - stake
    logs = (math.fsum(math.log1p(-stake * value) for value in scaled) for stake in _STAKES)
    return math.fsum(math.exp(min(log, _MAX_LOG)) for log in logs) / len(_STAKES)


def anytime_interval(differences: Sequence[float], *, level: float = 0.95) -> Interval:
    """Returns an interval for the mean difference that is valid for all numbers of cases at once, so a comparison may stop after any case.

    The interval contains every mean against which the evidence (`e_value`) is below 2 / (1 - level) in both directions. The interval
    excludes 0 if and only if the evidence against 0 reaches 2 / (1 - level) in one direction. The interval is wider than the one that
    `difference_interval` returns. If there is no case, the interval is [-1, 1].

    Args:
        differences: as for `e_value`. Raises `ValueError` if a difference is outside [-1, 1].
    """
    enough = 2 / (1 - level)
    mirrored = [-difference for difference in differences]
    value = statistics.fmean(differences) if differences else 0.0
    high, low = _bound(differences, enough), -_bound(mirrored, enough)
    return Interval(value=value, low=min(low, value), high=max(high, value))


def _bound(differences: Sequence[float], enough: float) -> float:
    """Returns the lowest `null` for which `e_value` reaches `enough`, within 1e-9; 1 if `e_value` reaches it for no `null`."""
    low, high = -1.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if e_value(differences, null=middle) >= enough else (middle, high)
    return high


def difference_interval(by_case: Sequence[float], *, level: float = 0.95, made_up: float = 1.0, seed: int = 0) -> Interval:
    """Returns a percentile interval for the mean difference, from a seeded bootstrap over cases (Davison and Hinkley 1997, 3.8).

    The percentiles are expanded, so that an interval from few cases is as wide as Student's t requires (Hesterberg 2015).

    Pseudo-cases, equally many positive and negative, are added to the sample. Without them, the interval would be too narrow if few cases
    differ, and a single point if no case differs. `made_up` is the sum of the squared differences of the pseudo-cases. A value
    of 1 yields the pseudo-pairs of Agresti and Min (2005), half an observation in each cell. With 3.5, the bound from N cases without a
    difference is the exact bound, log(1/alpha) / N.

    Args:
        by_case: [N] mean score difference of each case, within [-1, 1] for scores within [0, 1].

    Raises `ValueError` if there is no case, and `UserError` if scipy is not installed.
    """
    if not by_case:
        raise ValueError("an interval needs at least one case")
    stats = import_optional("scipy.stats", "statistics", needed_for="comparing policies")
    each_way = math.ceil(made_up)
    size = math.sqrt(made_up / (2 * each_way))
    pool = [*by_case, *[size] * each_way, *[-size] * each_way]
    n, value = len(pool), statistics.fmean(by_case)
    edge = stats.norm.cdf(-stats.t.ppf((1 + level) / 2, n - 1) * math.sqrt(n / (n - 1)))
    low, high = stats.bootstrap(
        (pool,), _mean, confidence_level=1 - 2 * edge, n_resamples=RESAMPLES, batch=200, method="percentile", rng=seed
    ).confidence_interval
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def rate_interval(by_case: Sequence[float], tries: int) -> Interval:
    """Returns the mean of case rates with Wilson's 95% interval for the effective number of independent tries (Kish 1965).

    The effective number is the number of independent tries whose mean has the same variance as the mean of the case rates. Because a
    variance from few cases is uncertain, the number is divided by (t / z)^2 (Korn and Graubard 1998). It is at least the number of cases
    (if all repeats of a case have the same result) and at most `tries` (if repeats are independent).

    Args:
        by_case: [N] share of each case's attempts that passed.
        tries: total number of attempts at all cases.

    Raises `ValueError` if there is no case.
    """
    if not by_case:
        raise ValueError("a rate needs at least one case")
    cases, share = len(by_case), statistics.fmean(by_case)
    spread, single = statistics.variance(by_case) if cases > 1 else 0.0, share * (1 - share)
    effective = single * cases / spread if spread else math.inf if single and cases > 1 else float(cases)
    if spread:
        effective *= (NormalDist().inv_cdf(0.975) / student_t_quantile(cases - 1)) ** 2
    low, high = wilson_interval(share, min(max(effective, float(cases)), float(max(tries, cases))))
    return Interval(value=share, low=low, high=high)


def pass_at_k(passed: int, tries: int, k: int) -> float:
    """Returns the unbiased estimate 1 - C(tries - passed, k) / C(tries, k) of the probability that at least one of k attempts passes.

    The formula is from Chen et al. (2021).

    Raises `ValueError` unless 0 <= passed <= tries and 1 <= k <= tries.
    """
    if not (0 <= passed <= tries and 1 <= k <= tries):
        raise ValueError(f"pass@{k} of {passed} passes in {tries} attempts is not defined")
    return float(1 - Fraction(math.comb(tries - passed, k), math.comb(tries, k)))


def mean_pass_at_k(cases: Sequence[tuple[int, int]], k: int) -> float | None:
    """Returns the mean pass@k over the cases with at least `k` tries; None if there is no such case. A case is a pair (passed, tries)."""
    estimates = [pass_at_k(passed, tries, k) for passed, tries in cases if tries >= k]
    return sum(estimates) / len(estimates) if estimates else None


def attempt_counts(most: int) -> tuple[int, ...]:
    """Returns the powers of 2 below `most`, followed by `most`; empty if `most` is below 1."""
    if most < 1:
        return ()
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def pass_at_attempt_counts(tasks: Sequence[Sequence[CountedAttempt]]) -> dict[int, float]:
    """Returns a mapping k -> mean pass@k of the tasks with at least k attempts. For the values of k, see `attempt_counts`."""
    counts = [(sum(attempt.passed for attempt in attempts), len(attempts)) for attempts in tasks]
    rates = {k: mean_pass_at_k(counts, k) for k in attempt_counts(max((tries for _, tries in counts), default=0))}
    return {k: rate for k, rate in rates.items() if rate is not None}


def compute_curves(tasks: Sequence[Sequence[CountedAttempt]]) -> tuple[ComputeCurve, ...]:
    """Returns a compute curve of the tasks with at least k attempts, for each k in `attempt_counts`; empty if there are no attempts.

    Each point of a curve belongs to a token budget per attempt: 0, the budgets at which attempts pass (an evenly spaced selection if there
    are many), and the tokens of the longest attempt.
    """
    every = [attempt for attempts in tasks for attempt in attempts]
    if not every:
        return ()
    budgets = _budgets(sorted(attempt.tokens for attempt in every if attempt.passed), max(attempt.tokens for attempt in every))
    curves = []
    for k in attempt_counts(max(map(len, tasks))):
        long_enough = [attempts for attempts in tasks if len(attempts) >= k]
        curves.append(ComputeCurve(attempts=k, points=tuple(_curve_point(long_enough, budget, k) for budget in budgets)))
    return tuple(curves)


def attempt_noise(by_case: Sequence[Sequence[float]]) -> float:
    """Returns the mean over cases of the variance of the score difference between two attempts by the same policy at the same case.

    For a case with one attempt, the variance of a score is estimated from all attempts at all cases, which on average gives at least as
    large a value.

    Args:
        by_case: [N][tries] scores of the attempts at each case. Raises `ValueError` if there is no score.
    """
    scored_cases = [scores for scores in by_case if scores]
    if not scored_cases:
        raise ValueError("no attempt was scored")
    overall = statistics.pvariance([score for scores in scored_cases for score in scores])
    return 2 * statistics.fmean(statistics.variance(scores) if len(scores) > 1 else overall for scores in scored_cases)


def planned_spread(difference: float, noise: float, *, repeats: int = 1) -> float:
    """Returns the standard deviation of case differences to assume when planning a comparison before both policies have results.

    The assumption is that a few cases change completely and cause `difference`, while the other cases differ by chance. A difference that
    is spread over many cases is at least as easy to detect. Both policies try each case `repeats` times.

    Args:
        difference: within [-1, 1]. Raises `ValueError` otherwise.
        noise: see `attempt_noise`; it is 2 p (1 - p) if attempts at every case pass with the same probability p.
    """
    share = abs(difference)
    if not share <= 1:
        raise ValueError(f"the difference {difference:g} is outside [-1, 1]: scores must be within [0, 1]")
    return math.sqrt(share + (1 - share) * noise / repeats - share**2)


def cases_needed(difference: float, spread: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Returns the number of cases that a two-sided paired test needs to detect `difference` with probability `power`, up to `MAX_CASES`.

    Uses the normal approximation of Connor (1987). As a continuity correction, 1 / |difference| cases are added, because the p-values of an
    exact test change in steps.

    Args:
        spread: standard deviation of the case differences, observed or planned.

    Raises `ValueError` if `difference` is 0.
    """
    if not difference:
        raise ValueError("no number of cases can show a difference of 0")
    z, size = NormalDist().inv_cdf, abs(difference)
    flips = min(-z(alpha / 2) * math.hypot(spread / size, 1.0) + z(power) * spread / size, float(MAX_CASES))
    least = math.ceil(1 - math.log2(alpha))  # an exact test needs this many cases if all of them flip one way
    return max(least, math.ceil(min(flips**2 + 1 / size, MAX_CASES)))


def smallest_detectable(cases: int, noise: float, *, repeats: int = 1, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """Returns the smallest difference, in steps of 0.01, that a test on `cases` cases can detect; None if it cannot detect 1."""
    for hundredths in range(1, 101):
        difference = hundredths / 100
        if cases_needed(difference, planned_spread(difference, noise, repeats=repeats), alpha=alpha, power=power) <= cases:
            return difference
    return None


def _budgets(passed: Sequence[int], longest: int) -> list[int]:
    """Returns 0, the budgets `passed` at which attempts pass (if there are many, an evenly spaced selection), and `longest`."""
    if len(passed) > MAX_POINTS - 2:
        passed = [passed[index * (len(passed) - 1) // (MAX_POINTS - 3)] for index in range(MAX_POINTS - 2)]
    return sorted({0, *passed, longest})


def _curve_point(tasks: Sequence[Sequence[CountedAttempt]], budget: int, k: int) -> tuple[float, float]:
    tokens = sum(sum(min(attempt.tokens, budget) for attempt in attempts) / len(attempts) for attempts in tasks) / len(tasks)
    passed = [sum(attempt.passed and attempt.tokens <= budget for attempt in attempts) for attempts in tasks]
    solved = sum(pass_at_k(count, len(attempts), k) for count, attempts in zip(passed, tasks, strict=True)) / len(tasks)
    return k * tokens, solved


def _sampled_flips(sizes: Sequence[int], risen: int, seed: int) -> Tails:
    """Estimates the tails from random choices of signs. `risen` is the sum of the positive differences."""
    rng = random.Random(seed)
    low = high = 1  # the observed signs
    for _ in range(_FLIPS):
        signs = rng.getrandbits(len(sizes))
        flipped = sum(size for index, size in enumerate(sizes) if signs >> index & 1)
        low += flipped <= risen
        high += flipped >= risen
    return Tails(low=low / (_FLIPS + 1), high=high / (_FLIPS + 1), exact=False)


def _digit_sum(number: int, width: int) -> int:
    """Returns the sum of a number's digits in base b = 2^width, computed as the number modulo b - 1. The sum must be below b - 1."""
    return number if width == 1 else number % ((1 << width) - 1)


def _mean(sample: Any, axis: int) -> Any:
    return sample.mean(axis=axis)
