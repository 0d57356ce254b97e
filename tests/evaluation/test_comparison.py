from __future__ import annotations

import math
import random

import pytest

from agentrl.evaluation.comparison import ComparisonVerdict, Scores, compare
from agentrl.evaluation.statistics import cases_needed


def sampled_scores(rates: list[float], repeats: int, rng: random.Random) -> Scores:
    return {f"c{number:03d}": [float(rng.random() < rate) for _ in range(repeats)] for number, rate in enumerate(rates)}


def test_unscored_and_unpaired_attempts_are_excluded_and_counted() -> None:
    before: Scores = {"a": [1, 1, None], "b": [0, None], "c": [1], "only": [1], "late": [1, 1]}
    after: Scores = {"a": [0, None, 1], "b": [None, 1], "c": [1], "new": [0], "late": [1]}
    result = compare(before, after)
    assert result is not None
    assert (result.cases, result.attempts, result.unscored, result.unpaired) == (3, 3, 4, ("b", "new", "only"))
    assert (result.lost, result.gained) == (("a",), ()) and result.before == 1.0 and result.after == pytest.approx(2 / 3)
    assert result.verdict is ComparisonVerdict.NOT_ENOUGH
    assert compare({"a": [None, math.nan]}, {"a": [1, 1]}) is None


def test_the_verdict_follows_from_the_interval() -> None:
    ones, zeros = {f"{n}": [1.0] for n in range(30)}, {f"{n}": [0.0] for n in range(30)}
    mixed = {f"{n}": [float(n > 3)] for n in range(30)}
    for before, after, verdict in (
        (zeros, ones, ComparisonVerdict.BETTER),
        (ones, zeros, ComparisonVerdict.WORSE),
        (ones, mixed, ComparisonVerdict.NOT_ENOUGH),
    ):
        result = compare(before, after)
        assert result is not None and result.verdict is verdict and result.low <= result.effect <= result.high
    many = {f"{n}": [1.0] for n in range(300)}
    assert (same := compare(many, many)) is not None and same.verdict is ComparisonVerdict.SAME and same.low < 0 < same.high
    assert (few := compare(ones, ones)) is not None and few.verdict is ComparisonVerdict.NOT_ENOUGH, (
        "30 cases without a flip do not exclude a small difference"
    )
    assert (strict := compare(many, many, margin=0.0)) is not None and strict.verdict is ComparisonVerdict.NOT_ENOUGH


def test_repeats_of_a_case_are_one_cluster() -> None:
    """Eight cases whose eight repeats agree are eight observations, not 64."""
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
def test_coverage_of_the_interval_and_error_rate_of_the_verdict(cases: int, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.evaluation.statistics.RESAMPLES", 300)
    rng, covered, wrong = random.Random(11), 0, 0
    rates = [(0.9, 0.8), (0.6, 0.5), (0.95, 0.85), (0.3, 0.2)] * (cases // 4)
    for _ in range(150):
        result = compare(sampled_scores([a for a, _ in rates], repeats, rng), sampled_scores([b for _, b in rates], repeats, rng))
        assert result is not None
        covered += result.low <= -0.1 <= result.high
        wrong += result.verdict in (ComparisonVerdict.BETTER, ComparisonVerdict.SAME)
    assert covered / 150 >= 0.93 and wrong / 150 < 0.05


def test_cases_without_a_flip_still_plan_enough_cases() -> None:
    result = compare({f"c{n}": [1.0] for n in range(8)}, {f"c{n}": [1.0] for n in range(8)})
    assert result is not None and result.cases_needed(0.1) == cases_needed(0.1, math.sqrt(0.09)) > 60
    with pytest.raises(ValueError, match=r"the difference -2 is outside \[-1, 1\]"):
        result.cases_needed(-2.0)
