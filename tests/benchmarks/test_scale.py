from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale import Costs, Size, simulate

SMALL = Size(
    gpus=64,
    agents=64,
    turns=2,
    episode_s=100.0,
    weights=0.0,
    link=1e9,
    relay=1.3,
    learner_share=0.25,
    max_staleness=4,
    steps=24,
    driver_cores=1,
    costs=Costs().without(),
)


def test_a_run_without_costs_takes_as_long_as_its_agents_need() -> None:
    outcome = simulate(SMALL)
    assert outcome.step_s == pytest.approx(SMALL.step_s, rel=0.1)
    assert (outcome.driver, outcome.redis, outcome.weights) == (0, 0, 0) and abs(outcome.waited) < 1e-9 and outcome.limit == "learner"


def test_an_overloaded_driver_limits_the_steps_and_more_cores_help() -> None:
    """A step has 64 turns: 128 s of one core, in place of the 50 s that its agents need."""
    busy = replace(SMALL, costs=replace(SMALL.costs, turn_s=2.0, group_s=0.0))
    per_step_s = busy.per_step * 8 * busy.turns * 2.0
    outcome = simulate(busy)
    assert per_step_s > 2 * busy.step_s
    assert outcome.step_s == pytest.approx(per_step_s, rel=0.1) and outcome.driver > 0.9 and outcome.limit == "driver"
    assert simulate(replace(busy, driver_cores=8)).step_s == pytest.approx(busy.step_s, rel=0.15)


def test_weights_that_take_longer_than_the_staleness_allows_stop_the_rollouts() -> None:
    slow = replace(SMALL, weights=10 * SMALL.step_s * 1e9)
    outcome = simulate(slow)
    assert slow.weights_s == pytest.approx(23 * SMALL.step_s)
    assert outcome.step_s > 3 * SMALL.step_s and outcome.limit == "weights"
