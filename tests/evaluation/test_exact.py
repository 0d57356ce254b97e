from __future__ import annotations

import itertools
import operator
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluation.exact import fisher_p_value, holm_rejections, mcnemar, sign_flip_test


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (0, 5), (1, 9), (7, 7), (30, 14), (120, 160)])
def test_mcnemar_is_the_binomial_test_of_the_flips_and_what_flipping_signs_of_single_attempts_gives(lost: int, gained: int) -> None:
    from scipy.stats import binomtest

    known = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(known, rel=1e-9)
    flips = [Fraction(-1)] * lost + [Fraction(1)] * gained + [Fraction(0)] * 11
    assert sign_flip_test(flips).both == pytest.approx(known, rel=1e-9)


@pytest.mark.slow
@given(st.lists(st.fractions(-1, 1, max_denominator=4), max_size=9))
def test_flipping_signs_counts_every_choice_of_them(differences: list[Fraction]) -> None:
    sums = [sum((sign * one for sign, one in zip(signs, differences, strict=True)), Fraction())
            for signs in itertools.product((-1, 1), repeat=len(differences))]  # fmt: skip
    seen, observed = sign_flip_test(differences), sum(differences, Fraction())
    assert seen.exact
    assert seen.low == pytest.approx(sum(one <= observed for one in sums) / len(sums))
    assert seen.high == pytest.approx(sum(one >= observed for one in sums) / len(sums))


def test_scores_on_no_lattice_are_flipped_at_random_the_same_way_each_time() -> None:
    rng = random.Random(3)
    graded = [Fraction(rng.uniform(-0.2, 0.1)) for _ in range(40)]
    seen = sign_flip_test(graded)
    assert not seen.exact and seen == sign_flip_test(graded)
    rounded = sign_flip_test([one.limit_denominator(50) for one in graded])
    assert rounded.exact is (rounded == sign_flip_test([one.limit_denominator(50) for one in graded], seed=9))
    coarse = sign_flip_test([Fraction(round(one * 100), 100) for one in graded])
    assert coarse.exact and seen.low == pytest.approx(coarse.low, abs=0.01)
    assert seen == sign_flip_test(graded, seed=0) != sign_flip_test(graded, seed=1)


def test_a_distribution_is_exact_up_to_its_stated_size() -> None:
    """2^26 bits; one difference of 2^25 units takes (1 + 1) * 2^25."""
    largest = sign_flip_test([Fraction(-(2**25), 5)])
    assert (largest.low, largest.high, largest.exact) == (0.5, 1.0, True)
    for sign in (1, -1):  # of the two choices of signs, one ties with what was observed
        beyond = sign_flip_test([Fraction(sign * (2**25 + 1), 5)])
        assert not beyond.exact and max(beyond.low, beyond.high) == 1.0
        assert min(beyond.low, beyond.high) == pytest.approx(0.5, abs=0.02)


def test_random_flips_estimate_what_all_choices_of_signs_give() -> None:
    """Sizes that differ by orders of magnitude: each sign matters, and the largest one decides most."""
    rng = random.Random(4)
    for signs in ((-1, -1, 1, -1, 1, -1), (1, -1, -1, 1, -1, 1), (1, 1, -1, -1, 1, -1), (-1, 1, 1, 1, -1, -1)):
        graded = [Fraction(sign * rng.randint(10**9, 2 * 10**9), 10 ** (9 + place)) for place, sign in enumerate(signs)]
        for differences in (graded, graded[::-1]):
            sums = [sum(map(operator.mul, flips, differences)) for flips in itertools.product((-1, 1), repeat=len(differences))]
            seen, observed = sign_flip_test(differences), sum(differences)
            assert not seen.exact
            assert seen.low == pytest.approx(sum(one <= observed for one in sums) / len(sums), abs=0.02)
            assert seen.high == pytest.approx(sum(one >= observed for one in sums) / len(sums), abs=0.02)


def test_the_observed_signs_are_one_of_10000_so_that_no_estimate_is_0() -> None:
    rng = random.Random(5)
    graded = [Fraction(rng.uniform(0.1, 1.0)) for _ in range(40)]  # no random flip has all 40 signs alike
    risen, fallen = sign_flip_test(graded), sign_flip_test([-one for one in graded])
    assert (risen.low, risen.high) == (1.0, 1 / 10_000) and (fallen.low, fallen.high) == (1 / 10_000, 1.0)
    assert not risen.exact and risen.both == 2 / 10_000


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_fewer_passes_by_chance_is_fishers_test(passed: int, failed: int, before_passed: int, before_failed: int) -> None:
    from scipy.stats import fisher_exact

    known = fisher_exact([[passed, failed], [before_passed, before_failed]], alternative="less").pvalue
    assert fisher_p_value(passed, passed + failed, before_passed, before_passed + before_failed) == pytest.approx(
        known, rel=1e-6, abs=1e-12
    )


def test_holm_stops_at_the_first_that_is_not_significant() -> None:
    assert holm_rejections([0.04, 0.001, 0.02], 0.05, hypotheses=3) == (True, True, True)
    assert holm_rejections([0.02, 0.018, 0.03], 0.05, hypotheses=3) == (False, False, False), "the smallest must be below a third of alpha"
    assert holm_rejections([0.012, 0.04, 0.9, 0.001], 0.05, hypotheses=4) == (True, False, False, True)
    assert holm_rejections([0.025, 0.05], 0.05, hypotheses=2) == (True, True), "a p-value of exactly its share is significant"
    assert holm_rejections([0.012, 0.02], 0.05, hypotheses=3) == (True, True) and holm_rejections([0.012, 0.02], 0.05, hypotheses=5) == (
        False,
        False,
    )


def test_numbers_that_are_no_counts_raise() -> None:
    with pytest.raises(ValueError, match="no counts"):
        fisher_p_value(3, 2, 0, 1)
