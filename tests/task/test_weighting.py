"""Task weighting: known weights, and a deterministic schedule that follows them."""

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


def recorded(lines: Iterable[GroupOutcome], *, by_task: bool = False) -> Weights:
    record = TaskHistory(min_group_size=2, by_task=by_task)
    record.add(lines)
    return record.weights()


def of_kind(kind: str, index: int = 0) -> Task:
    return replace(plain(Split.TRAIN, index), data={"kind": kind})


def test_weight_of_a_kind_comes_from_its_newest_groups() -> None:
    lines = [taught(n, kind="easy") for n in range(20)]
    lines += [taught(n, kind="even", scores=(0.0, 1.0) if n % 2 else (0.0, 0.0)) for n in range(20)]
    lines += [taught(n, kind="hard", scores=(0.0,)) for n in range(20)]  # one attempt: what a fault left of the group
    weights = recorded(lines)
    assert weights.kinds == {"easy": 0.0, "even": pytest.approx(5 / 9 * 0.75)}
    assert weights.weight_of(of_kind("even")) == 1.0
    assert weights.weight_of(of_kind("easy")) == 0.1
    assert weights.weight_of(of_kind("hard")) == 1.0, "nothing is known of it"
    lines += [taught(n, kind="hard", scores=(0.0, 0.0)) for n in range(7)] + [taught(7, kind="hard", scores=(0.0, 1.0, 0.0, 0.0))]
    assert recorded(lines).weight_of(of_kind("hard")) == pytest.approx((2 / 9 * 7.75 / 8) / (5 / 9 * 0.75))
    assert recorded([taught(0), taught(1, kind="even")]).weight_of(of_kind("even")) == 1.0, "where nothing is left to learn, all are alike"


def test_scores_outside_0_to_1_are_clipped() -> None:
    low, high = taught(0, scores=(-5.0, -1.0)), taught(0, scores=(3.0, 7.0))
    assert (low.mean, low.headroom, high.headroom) == (-3.0, 1.0, 0.0)


def test_weight_of_a_used_task_comes_from_its_groups() -> None:
    task, other = of_kind("easy", 1), of_kind("easy", 2)
    lines = [taught(n, key=task.key, scores=(0.0, 0.0)) for n in range(2)] + [taught(n, scores=(0.0, 1.0)) for n in (2, 3)]
    weights = recorded(lines, by_task=True)
    assert weights.kinds == {"easy": 3 / 5 * 3 / 4}
    assert weights.weight_of(task) == pytest.approx((1 / 3) / (3 / 5 * 3 / 4)) and weights.weight_of(other) == 1.0
    assert not recorded(lines).tasks, "the tasks of an endless family do not come again"


@pytest.mark.parametrize("size", [None, 300])
def test_schedule_follows_the_weights_deterministically(size: int | None) -> None:
    weights = Weights({}, {"easy": 0.1, "even": 1.0, "hard": 0.1})
    schedule = GroupSchedule(Kinds(size), seed=5)
    given = [schedule.task(n, weights) for n in range(300)]
    assert given == [GroupSchedule(Kinds(size), seed=5).task(n, weights) for n in reversed(range(300))][::-1]
    times = Counter(task.kind for task in given)
    assert 0.75 < times["even"] / 300 < 0.92, times  # 10 of 12 shares are its own
    assert times["easy"] and times["hard"]
    assert [schedule.task(n, Weights({}, {})) for n in range(9)] == [schedule.task(n) for n in range(9)]


def test_first_allowed_task_is_used_if_all_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighting, "MIN_WEIGHT", 0.0)
    schedule = GroupSchedule(Kinds(3), seed=0)
    never = Weights({schedule.task(n).key: 0.0 for n in range(3)}, {"easy": 1.0})
    assert [schedule.task(n, never) for n in range(6)] == [schedule.task(n) for n in range(6)]


def test_only_valid_lines_are_parsed() -> None:
    line = taught(3, scores=(0.0, 0.25))
    assert line.has_spread and GroupOutcome.from_line(json_line(codec.to_data(line))) == line
    whole = codec.to_data(line)
    wrong: Any
    for wrong in (
        [],
        None,
        {},
        {**whole, "more": 1},
        {**whole, "kind": 3},
        {**whole, "group": "3"},
        {**whole, "counted": True},
        {**whole, "broken": 0},
    ):
        assert GroupOutcome.from_line(json_line(wrong)) is None, wrong
    for key in whole:
        assert GroupOutcome.from_line(json_line({**whole, key: None})) is None
    assert all(GroupOutcome.from_line(line) is None for line in (b"", b"\xff", b"[" * 100_000, b"{"))
    assert all(GroupOutcome.from_line(json_line({**whole, "lowest": number})) is None for number in (math.nan, 10**400))


def test_any_name_of_a_kind_is_accepted() -> None:
    assert len(taught(0, kind="x" * 10_000).kind) == 200
    assert recorded([taught(n, kind="x" * 10_000) for n in range(3)]).weight_of(of_kind("x" * 10_000)) == 1.0


def test_broken_task_has_no_headroom_and_faulted_groups_do_not_count() -> None:
    task = of_kind("hard")
    broken = Failure(stage="task", blame=Blame.TASK, kind="quarantined", message="no such image")
    lost = replace(broken, blame=Blame.INFRASTRUCTURE)
    for failure, weight in ((broken, 0.1), (lost, 1.0)):
        groups = [excluded_group(n, task.id, task.key, failure, size=4) for n in range(2)]
        lines = [GroupOutcome.from_group(task, group) for group in groups]
        assert recorded([*lines, taught(9, scores=(0.0, 1.0))]).weight_of(task) == pytest.approx(weight)
        assert [GroupOutcome.from_line(json_line(codec.to_data(line))) for line in lines] == lines


def test_broken_task_fails_only_its_own_groups() -> None:
    class Torn(Kinds):
        def task(self, split: Split, index: int) -> Task:
            if index % 3 == 2:
                raise RuntimeError(f"no task {index}")
            return super().task(split, index)

    schedule, weights = GroupSchedule(Torn(30), seed=1), Weights({}, {"easy": 0.1, "even": 1.0})
    raised = 0
    for n in range(300):
        try:
            schedule.task(n, weights)
        except RuntimeError:
            raised += 1
    assert raised == 100


@settings(max_examples=examples(20))
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 1), st.integers(0, 9))
def test_no_task_is_starved_and_every_choice_repeats(values: list[float], best: float, seed: int) -> None:
    """Whatever the weights, each task is used, at least with `MIN_WEIGHT` in every epoch: never in 150 epochs has a chance of 1e-7."""
    family = Kinds(len(values))
    tasks = [family.task(Split.TRAIN, index) for index in range(len(values))]
    weights = Weights({task.key: value for task, value in zip(tasks, values, strict=True)}, {"easy": best})
    chosen = [GroupSchedule(family, seed=seed).task(n, weights).id for n in range(2 * len(values))]
    assert chosen == [GroupSchedule(family, seed=seed).task(n, weights).id for n in range(2 * len(values))]
    schedule, unused = GroupSchedule(family, seed=seed), {task.id for task in tasks}
    for n in range(150 * len(values)):
        if not unused:
            break
        unused.discard(schedule.task(n, weights).id)
    assert not unused
