"""Driver and learner agree on the groups of a step, whatever finishes first and whichever process dies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import GroupConfig, RolloutConfig
from agentrl.experience import SqliteStore, StepGroups
from agentrl.experience.steps import has_preference
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode
from agentrl.rollout import excluded_group


def group(index: int, *scores: float) -> Group:
    episodes = tuple(
        ScoredEpisode(episode=Episode(id=f"g{index}-{n}", task_id="t", task_key="k", trajectories=()), score=Score(value=value))
        for n, value in enumerate(scores)
    )
    return Group(index=index, task_id="t", task_key="k", episodes=episodes)


class Stored:
    """The learner's view of a store: groups by index."""

    def __init__(self) -> None:
        self.found: dict[int, Group] = {}
        self.read: list[int] = []

    def has(self, index: int) -> bool:
        return index in self.found

    def groups(self, indices: Any) -> tuple[Group, ...]:
        self.read += list(indices)
        return tuple(self.found[index] for index in indices)


def roll_out(steps: StepGroups, step: int, store: Stored, outcomes: Any, stop_after: int) -> None:
    """As `Rollouts.step` of agentrl.run.rollouts: groups end in the order that `outcomes` draws; the driver dies after some of them."""
    waiting = iter(steps.indices(step))
    running = [next(waiting) for _ in range(steps.per_step)]
    while running and stop_after:
        index = running.pop(outcomes(0, len(running) - 1))
        if not store.has(index):
            store.found[index] = group(index, 1.0, float(outcomes(0, 1)))
            stop_after -= 1
        if not steps.preference(store.found[index]) and (another := next(waiting, None)) is not None:
            running.append(another)


@settings(max_examples=60, deadline=None)
@given(per_step=st.integers(1, 5), extra=st.integers(0, 5), step=st.integers(0, 3), data=st.data())
def test_the_learner_takes_exactly_the_drivers_groups_also_after_a_crash(per_step: int, extra: int, step: int, data: st.DataObject) -> None:
    store = Stored()

    def outcomes(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    for stop_after in (outcomes(0, 4), outcomes(0, 4), 100):
        driver = StepGroups(per_step, extra)
        roll_out(driver, step, store, outcomes, stop_after)
        taken = StepGroups(per_step, extra).consumed_indices(step, cast(Any, store))
        if taken is not None:
            assert list(taken) == sorted(store.found), "all groups, and none is left over"
            break
    with_preference = sum(len({one.score.value for one in found.scored}) > 1 for found in store.found.values())
    assert taken is not None and taken.start == step * (per_step + extra)
    assert with_preference == per_step or len(taken) == per_step + extra


def test_without_extra_groups_no_group_is_read_to_complete_a_step() -> None:
    store, steps = Stored(), StepGroups(2)
    store.found = {2: group(2, 0.0, 0.0)}
    assert steps.consumed_indices(1, cast(Any, store)) is None
    store.found[3] = group(3, 1.0, 1.0)
    assert steps.consumed_indices(1, cast(Any, store)) == range(2, 4) and store.read == []


def test_a_group_without_a_preference_gets_another_and_is_read_once(tmp_path: Any) -> None:
    broken = Failure(stage="s", blame=Blame.TASK, kind="k", message="")
    store, steps = SqliteStore(tmp_path / "x.sqlite"), StepGroups(2, 3, min_group_size=2)
    store.put(group(0, 1.0, 0.0))
    store.put(excluded_group(1, "t", "k", broken, size=2))  # no attempt at all
    assert steps.consumed_indices(0, store) is None
    store.put(group(2, 1.0))  # a single attempt has no baseline
    store.put(group(3, 0.5, 0.5))
    assert steps.consumed_indices(0, store) is None
    store.put(group(4, 0.0, 0.0))  # the end of the block
    assert steps.consumed_indices(0, store) == range(5)
    store.close()
    assert steps.consumed_indices(0, cast(Any, SimpleNamespace(has=lambda index: False))) == range(5), "a group that was read is cached"


@given(per_step=st.integers(1, 6), extra=st.integers(0, 6))
def test_tasks_are_those_of_a_run_without_extra_groups_and_each_index_has_its_own(per_step: int, extra: int) -> None:
    steps = StepGroups(per_step, extra)
    indices = [index for step in range(4) for index in steps.indices(step)]
    assert indices == list(range(len(indices))) and [steps.step_of(index) for index in indices] == sorted(
        list(range(4)) * (per_step + extra)
    )
    positions = [steps.position(index) for index in indices]
    assert len(set(positions)) == len(positions)
    assert sorted(positions) == [*range(4 * per_step), *range(1 << 30, (1 << 30) + 4 * extra)], "and no position is skipped"


@pytest.mark.parametrize(
    ("scores", "smallest", "teaches"), [((1.0, 0.0), 2, True), ((1.0, 0.0), 3, False), ((1.0, 1.0), 2, False), ((), 1, False)]
)
def test_a_group_has_a_preference_if_enough_attempts_were_scored_differently(
    scores: tuple[float, ...], smallest: int, teaches: bool
) -> None:
    assert has_preference(group(0, *scores), min_group_size=smallest) is teaches


def test_a_policy_that_does_not_learn_has_one_step_without_end() -> None:
    steps = StepGroups.single_step(RolloutConfig(groups_per_step=2, extra_groups=3, group=GroupConfig(size=1)))
    assert [steps.step_of(index) for index in (0, 5, 10_000_000)] == [0, 0, 0]
    assert [steps.position(index) for index in (0, 5, 10_000_000)] == [0, 5, 10_000_000]
    assert steps.min_group_size == 1 and StepGroups(1).min_group_size == 2
    assert len(steps.indices(0)) == steps.per_step, "without extra groups"


def test_cached_preferences_are_not_in_the_repr() -> None:
    """A run's steps may have read thousands of groups."""
    steps = StepGroups(2)
    steps.set_preference(0, True)
    assert repr(steps) == "StepGroups(per_step=2, extra=0, min_group_size=2)"
