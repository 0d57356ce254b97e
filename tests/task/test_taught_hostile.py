"""The tasks of a run's groups with lost or damaged outcomes and failing families."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import TaskError
from agentrl.experience import BlockStarts, DriverStore, GroupOrder, SqliteStore
from agentrl.records import Blame, Failure, Group, GroupUse, Split, Task
from agentrl.rollout import excluded_group
from agentrl.task import GroupSchedule
from agentrl.task.group_tasks import TASKS_FILE, GroupTasks
from tests.task.test_group_tasks import played, recipe_of
from tests.task.test_weighting import Kinds

BROKEN = Failure(stage="task", blame=Blame.TASK, kind="quarantined", message="no such image")


class Breaking(Kinds):
    """A family that raises `RuntimeError` for some tasks."""

    broken: frozenset[int] = frozenset()

    def task(self, split: Split, index: int) -> Task:
        if index in self.broken:
            raise RuntimeError(f"no task {index} today")
        return super().task(split, index)


def group_tasks_of(folder: Path, store: SqliteStore, family: Kinds, **rollout: Any) -> GroupTasks:
    recipe = recipe_of(max_staleness=0, **rollout)
    order = GroupOrder.from_recipe(recipe)
    return GroupTasks(recipe, folder, DriverStore(lambda: store), GroupSchedule(family, seed=3), order, BlockStarts(order))


def step(group_tasks: GroupTasks, store: SqliteStore, number: int) -> list[Group]:
    """Runs and stores the four groups of a step; a group whose task cannot be created is excluded."""
    asyncio.run(group_tasks.prepare_block(number))
    for index in range(4 * number, 4 * number + 4):
        try:
            task = group_tasks.task(index)
        except RuntimeError:
            store.put(excluded_group(index, f"task of group {index}", f"group {index}", BROKEN, size=2))
            continue
        excluded = excluded_group(index, task.id, task.key, BROKEN, size=2)
        store.put(excluded if task.kind == "hard" else played(task, index))
        group_tasks.record(task, store.groups([index])[0])
    store.commit(number, dict.fromkeys(range(4 * number, 4 * number + 4), GroupUse()), "checkpoint")
    return list(store.groups(range(4 * number, 4 * number + 4)))


def test_a_run_without_its_outcomes_continues_past_tasks_that_failed(tmp_path: Path) -> None:
    family = Breaking(12)
    family.broken = frozenset({2, 5})
    store = SqliteStore(tmp_path / "experience.sqlite")
    try:
        group_tasks = group_tasks_of(tmp_path, store, family)
        groups = [group for number in range(6) for group in step(group_tasks, store, number)]
        assert any(group.task_key.startswith("group ") for group in groups)
        asyncio.run(group_tasks.prepare_block(6))
        expected = [group_tasks.task(index).id for index in range(24, 28) if _has_task(group_tasks, index)]
        (tmp_path / TASKS_FILE).unlink()
        resumed = group_tasks_of(tmp_path, store, family)
        asyncio.run(resumed.prepare_block(6))
        assert [resumed.task(index).id for index in range(24, 28) if _has_task(resumed, index)] == expected
        family.broken = frozenset(range(12))  # the project changed in the meantime
        with pytest.raises(TaskError, match=r"cannot be created again.*no task \d+ today"):
            asyncio.run(group_tasks_of(tmp_path, store, family).prepare_block(6))
    finally:
        store.close()


def test_a_resumed_run_reads_no_group_with_a_recorded_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "experience.sqlite")
    try:
        rollout = {"groups_per_step": 3, "extra_groups": 1}
        family = Kinds(12)
        first = group_tasks_of(tmp_path, store, family, **rollout)
        for number in range(4):
            step(first, store, number)
        read_indices: list[int] = []
        groups = store.groups

        def counted(indices: Iterable[int]) -> tuple[Group, ...]:
            read_indices.extend(requested := list(indices))
            return groups(requested)

        monkeypatch.setattr(store, "groups", counted)
        asyncio.run(group_tasks_of(tmp_path, store, family, **rollout).prepare_block(4))
        assert not read_indices
    finally:
        store.close()


def _has_task(group_tasks: GroupTasks, index: int) -> bool:
    try:
        group_tasks.task(index)
    except RuntimeError:
        return False
    return True
