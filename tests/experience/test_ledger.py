"""The groups that a learner step takes, for any order of completion and any process that dies, and the counts of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import GroupConfig, RolloutConfig
from agentrl.experience import BlockStarts, GroupOrder, blocks, new_entry
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
    """A model of a run: groups start when admitted, end in any order, may be parked, and are taken by steps."""

    def __init__(self, order: GroupOrder, draw: Any, *, steps: int) -> None:
        self.order, self.draw, self.steps = order, draw, steps
        self.entries: dict[int, LedgerEntry] = {}
        self.started: dict[int, int] = {}  # index -> version that served at its start
        self.blocks: dict[int, int] = {}
        self.read: dict[int, int] = {}  # block -> version whose notes its groups read
        self.version = 0
        self.first_block = 0
        self.resume()

    def resume(self) -> None:
        """Starts a driver: running groups are lost, as in `agentrl.run.loop._roll_out`."""
        self.starts = BlockStarts(self.order, self.blocks)
        self.slot = self.order.per_step * self.order.first_incomplete_block(self.entries.values())
        self.running: list[int] = []
        self.extra: dict[int, Iterator[int]] = {}  # by block
        self.start_groups()

    def start_groups(self) -> None:
        while self.slot < self.steps * self.order.per_step + self.parked and self.starts.admit(
            self.slot, version=self.version, parked=self.parked
        ):
            self.blocks |= dict(self.starts.take_unsaved())
            block, position = divmod(self.slot, self.order.per_step)
            if block not in self.extra:
                self.extra[block] = iter(self.order.block(block)[self.order.per_step :])
                version = self.read.setdefault(block, self.starts.version_of(block))
                assert self.read.get(block - 1, 0) <= version == self.starts.version_of(block) <= self.version, "also after a restart"
            self.start(self.order.block(block)[position])
            self.slot += 1

    def start(self, index: int) -> None:
        if index in self.entries:
            self.replace(index)
        else:
            self.running.append(index)
            self.started[index] = self.version

    def replace(self, index: int) -> None:
        extra = self.extra[self.order.block_of(index)]
        if self.order.is_replaceable(self.entries[index]) and (another := next(extra, None)) is not None:
            self.start(another)

    @property
    def parked(self) -> int:
        return sum(1 for entry in self.entries.values() if entry.pending)

    @property
    def open(self) -> list[LedgerEntry]:
        return [entry for entry in self.entries.values() if entry.step is None and not entry.pending]

    def end_one(self) -> None:
        index = self.running.pop(self.draw(st.integers(0, len(self.running) - 1)))
        scores = self.draw(st.sampled_from(((0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (None, None))))
        late = self.order.accepts_late and self.parked < 9 * self.order.per_step and self.draw(st.integers(0, 2)) == 2
        version = None if not late and scores == (None, None) and self.draw(st.booleans()) else self.started[index]  # a quarantined task
        entry = replace(new_entry(group(index, *((None, None) if late else scores))), oldest_version=version)
        self.entries[index] = replace(entry, late_parts=1, pending=1) if late else entry
        self.replace(index)

    def score_one(self) -> None:
        """Lets the late scores of a group arrive or expire."""
        index = self.draw(st.sampled_from([index for index, entry in self.entries.items() if entry.pending]))
        scores = self.draw(st.sampled_from(((0.0, 1.0), (1.0, 1.0), (None, None))))
        version = self.entries[index].oldest_version
        self.entries[index] = replace(new_entry(group(index, *scores)), oldest_version=version, late_parts=1)

    def learn(self) -> tuple[int, ...] | None:
        """Runs the next step like `agentrl.learner.worker`."""
        in_order = [self.entries[index] for index in sorted(self.entries)]
        first = self.order.block(self.first_block).start
        readable = [entry for entry in in_order if entry.index >= first or (entry.late_parts and entry.step is None)]
        self.first_block = self.order.first_open_block(readable, before=self.version, start=self.first_block)
        chosen = self.order.select(self.version, readable)
        if chosen is not None:
            for index in chosen:
                assert self.entries[index].step is None and not self.entries[index].pending
                self.entries[index] = replace(self.entries[index], step=self.version)
            self.version += 1
        return chosen

    def check_bound(self) -> None:
        """Checks that the depth bounds the groups in flight, except those whose late scores have arrived in the meantime."""
        order, returned = self.order, sum(1 for entry in self.open if entry.late_parts)
        blocks = len({order.block_of(index) for index in [*self.running, *(entry.index for entry in self.open)]})
        assert len(self.running) + len(self.open) - returned <= order.per_step * order.depth + order.extra * blocks


ORDERS = st.builds(
    lambda per_step, extra, oldest_first, depth, on_policy: GroupOrder(
        per_step=per_step,
        extra=extra,
        oldest_first=oldest_first,
        depth=1 if on_policy else depth,
        accepts_late=oldest_first and not on_policy,
    ),
    per_step=st.integers(1, 4),
    extra=st.integers(0, 3),
    oldest_first=st.sampled_from([True, True, False]),
    depth=st.integers(1, 4),
    on_policy=st.sampled_from([False, False, True]),
)


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(data=st.data(), order=ORDERS)
def test_a_run_never_gets_stuck_and_takes_every_group_once(data: st.DataObject, order: GroupOrder) -> None:
    """Late scores arrive at any time or not during the run, and no step waits for them. The driver may die at any time."""
    run, per_step = Ledger(order, data.draw, steps=4), order.per_step
    while run.version < run.steps:
        run.check_bound()
        ready = {entry.index: entry.oldest_version for entry in run.open}
        if (chosen := run.learn()) is None:
            events = [
                run.end_one,
                run.end_one,
                *([run.score_one] if run.parked else []),
                *([run.resume] if data.draw(st.booleans()) else []),
            ]
            if run.running:
                data.draw(st.sampled_from(events))()
            else:
                assert run.parked >= blocks.MAX_PARKED_BLOCKS * per_step, "a step waits for late scores only if very many are parked"
                run.score_one()
            run.start_groups()
            continue
        remaining = [version for index, version in ready.items() if index not in chosen and version is not None]
        useful = [ready[index] for index in chosen if not order.is_replaceable(run.entries[index]) and ready[index] is not None]
        if order.oldest_first:
            assert all(version <= min(remaining, default=version) for version in useful if version is not None), "the oldest first"
        else:
            assert {order.block_of(index) for index in chosen} == {run.version - 1}
        if not order.accepts_late and order.depth == 1:
            assert set(ready.values()) <= {run.version - 1, None}, "on-policy"
        run.start_groups()
    if not any(entry.late_parts for entry in run.entries.values()):
        assert not run.running and not run.open, "no finished group is discarded"
        assert sum(order.has_preference(entry) for entry in run.entries.values()) <= per_step * run.steps
    while run.parked:
        run.score_one()
    run.steps += 2 + len(run.open) // per_step  # the run is resumed with more steps
    run.resume()
    while any(entry.late_parts and entry.step is None for entry in run.entries.values()):
        assert run.version < run.steps, "every late group is trained once its scores have arrived"
        if run.learn() is None:
            run.end_one()
        while run.parked:
            run.score_one()
        run.start_groups()


def test_groups_whose_scores_never_arrive_do_not_sample_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_PARKED_BLOCKS", 2)
    order = GroupOrder(per_step=3, depth=2)
    starts, slot = BlockStarts(order), 0
    while starts.admit(slot, version=0, parked=slot):  # each group is parked at once
        slot += 1
    assert slot == order.per_step * (order.depth + 2)
    assert starts.admit(slot, version=1, parked=slot), "a step made room"


@settings(max_examples=examples(60))
@given(data=st.data(), per_step=st.integers(1, 4), extra=st.integers(0, 3))
def test_on_policy_both_orders_take_the_same_groups(data: st.DataObject, per_step: int, extra: int) -> None:
    run = Ledger(GroupOrder(per_step=per_step, extra=extra, depth=1, accepts_late=False), data.draw, steps=3)
    other = GroupOrder(per_step=per_step, extra=extra, oldest_first=False)
    while run.version < run.steps:
        expected = other.select(run.version, [run.entries[index] for index in sorted(run.entries)])
        if run.learn() != expected:
            raise AssertionError(expected)
        if expected is None:
            run.end_one()
        run.start_groups()


def test_a_slow_group_delays_no_step_and_is_trained_as_soon_as_it_ends() -> None:
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
        assert order.select(step, sorted(entries.values(), key=lambda entry: entry.index)) is None, "a step needs sampled groups"
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


def test_a_group_without_a_preference_is_replaced() -> None:
    broken = Failure(stage="s", blame=Blame.TASK, kind="k", message="")
    for order in (GroupOrder(per_step=2, extra=3), GroupOrder(per_step=2, extra=3, oldest_first=False)):
        stored = [new_entry(group(0, 1.0, 0.0)), new_entry(excluded_group(1, "t", "k", broken, size=2))]  # no attempt of 1 counts
        assert order.select(0, stored) is None
        stored += [new_entry(group(2, 1.0)), new_entry(group(3, 0.5, 0.5))]  # a single attempt has no baseline
        assert order.select(0, stored) is None
        assert order.select(0, [*stored, new_entry(group(4, 0.0, 0.0))]) == (0, 1, 2, 3, 4), "the end of the block"


@given(per_step=st.integers(1, 6), extra=st.integers(0, 6))
def test_tasks_are_those_of_a_run_without_extra_groups_and_differ_for_each_index(per_step: int, extra: int) -> None:
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


def test_a_policy_that_does_not_learn_has_one_endless_block() -> None:
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
    """Python's hashes of these integers are equal, so counting many such turns would take hours."""
    trajectories = [Trajectory(agent="main", turns=(replace(turn(1), completion_ids=(token,)),)) for token in others]
    assert hash(others[0]) == hash(others[1])
    assert len({hash(turn_key("e", 0, trajectory, 0)) for trajectory in trajectories}) == 2


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


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["ready", "assigned", "trained", "excluded"])), max_size=20), st.integers(1, 4)
)
def test_a_step_replays_only_groups_of_the_step_before_and_at_most_as_many_as_are_new(groups: list[tuple[int, str]], per_step: int) -> None:
    """Each group is replayed at most once, by the step after its own, and a group without a preference never. Residuals displace no
    sampled group."""
    uses = {"trained": GroupUse(tokens_trained=3), "excluded": GroupUse(reason="all_equal")}
    entries = [
        replace(new_entry(group(index, 0.0, 1.0)), step=None if state == "ready" else step, use=uses.get(state))
        for index, (step, state) in enumerate(groups, start=-4)
    ]
    for step in range(4):
        before = [entry for entry in entries if entry.step == step]
        replayed = GroupOrder(per_step=per_step, replay=True).replayed(before)
        trained = [entry.index for entry in before if entry.use == uses["trained"]]
        assert list(replayed) == [index for index in trained if index < 0] + [index for index in trained if index >= 0][:per_step]
        assert GroupOrder(per_step=per_step).replayed(before) == ()
