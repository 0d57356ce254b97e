"""Scores that are equal up to rounding are equal in every comparison of scores, as `agentrl.base.numbers` defines it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.numbers import ROUNDING, all_equal, all_negligible, exact_fraction, is_above, is_at_least, tolerance
from agentrl.config import ObjectiveConfig, build
from agentrl.evaluation.comparison import compare
from agentrl.evaluation.results import attempt_passes
from agentrl.experience import new_entry
from agentrl.failure.capture import CaptureReason, capture_reason
from agentrl.gate.rule import GateRule, apply_rule
from agentrl.objective import assemble, batch_advantages
from agentrl.objective.credit import turn_advantages
from agentrl.records import Episode, Group, Score, ScoredEpisode
from agentrl.reward.rubric import Rubric
from agentrl.supervised.select import select_demonstrations, select_preferences
from tests.judging import episode, task
from tests.objective.test_samples import _scored, _turn
from tests.rollout.test_scheduling import raced
from tests.supervised.test_select import attempt
from tests.task.test_weighting import taught

ROOT = Path(__file__).resolve().parents[2]
HALVES = (0.5, 0.4999999999999999, 0.5000000000000001, 0.5)


@given(st.floats(-1e9, 1e9), st.integers(-4, 4), st.floats(1e-7, 1e9))
def test_rounding_is_not_a_difference_and_anything_larger_is(score: float, steps: int, more: float) -> None:
    other = score
    for _ in range(abs(steps)):
        other = math.nextafter(other, math.copysign(math.inf, steps))
    assert all_equal((score, other)) and is_at_least(score, other) and is_at_least(other, score)
    assert not is_above(score, other) and not is_above(other, score)
    higher = score + more * max(1.0, abs(score))
    assert is_above(higher, score) and not is_at_least(score, higher) and not all_equal((score, higher))
    assert abs(exact_fraction(score) - Fraction(score)) <= ROUNDING * max(1.0, abs(score))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.randoms())
def test_sums_in_any_order_are_equal_and_exactly_equal_as_fractions(weights: list[int], random: Any) -> None:
    shuffled = weights[:]
    random.shuffle(shuffled)
    sums = [sum(weight * 0.001 for weight in order) for order in (weights, shuffled)]
    assert all_equal(sums) and len({exact_fraction(total) for total in sums}) == 1


def test_comparisons_of_numbers_that_are_not_finite() -> None:
    assert (
        all_equal(())
        and all_equal((math.inf,))
        and all_equal((math.inf, math.inf))
        and not all_equal((math.inf, 1.0))
        and not all_equal((math.nan, 1.0))
    )
    assert not is_above(math.nan, 0.0) and is_above(math.inf, 1.0) and is_at_least(math.inf, math.inf) and not is_at_least(-math.inf, 0.0)


def test_the_bound_of_rounding() -> None:
    """It is a billionth of the larger score, or of 1. A difference of exactly that much is still rounding."""
    assert tolerance() == tolerance(0.001) == tolerance(-1.0) == ROUNDING
    assert tolerance(1.0, -1e6) == tolerance(1e6, 1.0) == ROUNDING * 1e6
    assert tolerance(math.inf) == tolerance(-math.inf, 1.0) == 0.0
    assert all_equal((0.0, ROUNDING)) and is_at_least(0.0, ROUNDING) and not is_above(ROUNDING, 0.0)
    assert all_negligible([ROUNDING, -ROUNDING], [0.5]) and not all_negligible([0.0, 1.0], [1.0]) and not all_negligible([-1.0], [1.0])
    assert all_negligible([], []) and not all_negligible([2 * ROUNDING], [0.5]) and all_negligible([2 * ROUNDING], [0.5, 2.0])


def test_fractions_of_scores_have_nine_decimals_or_digits() -> None:
    assert exact_fraction(0.1 + 0.2) == Fraction(3, 10) and exact_fraction(1e-10) == exact_fraction(-1e-10) == 0
    assert exact_fraction(-1234567.1234567891) == Fraction("-1234567.123") and exact_fraction(1234567.1234567891) == Fraction("1234567.123")


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_group_whose_scores_differ_by_rounding_has_no_advantages(advantage: str, normalize: bool) -> None:
    objective = ObjectiveConfig(advantage=advantage, normalize_std=normalize)
    for scores in (HALVES, tuple(value + 1e3 for value in HALVES)):
        (result,) = batch_advantages([group(*scores)], objective, min_group_size=2)
        assert result.drop_reason == "all_equal", result
        others = batch_advantages([group(*scores), group(scores[0] + 1, scores[0] - 1)], objective, min_group_size=2)
        assert others[0].drop_reason == "all_equal" and not others[1].drop_reason, "the mean of the batch is close to that of the group"


@pytest.mark.parametrize("credit", ["episode", "branches", "roles", "verifier", "counterfactual"])
def test_credit_from_rounding_trains_nothing(credit: str) -> None:
    data = {"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": {"credit": credit}}
    episodes = [_scored(str(n), score, [_turn([1], [2 + n])], [_turn([1], [9 + n])]) for n, score in enumerate(HALVES)]
    scored = [
        replace(scored_episode, score=replace(scored_episode.score, branches=(0.5, other), without=(other, 0.5)))
        for scored_episode, other in zip(episodes, reversed(HALVES), strict=True)
    ]
    assembled = assemble(0, [Group(index=0, task_id="t", task_key="k", episodes=tuple(scored))], build(data))
    assert assembled.batch.samples == () and list(assembled.drop_reasons.values()) == ["all_equal"], assembled.drop_reasons


def test_turns_with_equal_rewards_have_no_advantages() -> None:
    assert turn_advantages([[HALVES], [HALVES[::-1]]], normalize_std=True) == [[[0.0] * 4], [[0.0] * 4]]


def test_every_part_agrees_that_a_group_has_no_preference() -> None:
    noise, real = group(*HALVES), group(0.5, 0.5 + 1e-6)
    assert not new_entry(noise).has_spread and new_entry(real).has_spread
    assert not taught(0, scores=HALVES).has_spread and taught(0, scores=(0.5, 0.5 + 1e-6)).has_spread
    race, started = raced([*HALVES[:2], 1.0, 1.0], size=4, first=2)
    assert started == [0, 1] and len(race.counted) == 2
    assert raced([0.5, 0.5 + 1e-6, 1.0, 1.0], size=4, first=2)[1] == [0, 1, 2, 3]


def test_preference_pairs_need_different_scores() -> None:
    attempts = (attempt("a", [4], HALVES[0]), attempt("b", [5], HALVES[1]), attempt("c", [6], HALVES[2]))
    equal = Group(index=0, task_id="t", task_key="k", episodes=attempts)  # type: ignore[arg-type]
    assert select_preferences([equal], margin=0.0) == []
    wide = Group(index=0, task_id="t", task_key="k", episodes=(attempt("a", [4], 0.7), attempt("b", [5], 0.2)))  # type: ignore[arg-type]
    assert len(select_preferences([wide], margin=0.5)) == 1, "0.7 - 0.2 is half a point, computed as 0.49999999999999994"
    solved = Group(index=0, task_id="t", task_key="k", episodes=(attempt("a", [4], 0.7 + 0.2 + 0.1),))  # type: ignore[arg-type]
    assert len(select_demonstrations([solved])) == 1, "0.7 + 0.2 + 0.1 is 1, computed as 0.9999999999999999"


@pytest.mark.slow
def test_policies_that_differ_by_rounding_are_the_same() -> None:
    before = {f"c{n}": [HALVES[0]] * 4 for n in range(40)}
    after = {f"c{n}": [HALVES[1]] * 4 for n in range(40)}
    comparison = compare(before, after)
    assert comparison is not None and (comparison.effect, comparison.p_value, comparison.lost, comparison.gained) == (0.0, 1.0, (), ())
    assert not apply_rule(GateRule(), before, after, {}).blocked and apply_rule(GateRule(), before, after, {}).p_value == 1.0
    lower = {f"c{n}": [0.4] * 4 for n in range(40)}
    assert apply_rule(GateRule(), before, lower, {}).blocked, "control: a tenth lower is worse"


@pytest.mark.slow
def test_ties_computed_in_another_order_are_exact() -> None:
    """Three cases rise and three fall by the same tenth. As floats no two sums are equal, so an exact test would not count them as ties."""
    before = {f"c{n}": [0.1 + 0.2] for n in range(6)}
    after = {f"c{n}": [0.4 if n % 2 else 0.2] for n in range(6)}
    comparison = compare(before, after)
    assert comparison is not None and comparison.exact and comparison.effect == 0.0 and comparison.p_value == 1.0


@pytest.mark.parametrize("score", [1.0, 0.7 + 0.2 + 0.1])
async def test_a_full_score_passes_every_threshold_of_1(score: float) -> None:
    async def give_score(task: Any, episode: Any) -> Score:
        return Score(value=score)

    async def give_1(task: Any, episode: Any) -> Score:
        return Score(value=1.0)

    rubric = Rubric({"right": (give_1, 1.0), "careful": (give_score, 1.0)}, required={"careful": 1.0}, caps={"careful": 0.1})
    result = await rubric(task(), episode("x"))
    assert is_at_least(result.value or 0.0, 1.0) and attempt_passes(score, 1.0)
    scored = ScoredEpisode(episode=Episode(id="e", task_id="t", task_key="k", trajectories=()), score=Score(value=score))
    assert capture_reason(scored, threshold=1.0) is None and capture_reason(scored, threshold=1.1) is CaptureReason.FAILED


def test_no_code_compares_scores_in_another_way() -> None:
    """Checks against the bounds of a verifier are allowed: they do not compare scores."""
    bounds = re.compile(r"(?:0|BOUNDS\[0\]|bounds\[0\]|self\.low) <= [a-z]+\.value <=")
    compared = re.compile(r"\{[a-z.]*score\.value for |score\.value (?:[<>]=?|==|!=) |[<>]=? [a-z.]*score\.value\b")
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "agentrl").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if compared.search(line) and not bounds.search(line)
    ]
    assert matches == []


def group(*scores: float) -> Group:
    episodes = tuple(
        ScoredEpisode(episode=Episode(id=str(n), task_id="t", task_key="k", trajectories=()), score=Score(value=value))
        for n, value in enumerate(scores)
    )
    return Group(index=0, task_id="t", task_key="k", episodes=episodes)


@pytest.mark.parametrize("scores", [(1.0, math.nan), (math.nan, 1.0), (1.0, math.nan, 1.0), (math.nan, math.nan)])
def test_nan_equals_nothing_in_any_position(scores: tuple[float, ...]) -> None:
    assert not all_equal(scores)
