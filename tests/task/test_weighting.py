"""Task weighting: weights with known values, and a deterministic schedule that follows them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.base.files import json_line
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode, Split, Task, codec
from agentrl.rollout import excluded_group
from agentrl.task import GroupOutcome, GroupSchedule, TaskHistory, Weights, weighting
from agentrl.task.weighting import Tally
from tests.strategies import examples
from tests.task.test_schedule import Ten

KINDS = ("easy", "even", "hard")


def plain(split: Split, index: int) -> Task:
    return replace(Ten().task(split, index % 10), id=f"{split}-{index}")


class Kinds:
    """Tasks of three kinds in turn."""

    name = "kinds"

    def __init__(self, size: int | None = None) -> None:
        self._size = size

    def size(self, split: Split) -> int | None:
        return self._size

    def task(self, split: Split, index: int) -> Task:
        return replace(plain(split, index), data={"kind": KINDS[index % 3]})

    def gold(self, task: Task) -> str:
        return ""


def taught(index: int, *, kind: str = "easy", key: str = "", scores: Iterable[float] = (1.0, 1.0)) -> GroupOutcome:
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=())
    scored = tuple(ScoredEpisode(episode=episode, score=Score(value=score)) for score in scores)
    group = Group(index=index, task_id="t", task_key=key or f"key {index}", episodes=scored)
    return GroupOutcome.from_group(replace(plain(Split.TRAIN, index), data={"kind": kind}), group)


def weights_of(lines: Iterable[GroupOutcome], *, by_task: bool = False) -> Weights:
    record = TaskHistory(min_group_size=2, by_task=by_task)
    record.add(lines)
    return record.weights()


def of_kind(kind: str, index: int = 0) -> Task:
    return replace(plain(Split.TRAIN, index), data={"kind": kind})


def test_weight_of_a_kind_comes_from_its_newest_groups() -> None:
    lines = [taught(n, kind="easy") for n in range(100)]
    lines += [taught(n, kind="even", scores=(0.0, 1.0) if n % 2 else (0.0, 0.0)) for n in range(100)]
    lines += [taught(n, kind="hard", scores=(0.0,)) for n in range(20)]  # one attempt: the others were lost to a fault
    weights = weights_of(lines)
    assert weights.kinds == {"easy": Tally(64, 0, 0.0), "even": Tally(64, 32, 48.0)}
    assert weights.weight_of(of_kind("even")) == 1.0
    assert weights.weight_of(of_kind("easy")) == 0.1
    assert weights.weight_of(of_kind("hard")) == 1.0, "nothing is known of this kind"
    lines += [taught(n, kind="hard", scores=(0.0, 0.0)) for n in range(7)] + [taught(7, kind="hard", scores=(0.0, 1.0, 0.0, 0.0))]
    assert weights_of(lines).weight_of(of_kind("hard")) == pytest.approx((2 / 9 * 8.75 / 9) / (33 / 65 * 49 / 65))
    assert weights_of([taught(0), taught(1, kind="even")]).weight_of(of_kind("even")) == 1.0, "without headroom all weights are equal"


def test_scores_outside_0_to_1_are_clipped() -> None:
    low, high = taught(0, scores=(-5.0, -1.0)), taught(0, scores=(3.0, 7.0))
    assert (low.mean, low.headroom, high.headroom) == (-3.0, 1.0, 0.0)


def test_weight_of_a_task_comes_from_its_groups_and_its_kind() -> None:
    task, other = of_kind("easy", 1), of_kind("easy", 2)
    lines = [taught(n, key=task.key, scores=(0.0, 0.0)) for n in range(2)] + [taught(n, scores=(0.0, 1.0)) for n in (2, 3)]
    weights = weights_of(lines, by_task=True)
    kind = (3 / 5, 4 / 5)
    assert weights.weight_of(task) == pytest.approx((4 * kind[0] + 0) / 6 * (4 * kind[1] + 2) / 6 / (kind[0] * kind[1]))
    assert weights.weight_of(other) == 1.0, "an unused task has the weight of its kind"
    assert not weights_of(lines).tasks, "the tasks of an endless family do not repeat"


group_scores = st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)])


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.sampled_from(["easy", "even"]), st.integers(0, 3), group_scores), max_size=40))
def test_a_task_weight_lies_between_those_of_its_kind_and_of_its_own_groups(groups: list[tuple[str, int, tuple[float, float]]]) -> None:
    """A group with equal scores also lowers the weight of its task, relative to one with different scores and the same mean."""
    lines = [taught(n, kind=kind, key=of_kind(kind, task).key, scores=scores) for n, (kind, task, scores) in enumerate(groups)]
    weights = weights_of(lines, by_task=True)
    for kind, task in {(kind, task) for kind, task, _ in groups}:
        tally, prior = weights.tasks[of_kind(kind, task).key], weighting._kind_rates(weights.kinds[kind])
        for estimate, known, own in zip(tally.rates(prior, 4.0), prior, tally[1:], strict=True):
            assert min(known, own / tally.groups) - 1e-12 <= estimate <= max(known, own / tally.groups) + 1e-12
        assert 0.1 <= weights.weight_of(of_kind(kind, task)) <= 1.0
    wasted, informative = (taught(99, key=of_kind("easy").key, scores=scores) for scores in ((0.5, 0.5), (0.0, 1.0)))
    later = [weights_of([*lines, taught(98, kind="best", scores=(0.0, 0.1)), line], by_task=True) for line in (wasted, informative)]
    assert later[0].weight_of(of_kind("easy")) <= later[1].weight_of(of_kind("easy"))


def test_a_kind_that_is_never_solved_lowers_the_weight_of_its_unused_tasks() -> None:
    """With a separate estimate for each task, every impossible task would have to fail several times first."""
    lines = [taught(n, kind="hard", key=of_kind("hard", n).key, scores=(0.0, 0.0)) for n in range(20)]
    weights = weights_of([*lines, *(taught(n, scores=(0.0, 1.0)) for n in range(20, 40))], by_task=True)
    assert weights.weight_of(of_kind("hard", 9)) < 0.2 and weights.weight_of(replace(of_kind("hard"), id="unused")) == 0.1


@pytest.mark.parametrize("kinds", [2, 3])
def test_the_substitutes_of_neighbouring_groups_differ(kinds: int) -> None:
    """If one task in two or in three is accepted, 24 groups have at least as many different tasks as independent draws would give."""
    family = Kinds(72)
    accepted = [family.task(Split.TRAIN, index) for index in range(0, 72, kinds)]
    tallies = {task.key: Tally(10**9, 10**9, 1e9) for task in accepted}
    weights = Weights(tallies, {kind: Tally(10**9, 10**8, 1e9) for kind in KINDS} | {"best": Tally(10**9, 10**9, 1e9)})
    schedule, numbers = GroupSchedule(family, seed=2), []
    for first in range(0, 72 * 24, 24):
        tasks = [schedule.task(group, weights).id for group in range(first, first + 24)]
        numbers.append(len(set(tasks)))
    independent = sum(1 - (1 - 1 / len(accepted)) ** 24 for _ in accepted)
    assert sum(numbers) / len(numbers) > independent - 0.5, numbers


@pytest.mark.parametrize("size", [None, 300])
def test_schedule_follows_the_weights_deterministically(size: int | None) -> None:
    low, high = Tally(1000, 99, 1000.0), Tally(1000, 1000, 1000.0)
    weights = Weights({}, {"easy": low, "even": high, "hard": low})
    schedule = GroupSchedule(Kinds(size), seed=5)
    tasks = [schedule.task(n, weights) for n in range(300)]
    assert tasks == [GroupSchedule(Kinds(size), seed=5).task(n, weights) for n in reversed(range(300))][::-1]
    times = Counter(task.kind for task in tasks)
    assert 0.75 < times["even"] / 300 < 0.92, times  # it has 10 of 12 shares
    assert times["easy"] and times["hard"]
    assert [schedule.task(n, Weights({}, {})) for n in range(9)] == [schedule.task(n) for n in range(9)]


def test_first_allowed_task_is_used_if_all_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighting, "MIN_WEIGHT", 0.0)
    schedule = GroupSchedule(Kinds(3), seed=0)
    never = Weights({schedule.task(n).key: Tally(10**300, 0, 0.0) for n in range(3)}, {"easy": Tally(1, 1, 1.0)})
    assert [schedule.task(n, never) for n in range(6)] == [schedule.task(n) for n in range(6)]


def test_only_valid_lines_are_parsed() -> None:
    line = taught(3, scores=(0.0, 0.25))
    assert line.has_spread and GroupOutcome.from_line(json_line(codec.to_data(line))) == line
    valid = codec.to_data(line)
    wrong: Any
    for wrong in (
        [],
        None,
        {},
        {**valid, "more": 1},
        {**valid, "kind": 3},
        {**valid, "group": "3"},
        {**valid, "counted": True},
        {**valid, "broken": 0},
    ):
        assert GroupOutcome.from_line(json_line(wrong)) is None, wrong
    for key in valid:
        assert GroupOutcome.from_line(json_line({**valid, key: None})) is None
    assert all(GroupOutcome.from_line(line) is None for line in (b"", b"\xff", b"[" * 100_000, b"{"))
    assert all(GroupOutcome.from_line(json_line({**valid, "lowest": number})) is None for number in (math.nan, 10**400))


def test_any_name_of_a_kind_is_accepted() -> None:
    assert len(taught(0, kind="x" * 10_000).kind) == 200
    assert weights_of([taught(n, kind="x" * 10_000) for n in range(3)]).weight_of(of_kind("x" * 10_000)) == 1.0


def test_broken_task_has_no_headroom_and_faulted_groups_do_not_count() -> None:
    task = of_kind("hard")
    broken = Failure(stage="task", blame=Blame.TASK, kind="quarantined", message="no such image")
    lost = replace(broken, blame=Blame.INFRASTRUCTURE)
    for failure, weight in ((broken, 1 / 3 * 1 / 3 / (3 / 4)), (lost, 1.0)):
        groups = [excluded_group(n, task.id, task.key, failure, size=4) for n in range(2)]
        lines = [GroupOutcome.from_group(task, group) for group in groups]
        assert weights_of([*lines, taught(9, scores=(0.0, 1.0))]).weight_of(task) == pytest.approx(weight)
        assert [GroupOutcome.from_line(json_line(codec.to_data(line))) for line in lines] == lines


def test_broken_task_fails_only_its_own_groups() -> None:
    class Torn(Kinds):
        def task(self, split: Split, index: int) -> Task:
            if index % 3 == 2:
                raise RuntimeError(f"no task {index}")
            return super().task(split, index)

    schedule, weights = GroupSchedule(Torn(30), seed=1), Weights({}, {"easy": Tally(99, 9, 99.0), "even": Tally(1, 1, 1.0)})
    raised = 0
    for n in range(300):
        try:
            schedule.task(n, weights)
        except RuntimeError:
            raised += 1
    assert raised == 100


@settings(max_examples=examples(20))
@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(0, 64), st.integers(0, 9))
def test_no_task_is_starved_and_every_choice_repeats(differed: list[int], best: int, seed: int) -> None:
    """For any weights, each task is used at least with `MIN_WEIGHT` in every epoch. Never in 150 epochs has a chance of 1e-7."""
    family = Kinds(len(differed))
    tasks = [family.task(Split.TRAIN, index) for index in range(len(differed))]
    tallies = {task.key: Tally(8, number, 8.0) for task, number in zip(tasks, differed, strict=True)}
    weights = Weights(tallies, {"easy": Tally(64, best, 64.0)})
    chosen = [GroupSchedule(family, seed=seed).task(n, weights).id for n in range(2 * len(differed))]
    assert chosen == [GroupSchedule(family, seed=seed).task(n, weights).id for n in range(2 * len(differed))]
    schedule, unused = GroupSchedule(family, seed=seed), {task.id for task in tasks}
    for n in range(150 * len(differed)):
        if not unused:
            break
        unused.discard(schedule.task(n, weights).id)
    assert not unused
