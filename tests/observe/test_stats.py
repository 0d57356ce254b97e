from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe import Rate
from agentrl.observe.stats import format_count, format_duration, rate_difference


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_agrees_with_scipy(case: tuple[int, int]) -> None:
    from scipy.stats import binomtest

    successes, n = case
    rate, expected = Rate.from_successes(successes, n), binomtest(successes, n).proportion_ci(method="wilson")
    assert (rate.value, rate.n) == (successes / n, n)
    assert rate.ci_low == pytest.approx(expected.low, abs=1e-9) and rate.ci_high == pytest.approx(expected.high, abs=1e-9)
    assert 0 <= rate.ci_low <= rate.value <= rate.ci_high <= 1


@given(st.integers(2, 3000), st.floats(0.01, 1), st.floats(0.01, 1))
def test_graded_intervals_agree_with_scipy(n: int, first: float, second: float) -> None:
    from scipy.stats import t

    scores = [first, second * 0.99, *[0.5] * (n - 2)]
    rate = Rate.from_scores(scores)
    expected = t(n - 1).ppf(0.975) * statistics.stdev(scores) / math.sqrt(n)
    assert rate.ci_high - rate.value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_scores_of_0_and_1_are_a_rate_of_successes() -> None:
    assert Rate.from_scores([1.0, 0.0, 1.0, 1.0]) == Rate.from_successes(3, 4)
    assert Rate.from_scores([1.0] * 8).ci_low < 0.7, "eight of eight is not certainty"


def test_graded_scores_get_a_t_interval() -> None:
    rate = Rate.from_scores([0.0, 0.5, 1.0])
    # Closed form: t(0.975, 2 degrees of freedom) = 4.302653, standard error 0.5 / sqrt(3).
    assert rate.ci_high - rate.value == pytest.approx(4.302653 * 0.5 / math.sqrt(3), abs=1e-5)
    assert Rate.from_scores([0.5]) == Rate(value=0.5, ci_low=0.5, ci_high=0.5, n=1)


@pytest.mark.parametrize("scores", [[], [0.5, math.nan], [1.0, math.inf]])
def test_a_rate_without_scores_is_an_error(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one score"):
        Rate.from_scores(scores)


def test_a_difference_has_an_interval_for_any_numbers_of_episodes() -> None:
    """Newcombe's hybrid score interval (1998, method 10, table II): 56/70 against 48/80 is [0.0524, 0.3339]."""
    low, high = rate_difference(Rate.from_successes(48, 80), Rate.from_successes(56, 70))
    assert (low, high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))
    same = Rate.from_successes(10, 10)
    low, high = rate_difference(same, same)
    assert low == -high < 0


COUNTS = {9_999: "9,999", 12_345: "12.3k", 999_499: "999k", 999_500: "1M", 999_999: "1M", 999_999_999: "1B", 2e12: "2T"}


@pytest.mark.parametrize(("value", "text"), COUNTS.items())
def test_a_count_is_rounded_to_the_next_unit(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.7, "1 min 00 s"), (119.7, "2 min 00 s"), (3599.9, "1 h 00 min")]
)
def test_a_duration_is_rounded_to_the_next_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
