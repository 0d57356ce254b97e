from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from agentrl.evaluation.comparison import ComparisonVerdict, Scores, compare
from agentrl.evaluation.exact import sign_flip_test
from agentrl.evaluation.intervals import difference_interval, rate_interval
from agentrl.evaluation.passes import mean_pass_at_k, pass_at_k
from agentrl.evaluation.power import (
    attempt_noise,
    cases_needed,
    pairs_for,
    planned_spread,
    power_of_pairs,
    smallest_detectable,
    spread_of_pairs,
)
from agentrl.evaluation.sequential import e_value


def tried(rates: list[float], repeats: int, rng: random.Random) -> Scores:
    return {f"c{number:03d}": [float(rng.random() < rate) for _ in range(repeats)] for number, rate in enumerate(rates)}


def test_what_is_unscored_or_only_on_one_side_is_left_out_in_pairs_and_counted() -> None:
    before: Scores = {"a": [1, 1, None], "b": [0, None], "c": [1], "only": [1], "late": [1, 1]}
    after: Scores = {"a": [0, None, 1], "b": [None, 1], "c": [1], "new": [0], "late": [1]}
    found = compare(before, after)
    assert found is not None
    assert (found.cases, found.attempts, found.unscored, found.unpaired) == (3, 3, 4, ("b", "new", "only"))
    assert (found.lost, found.gained) == (("a",), ()) and found.before == 1.0 and found.after == pytest.approx(2 / 3)
    assert found.verdict is ComparisonVerdict.NOT_ENOUGH
    assert compare({"a": [None, math.nan]}, {"a": [1, 1]}) is None


def test_the_verdicts() -> None:
    ones, noughts = {f"{n}": [1.0] for n in range(30)}, {f"{n}": [0.0] for n in range(30)}
    mixed = {f"{n}": [float(n > 3)] for n in range(30)}
    for before, after, wanted in (
        (noughts, ones, ComparisonVerdict.BETTER),
        (ones, noughts, ComparisonVerdict.WORSE),
        (ones, mixed, ComparisonVerdict.NOT_ENOUGH),
    ):
        found = compare(before, after)
        assert found is not None and found.verdict is wanted and found.low <= found.effect <= found.high
    many = {f"{n}": [1.0] for n in range(300)}
    assert (same := compare(many, many)) is not None and same.verdict is ComparisonVerdict.SAME and same.low < 0 < same.high
    assert (few := compare(ones, ones)) is not None and few.verdict is ComparisonVerdict.NOT_ENOUGH, (
        "no flip in 30 cases leaves room for some"
    )
    assert (strict := compare(many, many, margin=0.0)) is not None and strict.verdict is ComparisonVerdict.NOT_ENOUGH


def test_repeats_of_a_case_are_one_cluster() -> None:
    """Eight cases that flip as a whole, eight times each, are eight observations, not 64."""
    rng = random.Random(5)
    signs = [rng.choice((-1, 1)) for _ in range(8)]
    before = {f"{n}": [float(sign < 0)] * 8 for n, sign in enumerate(signs)}
    after = {f"{n}": [float(sign > 0)] * 8 for n, sign in enumerate(signs)}
    once = compare({name: scores[:1] for name, scores in before.items()}, {name: scores[:1] for name, scores in after.items()})
    often = compare(before, after)
    assert once is not None and often is not None
    assert (often.p_value, often.low, often.high) == (once.p_value, once.low, once.high) and often.attempts == 64


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "repeats"), [(20, 1), (40, 4)])
def test_the_interval_covers_and_the_verdict_errs_as_seldom_as_it_says(cases: int, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.evaluation.intervals.RESAMPLES", 300)
    rng, covered, wrong = random.Random(11), 0, 0
    rates = [(0.9, 0.8), (0.6, 0.5), (0.95, 0.85), (0.3, 0.2)] * (cases // 4)
    for _ in range(150):
        found = compare(tried([a for a, _ in rates], repeats, rng), tried([b for _, b in rates], repeats, rng))
        assert found is not None
        covered += found.low <= -0.1 <= found.high
        wrong += found.verdict in (ComparisonVerdict.BETTER, ComparisonVerdict.SAME)
    assert covered / 150 >= 0.93 and wrong / 150 < 0.05


def test_the_rate_has_wilsons_interval_where_cases_were_tried_once_and_repeats_that_agree_add_nothing() -> None:
    once = rate_interval([1.0] * 9 + [0.0], 10)
    assert once.low == pytest.approx(0.596, abs=0.01) and once.high == pytest.approx(0.982, abs=0.01)
    assert rate_interval([1.0] * 9 + [0.0], 80) == once
    independent = rate_interval([0.5] * 10, 80)
    assert independent.high - independent.low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 84), rel=0.02)
    with pytest.raises(ValueError, match="at least one case"):
        difference_interval([])


@pytest.mark.parametrize(("difference", "discordance"), [(0.1, 0.2), (-0.1, 0.3), (0.2, 0.2)])
def test_the_number_of_cases_told_beforehand_gives_the_power(difference: float, discordance: float) -> None:
    n = pairs_for(difference, discordance)
    assert power_of_pairs(n, difference, discordance) >= 0.8 > power_of_pairs(int(0.8 * n), difference, discordance)
    assert n == pytest.approx(cases_needed(difference, spread_of_pairs(difference, discordance)), rel=0.3, abs=8)
    rng, seen = random.Random(2), 0
    gain = (discordance + difference) / 2
    from agentrl.evaluation.exact import mcnemar

    for _ in range(500):
        draws = [rng.random() for _ in range(n)]
        gained = sum(draw < gain for draw in draws)
        lost = sum(gain <= draw < discordance for draw in draws)
        seen += mcnemar(lost, gained) <= 0.05 and (gained > lost) == (difference > 0)
    assert seen / 500 == pytest.approx(power_of_pairs(n, difference, discordance), abs=0.06)


@pytest.mark.parametrize("difference", [0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.7])
@pytest.mark.parametrize("more", [0.0, 0.1, 0.2])
def test_few_cases_see_a_large_difference_as_often_as_is_told(difference: float, more: float) -> None:
    """With the exact power of the exact test, which goes in steps that the normal approximation knows nothing of."""
    n = cases_needed(difference, spread_of_pairs(difference, difference + more))
    assert power_of_pairs(n, difference, difference + more) > 0.785


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("everywhere", [False, True])
def test_the_number_of_cases_planned_from_one_policy_gives_the_power(repeats: int, everywhere: bool) -> None:
    """A drop of 20 points from 0.9, in every case or as whole cases that are lost: seen at least as often as was told."""
    plan = planned_spread(0.2, 2 * 0.9 * 0.1, repeats=repeats)
    n = cases_needed(0.2, plan)
    assert (
        smallest_detectable(n, 0.18, repeats=repeats) == pytest.approx(0.2)
        and (smallest_detectable(n // 2, 0.18, repeats=repeats) or 1.0) > 0.2
    )
    rng, seen = random.Random(5), 0

    def passed(chance: float) -> Fraction:
        return Fraction(sum(rng.random() < chance for _ in range(repeats)), repeats)

    for _ in range(200):
        after = [0.7] * n if everywhere else [0.0 if place < 0.2 / 0.9 * n else 0.9 for place in range(n)]
        tails = sign_flip_test([passed(chance) - passed(0.9) for chance in after])
        seen += tails.both <= 0.05
    assert seen / 200 >= 0.75, "80%, but for the chance in 200 evaluations"


def test_noise_is_that_of_attempts_at_the_same_case() -> None:
    rng = random.Random(6)
    chances = [0.2, 0.5, 1.0] * 4_000
    by_case = [[float(rng.random() < chance) for _ in range(3)] for chance in chances]
    assert attempt_noise(by_case) == pytest.approx((2 * 0.16 + 2 * 0.25) / 3, abs=0.01)
    alone = attempt_noise([scores[:1] for scores in by_case])
    assert alone == pytest.approx(2 * (1.7 / 3) * (1.3 / 3), abs=0.01), "of single attempts the most that they can have"
    assert attempt_noise([[1.0], [], [1.0, 1.0]]) == 0.0
    with pytest.raises(ValueError, match="nothing was scored"):
        attempt_noise([[], []])
    assert smallest_detectable(5, 0.0) is None, "no number of flips is significant there"


def test_cases_without_a_flip_plan_nothing_too_small() -> None:
    found = compare({f"c{n}": [1.0] for n in range(8)}, {f"c{n}": [1.0] for n in range(8)})
    assert found is not None and found.cases_needed(0.1) == cases_needed(0.1, math.sqrt(0.09)) > 60


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="needs pairs that flip"):
        pairs_for(0.3, 0.1)
    with pytest.raises(ValueError, match="difference of 0"):
        cases_needed(0.0, 0.5)


@pytest.mark.slow
def test_looking_after_every_case_raises_no_more_alarms_than_promised() -> None:
    rng, alarms, caught = random.Random(8), 0, 0
    for _ in range(200):
        seen: list[float] = []
        unchanged = [float(rng.randint(-1, 1)) for _ in range(60)]
        alarms += any(e_value(unchanged[:n]) >= 20 for n in range(1, 61))
        seen += [-1.0 if rng.random() < 0.3 else 0.0 if rng.random() < 0.9 else 1.0 for _ in range(60)]
        caught += e_value(seen) >= 20
    assert alarms / 200 <= 0.05 and caught / 200 > 0.5
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
