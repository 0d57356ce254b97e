"""Tests, intervals and sample sizes, compared with scipy, exact counts and simulations."""

from __future__ import annotations

import itertools
import math
import operator
import random
import sys
from fractions import Fraction

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.evaluation.statistics import (
    anytime_interval,
    attempt_noise,
    cases_needed,
    difference_interval,
    e_value,
    fisher_p_value,
    holm_rejections,
    mean_pass_at_k,
    pass_at_k,
    planned_spread,
    rate_interval,
    sign_flip_test,
    smallest_detectable,
)


def power_of_mcnemar(cases: int, difference: float, discordance: float, *, alpha: float = 0.05) -> float:
    """Exact probability that McNemar's exact test of pairs is significant in the direction of `difference`, summed over the flips."""
    flips = np.arange(cases + 1)
    critical = scipy.stats.binom.isf(alpha / 2, flips, 0.5) + 1
    toward = (discordance + abs(difference)) / (2 * discordance)
    return float(np.sum(scipy.stats.binom.pmf(flips, cases, discordance) * scipy.stats.binom.sf(critical - 1, flips, toward)))


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (0, 5), (1, 9), (7, 7), (30, 14), (120, 160)])
def test_flipping_signs_of_single_attempts_is_the_binomial_test_of_the_flips(lost: int, gained: int) -> None:
    expected = scipy.stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    flips = [Fraction(-1)] * lost + [Fraction(1)] * gained + [Fraction(0)] * 11
    assert sign_flip_test(flips).both == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@given(st.lists(st.fractions(-1, 1, max_denominator=4), max_size=9))
def test_flipping_signs_counts_every_choice_of_signs(differences: list[Fraction]) -> None:
    sums = [sum((sign * difference for sign, difference in zip(signs, differences, strict=True)), Fraction())
            for signs in itertools.product((-1, 1), repeat=len(differences))]  # fmt: skip
    result, observed = sign_flip_test(differences), sum(differences, Fraction())
    assert result.exact
    assert result.low == pytest.approx(sum(total <= observed for total in sums) / len(sums))
    assert result.high == pytest.approx(sum(total >= observed for total in sums) / len(sums))


def test_random_flips_are_seeded() -> None:
    rng = random.Random(3)
    graded = [Fraction(rng.uniform(-0.2, 0.1)) for _ in range(40)]
    result = sign_flip_test(graded)
    assert not result.exact and result == sign_flip_test(graded)
    rounded = sign_flip_test([difference.limit_denominator(50) for difference in graded])
    assert rounded.exact is (rounded == sign_flip_test([difference.limit_denominator(50) for difference in graded], seed=9))
    coarse = sign_flip_test([Fraction(round(difference * 100), 100) for difference in graded])
    assert coarse.exact and result.low == pytest.approx(coarse.low, abs=0.01)
    assert result == sign_flip_test(graded, seed=0) != sign_flip_test(graded, seed=1)


def test_a_distribution_is_exact_up_to_its_stated_size() -> None:
    """2^26 bits; one difference of 2^25 units takes (1 + 1) * 2^25."""
    largest = sign_flip_test([Fraction(-(2**25), 5)])
    assert (largest.low, largest.high, largest.exact) == (0.5, 1.0, True)
    for sign in (1, -1):  # one of the two choices of signs equals the observed one
        beyond = sign_flip_test([Fraction(sign * (2**25 + 1), 5)])
        assert not beyond.exact and max(beyond.low, beyond.high) == 1.0
        assert min(beyond.low, beyond.high) == pytest.approx(0.5, abs=0.02)


def test_random_flips_estimate_the_exact_distribution() -> None:
    """The differences vary by orders of magnitude."""
    rng = random.Random(4)
    for signs in ((-1, -1, 1, -1, 1, -1), (1, -1, -1, 1, -1, 1), (1, 1, -1, -1, 1, -1), (-1, 1, 1, 1, -1, -1)):
        graded = [Fraction(sign * rng.randint(10**9, 2 * 10**9), 10 ** (9 + exponent)) for exponent, sign in enumerate(signs)]
        for differences in (graded, graded[::-1]):
            sums = [sum(map(operator.mul, flips, differences)) for flips in itertools.product((-1, 1), repeat=len(differences))]
            result, observed = sign_flip_test(differences), sum(differences)
            assert not result.exact
            assert result.low == pytest.approx(sum(total <= observed for total in sums) / len(sums), abs=0.02)
            assert result.high == pytest.approx(sum(total >= observed for total in sums) / len(sums), abs=0.02)


def test_the_observed_signs_count_as_a_sample_so_no_estimate_is_0() -> None:
    rng = random.Random(5)
    graded = [Fraction(rng.uniform(0.1, 1.0)) for _ in range(40)]  # no random flip has all 40 signs alike
    risen, fallen = sign_flip_test(graded), sign_flip_test([-difference for difference in graded])
    assert (risen.low, risen.high) == (1.0, 1 / 10_000) and (fallen.low, fallen.high) == (1 / 10_000, 1.0)
    assert not risen.exact and risen.both == 2 / 10_000


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_the_p_value_of_fewer_passes_is_fishers(passed: int, failed: int, before_passed: int, before_failed: int) -> None:
    expected = scipy.stats.fisher_exact([[passed, failed], [before_passed, before_failed]], alternative="less").pvalue
    assert fisher_p_value(passed, passed + failed, before_passed, before_passed + before_failed) == pytest.approx(
        expected, rel=1e-6, abs=1e-12
    )


def test_holm_stops_at_the_first_p_value_that_is_not_significant() -> None:
    assert holm_rejections([0.04, 0.001, 0.02], 0.05, hypotheses=3) == (True, True, True)
    assert holm_rejections([0.02, 0.018, 0.03], 0.05, hypotheses=3) == (False, False, False), "the smallest must be below a third of alpha"
    assert holm_rejections([0.012, 0.04, 0.9, 0.001], 0.05, hypotheses=4) == (True, False, False, True)
    assert holm_rejections([0.025, 0.05], 0.05, hypotheses=2) == (True, True), "a p-value of exactly its share is significant"
    assert holm_rejections([0.012, 0.02], 0.05, hypotheses=3) == (True, True) and holm_rejections([0.012, 0.02], 0.05, hypotheses=5) == (
        False,
        False,
    )


def test_impossible_counts_raise() -> None:
    with pytest.raises(ValueError, match="are not counts"):
        fisher_p_value(3, 2, 0, 1)


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.125, 0.0, 0.25, 0.75, 1.0]), max_size=12))
def test_the_e_value_is_the_mean_over_stakes_of_the_product_over_cases(differences: list[float]) -> None:
    """Computed in fractions, with the stakes 0.05, 0.15, ..., 0.95."""
    stakes = [Fraction(odd, 20) for odd in range(1, 20, 2)]
    expected = sum(math.prod(1 - stake * Fraction(difference) for difference in differences) for stake in stakes) / len(stakes)
    assert e_value(differences) == pytest.approx(float(expected), rel=1e-9)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), max_size=30), st.floats(-0.99, 0.99), st.floats(-0.99, 0.99))
def test_the_anytime_interval_agrees_with_the_evidence(differences: list[float], mean: float, other_mean: float) -> None:
    assert e_value(differences, null=min(mean, other_mean)) <= e_value(differences, null=max(mean, other_mean)) * (1 + 1e-9)
    interval = anytime_interval(differences, level=0.9)
    assert -1 <= interval.low <= interval.value <= interval.high <= 1
    assert (interval.high <= 0) == (e_value(differences) >= 20) and (interval.low >= 0) == (e_value([-d for d in differences]) >= 20)
    if abs(mean - interval.high) > 1e-6 and mean > interval.value:
        assert (mean > interval.high) == (e_value(differences, null=mean) >= 20)


@pytest.mark.slow
def test_the_anytime_interval_holds_at_all_numbers_of_cases_at_once() -> None:
    """300 sequences of 100 differences with mean 0.1: the interval misses the mean of at most 10% of them at any length."""
    rng, missed = random.Random(3), 0
    for _ in range(300):
        sequence = [float(rng.choices((-1, 0, 1), (0.2, 0.5, 0.3))[0]) for _ in range(100)]
        missed += any(e_value([sign * d for d in sequence[:n]], null=sign * 0.1) >= 20 for n in range(1, 101) for sign in (1, -1))
    assert missed / 300 <= 0.1


def test_differences_beyond_1_raise() -> None:
    assert e_value([-1.0]) == pytest.approx(1.5) and e_value([1.0]) == pytest.approx(0.5)
    for beyond in (math.nextafter(1, 2), math.nextafter(-1, -2), 1.05, -2.0, math.nan):
        for differences in ([beyond], [0.5, beyond, -0.5]):
            with pytest.raises(ValueError, match=r"outside \[-1, 1\]"):
                e_value(differences)


def test_the_rate_has_wilsons_interval_and_agreeing_repeats_add_nothing() -> None:
    once = rate_interval([1.0] * 9 + [0.0], 10)
    assert once.low == pytest.approx(0.596, abs=0.01) and once.high == pytest.approx(0.982, abs=0.01)
    assert rate_interval([1.0] * 9 + [0.0], 80) == once
    independent = rate_interval([0.5] * 10, 80)
    assert independent.high - independent.low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 84), rel=0.02)
    with pytest.raises(ValueError, match="at least one case"):
        difference_interval([])


@pytest.mark.parametrize("cases", [2, 3, 5, 10])
def test_the_rate_of_few_cases_with_many_repeats_is_covered(cases: int) -> None:
    """Each case has its own probability of success, drawn uniformly, so the true rate is 0.5."""
    rng, covered = random.Random(4), 0
    for _ in range(400):
        chances = [rng.random() for _ in range(cases)]
        interval = rate_interval([sum(rng.random() < chance for _ in range(16)) / 16 for chance in chances], 16 * cases)
        covered += interval.low <= 0.5 <= interval.high
    assert covered / 400 >= 0.93


@pytest.mark.parametrize("difference", [0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.7])
@pytest.mark.parametrize("more", [0.0, 0.1, 0.2])
def test_planned_cases_reach_the_power_for_large_differences(difference: float, more: float) -> None:
    """With the exact power of the exact test, whose steps the normal approximation ignores."""
    n = cases_needed(difference, math.sqrt(difference + more - difference**2))
    assert power_of_mcnemar(n, difference, difference + more) > 0.785


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("everywhere", [False, True])
def test_cases_planned_from_one_policy_reach_the_power(repeats: int, everywhere: bool) -> None:
    """A drop of 20 points from 0.9, in every case or as completely lost cases, is detected at least with the planned power."""
    plan = planned_spread(0.2, 2 * 0.9 * 0.1, repeats=repeats)
    n = cases_needed(0.2, plan)
    assert (
        smallest_detectable(n, 0.18, repeats=repeats) == pytest.approx(0.2)
        and (smallest_detectable(n // 2, 0.18, repeats=repeats) or 1.0) > 0.2
    )
    rng, detected = random.Random(5), 0

    def passed(chance: float) -> Fraction:
        return Fraction(sum(rng.random() < chance for _ in range(repeats)), repeats)

    for _ in range(200):
        after = [0.7] * n if everywhere else [0.0 if index < 0.2 / 0.9 * n else 0.9 for index in range(n)]
        tails = sign_flip_test([passed(chance) - passed(0.9) for chance in after])
        detected += tails.both <= 0.05
    assert detected / 200 >= 0.75, "the planned 80%, less sampling error over 200 evaluations"


@pytest.mark.slow
def test_noise_is_the_variance_of_attempts_at_the_same_case() -> None:
    rng = random.Random(6)
    chances = [0.2, 0.5, 1.0] * 4_000
    by_case = [[float(rng.random() < chance) for _ in range(3)] for chance in chances]
    assert attempt_noise(by_case) == pytest.approx((2 * 0.16 + 2 * 0.25) / 3, abs=0.01)
    single = attempt_noise([scores[:1] for scores in by_case])
    assert single == pytest.approx(2 * (1.7 / 3) * (1.3 / 3), abs=0.01), "single attempts give the largest possible variance"
    assert attempt_noise([[1.0], [], [1.0, 1.0]]) == 0.0
    with pytest.raises(ValueError, match="no attempt was scored"):
        attempt_noise([[], []])
    assert smallest_detectable(5, 0.0) is None, "no number of flips is significant in 5 cases"


def test_impossible_plans_raise() -> None:
    with pytest.raises(ValueError, match="difference of 0"):
        cases_needed(0.0, 0.5)
    for difference in (1.5, -1.0001, math.nan):
        with pytest.raises(ValueError, match=r"is outside \[-1, 1\]"):
            planned_spread(difference, 0.5)


@pytest.mark.slow
def test_inspecting_after_every_case_keeps_the_false_alarm_rate() -> None:
    rng, alarms, detected = random.Random(8), 0, 0
    for _ in range(200):
        worse: list[float] = []
        unchanged = [float(rng.randint(-1, 1)) for _ in range(60)]
        alarms += any(e_value(unchanged[:n]) >= 20 for n in range(1, 61))
        worse += [-1.0 if rng.random() < 0.3 else 0.0 if rng.random() < 0.9 else 1.0 for _ in range(60)]
        detected += e_value(worse) >= 20
    assert alarms / 200 <= 0.05 and detected / 200 > 0.5
    assert e_value([]) == pytest.approx(1.0) and e_value([0.0] * 9) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="within"):
        e_value([1.5])


def test_pass_at_k_is_unbiased() -> None:
    assert pass_at_k(1, 4, 1) == 0.25 and pass_at_k(1, 4, 4) == 1.0 and pass_at_k(0, 4, 2) == 0.0
    rng = random.Random(4)
    mean = sum(pass_at_k(sum(rng.random() < 0.3 for _ in range(6)), 6, 3) for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(1 - 0.7**3, abs=0.01)
    assert mean_pass_at_k([(1, 1), (0, 2), (2, 2)], 2) == 0.5 and mean_pass_at_k([(1, 1)], 2) is None
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(1, 2, 3)


def test_bootstrap_intervals_are_seeded_and_need_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [0.0] * 20 + [-1.0] * 6 + [0.5]
    interval = difference_interval(changes)
    assert interval == difference_interval(changes) != difference_interval(changes, seed=1)
    assert interval.value == pytest.approx(sum(changes) / 27) and interval.low < interval.value < interval.high < 0.1
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.stats")
    with pytest.raises(UserError, match=r"scipy[\s\S]*pip install -e \S+\[statistics\]"):
        difference_interval(changes)
    assert sign_flip_test([Fraction(-1)] * 6).low == 1 / 64, "the gate's tests need no scipy"
