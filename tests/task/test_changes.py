"""Changes to the tasks of a run: each group's task is a pure function of the seed, its index and the recorded changes."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import StoreError, UserError
from agentrl.records import Task
from agentrl.task import GroupSchedule
from agentrl.task import changes as task_changes
from agentrl.task.changes import CHANGES_FILE, STARTS_FILE, ChangeStart, TaskChange, TaskChanges, changing
from tests.run.endless import Numbered

SIZES = {"base": 7, "two": None, "three": 5}


def change(action: str, name: str, target: str = "family", weight: float = 1.0) -> TaskChange:
    return TaskChange(action=action, target=target, name=name, weight=weight, at="", family=name)


def changes_of(folder: Path) -> TaskChanges:
    base = Numbered(name="base", size=SIZES["base"])
    return TaskChanges(folder, (change("add", "base"), base), lambda added: Numbered(name=added.name, size=SIZES[added.name]))


def apply(folder: Path, changes: TaskChanges, task_change: TaskChange, first: int) -> ChangeStart:
    with changing(folder) as append:
        append(task_change)
    (logged,) = changes.pending()
    return changes.start(logged, first)


steps = st.tuples(
    st.integers(0, 40), st.sampled_from(["add", "remove", "reweight"]), st.sampled_from([*SIZES]), st.sampled_from([0.25, 1.0, 1.5, 3.0])
)


@given(requested=st.lists(steps, max_size=6))
def test_each_family_gets_its_share_and_repeats_no_task(tmp_path_factory: pytest.TempPathFactory, requested: list[tuple]) -> None:
    """Changes do not alter groups before them, and a resumed run draws the same tasks."""
    folder, first, bounds = tmp_path_factory.mktemp("r"), 0, [0]
    changes = changes_of(folder)
    for later, action, name, weight in requested:
        first += later
        before = [changes.draw(group, group)[:2] for group in range(first)]
        start = apply(folder, changes, change(action, name, weight=weight), first)
        assert [changes.draw(group, group)[:2] for group in range(first)] == before
        bounds += [] if start.rejected else [first]
    groups = first + 50
    draws = [changes.draw(group, group) for group in range(groups)]
    resumed = changes_of(folder)
    assert [(family.name, position) for family, position, _ in draws] == [
        (family.name, position) for family, position, _ in (resumed.draw(group, group) for group in range(groups))
    ]
    positions = defaultdict[str, list[int]](list)
    for family, position, _ in draws:
        positions[family.name].append(position)
    assert all(taken == list(range(len(taken))) for taken in positions.values())
    for start, end in pairwise([*bounds, groups]):
        if start < end:
            mix, counts = draws[start][2], Counter(family.name for family, _, _ in draws[start:end])
            total = sum(mix.families.values())
            assert all(abs(counts[name] - (end - start) * weight / total) < len(mix.families) for name, weight in mix.families.items())


def schedule(changes: TaskChanges) -> GroupSchedule:
    return GroupSchedule(Numbered(name="base", size=7), 3, changes=changes)


def test_without_a_change_the_schedule_is_that_of_the_family(tmp_path: Path) -> None:
    plain = GroupSchedule(Numbered(name="base", size=7), 3)
    assert [schedule(changes_of(tmp_path)).task(group) for group in range(40)] == [plain.task(group) for group in range(40)]


def test_removed_tasks_and_kinds_are_not_drawn_and_a_low_weight_makes_a_task_rarer(tmp_path: Path) -> None:
    changes = changes_of(tmp_path)
    apply(tmp_path, changes, change("remove", "odd", "kind"), 10)
    apply(tmp_path, changes, change("remove", "base-2", "task"), 10)
    apply(tmp_path, changes, change("reweight", "base-4", "task", 0.05), 10)
    tasks: list[Task] = [schedule(changes).task(group) for group in range(310)]
    counts = Counter(task.id for task in tasks[10:])
    assert {task.kind for task in tasks[:10]} == {"odd", "even"}
    assert set(counts) <= {"base-0", "base-4", "base-6"} and counts["base-4"] < counts["base-0"] / 4


@pytest.mark.parametrize(
    ("task_change", "reason"),
    [
        (change("remove", "base"), "base is the last task family of the run"),
        (change("reweight", "two"), "the run uses no task family two"),
        (change("add", "base"), "the run already has a task family base"),
    ],
)
def test_a_change_that_does_not_fit_is_rejected_and_stays_rejected(tmp_path: Path, task_change: TaskChange, reason: str) -> None:
    changes = changes_of(tmp_path)
    assert reason in apply(tmp_path, changes, task_change, 5).rejected
    for known in (changes, changes_of(tmp_path)):
        assert list(known.mix.families) == ["base"] and list(known.pending()) == []


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0, 1e9])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match=r"NaN|is not a number from 0\.001 to 1000"):
        change("reweight", "base", weight=weight)


@pytest.mark.parametrize("damage", ["changed", "lost", "moved", "rejected", "swapped", "torn"])
def test_inconsistent_files_stop_a_resumed_run(tmp_path: Path, damage: str) -> None:
    changes = changes_of(tmp_path)
    apply(tmp_path, changes, change("add", "two"), 5)
    apply(tmp_path, changes, change("add", "three"), 9)
    path = tmp_path / CHANGES_FILE
    if damage == "lost":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(path.read_bytes().replace(b'"three"', b'"thrEE"'))
    elif damage in ("moved", "rejected"):
        path, old, new = tmp_path / STARTS_FILE, *{"moved": (b":5", b":7"), "rejected": (b'""', b'"x"')}[damage]
        path.write_bytes(path.read_bytes().replace(old, new, 1))
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        starts = (tmp_path / STARTS_FILE).read_bytes().splitlines(keepends=True)
        (tmp_path / STARTS_FILE).write_bytes(starts[1] + starts[0])
    with pytest.raises(StoreError, match="do not match"):
        changes_of(tmp_path)


def test_a_change_that_starts_while_the_files_are_read_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, read = changes_of(tmp_path), task_changes.complete_lines

    def read_slowly(path: Path) -> list[bytes]:
        lines = read(path)
        with monkeypatch.context() as patch:
            patch.setattr(task_changes, "complete_lines", read)
            if "two" not in changes.mix.families:
                apply(tmp_path, changes, change("add", "two"), 5)
        return lines

    monkeypatch.setattr(task_changes, "complete_lines", read_slowly)
    assert [logged.change.name for logged in task_changes.read_changes(tmp_path)] == ["two"]


def test_many_changes_at_one_group_take_the_memory_of_one(tmp_path: Path) -> None:
    changes = changes_of(tmp_path)
    tracemalloc.start()
    for number in range(1000):
        changes._apply(change("reweight", f"base-{number}", "task", 2.0), 3)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes < 4 << 20 and len(changes.mix.tasks) == 1000
    assert schedule(changes).task(2) == schedule(changes_of(tmp_path)).task(2)


def test_a_family_that_is_added_again_continues_its_schedule_and_keeps_its_name(tmp_path: Path) -> None:
    changes = changes_of(tmp_path)
    for action, first in (("add", 2), ("remove", 8), ("add", 12)):
        assert not apply(tmp_path, changes, change(action, "two"), first).rejected
    positions = [position for family, position, _ in (changes.draw(group, group) for group in range(20)) if family.name == "two"]
    assert positions == list(range(7))
    apply(tmp_path, changes, change("remove", "two"), 20)
    other = TaskChange(action="add", target="family", name="two", at="", family="another")
    assert "already used a different task family with the name two" in apply(tmp_path, changes, other, 22).rejected
    with pytest.raises(UserError):
        changes.mix.after(change("remove", "three"))
