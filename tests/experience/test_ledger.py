"""Which groups a learner step takes, whatever finishes first and whichever process dies, and how their tokens are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import GroupConfig, RolloutConfig
from agentrl.experience import GroupOrder, new_entry
from agentrl.records import (
    Blame,
    Cancelled,
    Episode,
    Failure,
    Group,
    GroupUse,
    LedgerEntry,
    Message,
    Score,
    ScoredEpisode,
    Trajectory,
    Turn,
    VersionSpan,
    turn_key,
)
from agentrl.rollout import excluded_group
from tests.strategies import examples


def group(index: int, *scores: float | None) -> Group:
    episodes = tuple(
        ScoredEpisode(
            episode=Episode(id=f"g{index}-{n}", task_id="t", task_key="k", trajectories=()),
            score=Score(value=value, reason="" if value is not None else "lost"),
        )
        for n, value in enumerate(scores)
    )
    return Group(index=index, task_id="t", task_key="k", episodes=episodes)


class Ledger:
    """A run in small: blocks start as versions are served, groups end in any order, and steps take them."""

    def __init__(self, order: GroupOrder, draw: Any, *, steps: int, max_staleness: int) -> None:
        self.order, self.draw, self.steps, self.max_staleness = order, draw, steps, max_staleness
        self.entries: dict[int, LedgerEntry] = {}
        self.started: dict[int, int] = {}  # index -> version that served then
        self.version = 0
        self.first_block = 0

    def running(self) -> list[int]:
        """The groups that a driver would have started: as `Rollouts.block` of agentrl.run.rollouts."""
        indices = []
        for block in range(min(self.steps, self.version + self.max_staleness + 1)):
            waiting = iter(self.order.block(block))
            begun = [next(waiting) for _ in range(self.order.per_step)]
            for index in begun:  # grows
                if index in self.entries and not self.order.has_preference(self.entries[index]):
                    begun += [extra] if (extra := next(waiting, None)) is not None else []
            indices += [index for index in begun if index not in self.entries]
        for index in indices:
            self.started.setdefault(index, self.version)
        return sorted(indices)

    def end_one(self) -> None:
        running = self.running()
        index = running[self.draw(st.integers(0, len(running) - 1))]
        scores = self.draw(st.sampled_from(((0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (None, None))))
        version = None if scores == (None, None) and self.draw(st.booleans()) else self.started[index]  # None: a quarantined task
        self.entries[index] = replace(new_entry(group(index, *scores)), oldest_version=version)

    def learn(self) -> tuple[int, ...] | None:
        """The next step, as `agentrl.learner.worker` runs it."""
        in_order = [self.entries[index] for index in sorted(self.entries)]
        taken = [entry for entry in in_order if entry.step is not None]
        self.first_block = self.order.first_incomplete_block(taken, start=self.first_block)
        chosen = self.order.select(self.version, [entry for entry in in_order if self.order.block_of(entry.index) >= self.first_block])
        if chosen is not None:
            for index in chosen:
                self.entries[index] = replace(self.entries[index], step=self.version)
            self.version += 1
        return chosen


@settings(max_examples=examples(150))
@given(data=st.data(), oldest_first=st.booleans(), per_step=st.integers(1, 4), extra=st.integers(0, 3), max_staleness=st.integers(0, 3))
def test_a_run_never_gets_stuck_and_takes_every_group_once(
    data: st.DataObject, oldest_first: bool, per_step: int, extra: int, max_staleness: int
) -> None:
    order = GroupOrder(per_step=per_step, extra=extra, oldest_first=oldest_first)
    run = Ledger(order, data.draw, steps=4, max_staleness=max_staleness)
    while run.version < run.steps:
        in_flight = len(run.running()) + sum(entry.step is None for entry in run.entries.values())
        open_blocks = min(run.steps, run.version + max_staleness + 1) - run.first_block
        assert in_flight <= per_step * (max_staleness + 1) + extra * open_blocks
        ready = {index: entry.oldest_version for index, entry in run.entries.items() if entry.step is None}
        if (chosen := run.learn()) is None:
            run.end_one()  # something is always running: otherwise `draw` fails on an empty list
            continue
        left = [version for index, version in ready.items() if index not in chosen and version is not None]
        useful = [ready[index] for index in chosen if order.has_preference(run.entries[index])]
        if oldest_first:
            assert all(version is not None and version <= min(left, default=version) for version in useful), "the oldest first"
        else:
            assert {order.block_of(index) for index in chosen} == {run.version - 1}
        if max_staleness == 0:
            assert set(ready.values()) <= {run.version - 1, None}, "on-policy"
    assert not run.running() and all(entry.step is not None for entry in run.entries.values()), "no finished group is discarded"
    assert sum(order.has_preference(entry) for entry in run.entries.values()) <= per_step * run.steps


@settings(max_examples=examples(60))
@given(data=st.data(), per_step=st.integers(1, 4), extra=st.integers(0, 3))
def test_on_policy_both_orders_take_the_same_groups(data: st.DataObject, per_step: int, extra: int) -> None:
    run = Ledger(GroupOrder(per_step=per_step, extra=extra), data.draw, steps=3, max_staleness=0)
    other = GroupOrder(per_step=per_step, extra=extra, oldest_first=False)
    while run.version < run.steps:
        expected = other.select(run.version, [run.entries[index] for index in sorted(run.entries)])
        if run.learn() != expected:
            raise AssertionError(expected)
        if expected is None:
            run.end_one()


def test_a_slow_group_does_not_hold_up_the_steps_and_is_trained_as_soon_as_it_ends() -> None:
    order = GroupOrder(per_step=2)
    stored = [replace(new_entry(group(index, 0.0, 1.0)), oldest_version=version) for index, version in ((1, 0), (2, 0))]
    assert replace(order, oldest_first=False).select(0, stored) is None, "group 0 still runs"
    assert order.select(0, stored) == (1, 2)
    taken = [replace(entry, step=0) for entry in stored]
    newer = [replace(new_entry(group(index, 0.0, 1.0)), oldest_version=1) for index in (3, 4)]
    late = replace(new_entry(group(0, 0.0, 1.0)), oldest_version=0)
    assert order.select(1, [*taken, *newer]) == (3, 4)
    assert order.select(1, [late, *taken, *newer]) == (0, 3), "the oldest weights first"
    assert order.first_incomplete_block([*taken, *newer]) == 0 and order.first_incomplete_block([late, *taken, newer[0]]) == 2


@pytest.mark.parametrize("extra", [0, 1])
def test_groups_of_quarantined_tasks_do_not_make_the_others_older(extra: int) -> None:
    """They are ready as soon as their block starts, one version ahead. Half of each block are such groups."""
    order, entries = GroupOrder(per_step=4, extra=extra), dict[int, LedgerEntry]()

    def end(block: int, version: int, *, sampled: bool) -> None:
        for number, index in enumerate(order.block(block)):
            if sampled == (number % 2 == 0):
                entries[index] = (
                    replace(new_entry(group(index, 0.0, 1.0)), oldest_version=version) if sampled else new_entry(group(index, None))
                )

    end(0, 0, sampled=False)
    for step in range(6):
        end(step + 1, max(0, step), sampled=False)
        assert order.select(step, sorted(entries.values(), key=lambda entry: entry.index)) is None, "a step needs groups that were sampled"
        end(step, max(0, step - 1), sampled=True)
        chosen = order.select(step, sorted(entries.values(), key=lambda entry: entry.index))
        assert chosen is not None
        for index in chosen:
            entries[index] = replace(entries[index], step=step)
        assert {order.block_of(index) for index in chosen if entries[index].oldest_version is not None} == {step}


def test_a_step_that_was_interrupted_selects_its_groups_again() -> None:
    order = GroupOrder(per_step=1)
    first, second = (replace(new_entry(group(index, 0.0, 1.0)), oldest_version=0) for index in (0, 1))
    assert order.select(0, [replace(first, step=0), second]) == (0,)
    assert order.select(1, [replace(first, step=0), second]) == (1,)


def test_a_group_without_a_preference_gets_another() -> None:
    broken = Failure(stage="s", blame=Blame.TASK, kind="k", message="")
    for order in (GroupOrder(per_step=2, extra=3), GroupOrder(per_step=2, extra=3, oldest_first=False)):
        stored = [new_entry(group(0, 1.0, 0.0)), new_entry(excluded_group(1, "t", "k", broken, size=2))]  # no attempt of 1 counts
        assert order.select(0, stored) is None
        stored += [new_entry(group(2, 1.0)), new_entry(group(3, 0.5, 0.5))]  # a single attempt has no baseline
        assert order.select(0, stored) is None
        assert order.select(0, [*stored, new_entry(group(4, 0.0, 0.0))]) == (0, 1, 2, 3, 4), "the end of the block"


@given(per_step=st.integers(1, 6), extra=st.integers(0, 6))
def test_tasks_are_those_of_a_run_without_extra_groups_and_each_index_has_its_own(per_step: int, extra: int) -> None:
    order = GroupOrder(per_step=per_step, extra=extra)
    indices = [index for block in range(4) for index in order.block(block)]
    assert indices == list(range(len(indices)))
    assert [order.block_of(index) for index in indices] == sorted(list(range(4)) * (per_step + extra))
    positions = [order.position(index) for index in indices]
    assert len(set(positions)) == len(positions)
    assert sorted(positions) == [*range(4 * per_step), *range(1 << 30, (1 << 30) + 4 * extra)], "no position is skipped"


@pytest.mark.parametrize(
    ("scores", "smallest", "teaches"),
    [((1.0, 0.0), 2, True), ((1.0, 0.0), 3, False), ((1.0, 1.0), 2, False), ((), 1, False), ((1.0, None), 2, False)],
)
def test_a_group_has_a_preference_if_enough_attempts_were_scored_differently(
    scores: tuple[float | None, ...], smallest: int, teaches: bool
) -> None:
    assert GroupOrder(per_step=1, min_group_size=smallest).has_preference(new_entry(group(0, *scores))) is teaches


def test_a_policy_that_does_not_learn_has_one_block_without_end() -> None:
    order = GroupOrder.single_block(RolloutConfig(groups_per_step=2, extra_groups=3, group=GroupConfig(size=1)))
    assert [order.block_of(index) for index in (0, 5, 10_000_000)] == [0, 0, 0]
    assert [order.position(index) for index in (0, 5, 10_000_000)] == [0, 5, 10_000_000]
    assert order.min_group_size == 1 and len(order.block(0)) == order.per_step, "without extra groups"


def turn(tokens: int, *, version: int = 3, forced: tuple[int, ...] = ()) -> Turn:
    return Turn(
        prompt_ids=(1,),
        completion_ids=tuple(range(tokens)),
        logprobs=(-0.5,) * tokens,
        versions=(VersionSpan(version=version, start=0, end=tokens),),
        forced=forced,
        message=Message(role="assistant", content="x"),
        finish_reason="stop",
    )


@pytest.mark.parametrize("others", [(-1, -2), (0, 2**61 - 1)])
def test_turns_of_a_third_party_have_different_hashes(others: tuple[int, int]) -> None:
    """Python's hashes of these integers are equal, so that many such turns would take hours to count."""
    lines = [Trajectory(agent="main", turns=(replace(turn(1), completion_ids=(token,)),)) for token in others]
    assert hash(others[0]) == hash(others[1])
    assert len({hash(turn_key("e", 0, line, 0)) for line in lines}) == 2


def test_tokens_are_those_that_the_policy_sampled_and_a_shared_turn_counts_once() -> None:
    stem = Trajectory(agent="main", turns=(turn(5), turn(7, version=4)))
    branch = Trajectory(agent="main", turns=(stem.turns[0], turn(11, version=2, forced=(0, 1))), inherited=("stem",))
    fault = Failure(stage="s", blame=Blame.INFRASTRUCTURE, kind="k", message="")
    episodes = (
        ScoredEpisode(episode=Episode(id="stem", task_id="t", task_key="k", trajectories=(stem,)), score=Score(value=1.0)),
        ScoredEpisode(
            episode=Episode(id="branch", task_id="t", task_key="k", trajectories=(branch,), failures=(fault,)), score=Score(value=0.0)
        ),
    )
    cancelled = Cancelled(episode_id="c", reason="spare", turns=1, tokens=13)
    entry = new_entry(Group(index=4, task_id="t", task_key="k", episodes=episodes, cancelled=(cancelled,)))
    assert entry.tokens_sampled == 5 + 7 + 9 + 13
    assert (entry.attempts, entry.counted, entry.oldest_version) == (2, 1, 2)
    assert (entry.state, entry.tokens_open, entry.tokens_excluded) == ("ready", 34, 0)
    assigned = replace(entry, step=2)
    assert (assigned.state, assigned.tokens_open) == ("assigned", 34)
    trained = replace(assigned, use=GroupUse(tokens_trained=12))
    assert (trained.state, trained.tokens_open, trained.tokens_excluded) == ("trained", 0, 22)
    assert replace(assigned, use=GroupUse(reason="all_equal")).state == "excluded"
