"""The simulated schedule: throughput and staleness of each order of groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from agentrl.experience import GroupOrder
from benchmarks.asynchronous import ParetoDelays, Setting, Simulation, measure

SETTING = Setting(
    agents=64, per_step=8, steps=30, max_staleness=4, oldest_first=True, alpha=1.5, longest=100.0, load=1.0
)  # 64 agents work on 8 groups of 8


def test_oldest_first_is_faster_on_heavy_tails_and_in_order_is_never_late() -> None:
    oldest, ordered = measure(SETTING, [0, 1]), measure(replace(SETTING, oldest_first=False), [0, 1])
    assert ordered.late == 0.0 and ordered.staleness_max <= 4 < oldest.staleness_max
    assert 1.0 >= oldest.throughput > 1.5 * ordered.throughput


def test_lock_step_is_the_same_in_both_orders_and_on_policy() -> None:
    lock_step = replace(SETTING, max_staleness=0)
    assert measure(lock_step, [3]) == measure(replace(lock_step, oldest_first=False), [3])
    assert measure(lock_step, [3]).staleness_max == 0


@pytest.mark.parametrize("oldest_first", [True, False])
def test_every_group_is_taken_once_and_no_step_is_faster_than_the_learner(oldest_first: bool) -> None:
    setting = replace(SETTING, oldest_first=oldest_first)
    run = Simulation(
        GroupOrder(per_step=8, oldest_first=oldest_first, depth=5), ParetoDelays(setting, seed=7), agents=setting.agents, steps=30
    )
    run.run()
    assert not run.open and Counter(entry.step for entry in run.trained.values()) == dict.fromkeys(range(30), 8)
    assert all(later - earlier >= setting.train_s - 1e-9 for earlier, later in pairwise(run.step_ends))


def test_late_scores_do_not_slow_the_steps_and_their_groups_are_trained_late() -> None:
    """A fifth of the groups waits a third of the run. A step that waited for one of them would take ten times as long."""
    at_once = measure(SETTING, [0, 1])
    run_s = SETTING.steps * SETTING.rollout_s
    late = measure(replace(SETTING, late=0.2, late_s=run_s / 3), [0, 1])
    assert late.throughput > 0.75 * at_once.throughput and late.late > at_once.late
    assert late.staleness_max >= SETTING.steps // 4
