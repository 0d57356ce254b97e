"""A group index always has the same task, even if the run died repeatedly or `tasks.jsonl` is damaged."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.files import read_json_lines
from agentrl.config import Recipe, build
from agentrl.errors import StoreError
from agentrl.experience import BlockStarts, DriverStore, GroupOrder, SqliteStore, new_entry
from agentrl.records import Episode, Group, Score, ScoredEpisode, Split, Task
from agentrl.task import GroupSchedule
from agentrl.task.group_tasks import TASKS_FILE, GroupTasks
from tests.ledgers import take_step
from tests.task.test_weighting import Kinds

STEPS = 12


class Practised:
    """A practice source that provides every fifth group."""

    def task_of_group(self, group_index: int) -> Task | None:
        return replace(Kinds().task(Split.TRAIN, 0), id="practice") if group_index % 5 == 4 else None

    def practice_groups_before(self, group_index: int) -> int:
        return group_index // 5


def recipe_of(**rollout: Any) -> Recipe:
    staleness = rollout.pop("max_staleness", 1)
    return build(
        {
            "name": "taught",
            "max_staleness": staleness,
            "policy": {"model": "m"},
            "tasks": {"family": "a:b", "weighting": True},
            "rollout": {"groups_per_step": 4, "group": {"size": 2}, **rollout},
        }
    )


def played(task: Task, index: int) -> Group:
    """Returns the outcome of a group: `even` mostly has a spread, the other kinds rarely do. One in eight has no scored attempts."""
    luck = random.Random(index)
    differ = luck.random() < (0.8 if task.kind == "even" else 0.1)
    scores = [0.0, 1.0 if differ else 0.0] if luck.random() < 7 / 8 else [None, None]
    episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=())
    scored = tuple(ScoredEpisode(episode=episode, score=Score(value=value, reason="lost" if value is None else "")) for value in scores)
    return Group(index=index, task_id=task.id, task_key=task.key, episodes=scored)


class Run:
    """The rollouts of a resumable run: calls the parts like `agentrl.run.rollouts`, without episodes."""

    def __init__(self, folder: Path, recipe: Recipe, size: int | None, practice: bool) -> None:
        self.recipe, self.order = recipe, GroupOrder.from_recipe(recipe)
        self.store = SqliteStore(folder / "experience.sqlite")
        self.starts = BlockStarts(self.order)
        schedule = GroupSchedule(Kinds(size), seed=3, practice=Practised() if practice else None)
        self.tasks = GroupTasks(recipe, folder, DriverStore(lambda: self.store), schedule, self.order, self.starts)

    async def step(self, step: int) -> list[str]:
        assert self.starts.admit(step * self.order.per_step, version=step, parked=0)
        await self.tasks.prepare_block(step)
        task_ids = []
        waiting = iter(self.order.block(step))
        indices = [next(waiting) for _ in range(self.recipe.rollout.groups_per_step)]
        for index in indices:
            task = self.tasks.task(index)
            task_ids.append(task.id)
            if not self.store.has(index):
                self.store.put(played(task, index))
                self.tasks.record(task, self.store.groups([index])[0])
            if not self.order.has_preference(new_entry(self.store.groups([index])[0])) and (another := next(waiting, None)) is not None:
                indices.append(another)
        take_step(self.order, self.store, step)
        return task_ids


@contextmanager
def opened(folder: Path, *args: Any) -> Iterator[Run]:
    run = Run(folder, *args)
    try:
        yield run
    finally:
        run.store.close()


def run_steps(folder: Path, recipe: Recipe, size: int | None, practice: bool, *, start: int = 0, end: int = STEPS) -> list[list[str]]:
    async def all_steps() -> list[list[str]]:
        with opened(folder, recipe, size, practice) as run:
            return [await run.step(step) for step in range(start, end)]

    return asyncio.run(all_steps())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("practice", [False, True])
@pytest.mark.parametrize("size", [None, 30])
@pytest.mark.parametrize("rollout", [{}, {"extra_groups": 3, "max_staleness": 0}, {"max_staleness": 3}], ids=["plain", "extra", "stale"])
def test_a_resumed_run_gives_each_group_the_same_task(tmp_path: Path, rollout: dict[str, Any], size: int | None, practice: bool) -> None:
    recipe = recipe_of(**rollout)
    uninterrupted = run_steps(tmp_path / "whole", recipe, size, practice)
    tasks_file = tmp_path / "interrupted" / TASKS_FILE
    assert run_steps(tmp_path / "interrupted", recipe, size, practice, end=5) == uninterrupted[:5]
    tasks_file.write_bytes(tasks_file.read_bytes()[:-30])  # a torn line
    assert run_steps(tmp_path / "interrupted", recipe, size, practice, start=5, end=9) == uninterrupted[5:9]
    lines = tasks_file.read_bytes().splitlines(keepends=True)
    tasks_file.write_bytes(b"".join(lines[::3]) + b'{"group": "?"}\n\xff{\n' + lines[0])  # lost, invalid and repeated lines
    assert run_steps(tmp_path / "interrupted", recipe, size, practice, start=9) == uninterrupted[9:]
    tasks_file.unlink()
    assert run_steps(tmp_path / "interrupted", recipe, size, practice, start=10) == uninterrupted[10:]
    uses_by_task = Counter(task for step in uninterrupted[6:] for task in step)
    assert uses_by_task.total() >= 4 * (STEPS - 6)


def test_kinds_with_spread_are_drawn_more_often_and_practice_is_not_counted(tmp_path: Path) -> None:
    run_steps(tmp_path, recipe_of(), None, True)
    lines = read_json_lines(tmp_path / TASKS_FILE)
    assert len(lines) == STEPS * 4 * 4 // 5 + 1
    late = Counter(line["kind"] for line in lines if line["group"] >= 24)
    assert late["even"] > late["easy"] + late["hard"], late
    assert not [line for line in lines if line["task"] == "practice"]


def test_missing_groups_end_the_run(tmp_path: Path) -> None:
    with opened(tmp_path, recipe_of(), None, False) as run, pytest.raises(StoreError, match="the outcomes of step 0"):
        asyncio.run(run.tasks.prepare_block(2))


def test_without_weighting_the_schedule_decides_and_outcomes_are_recorded(tmp_path: Path) -> None:
    recipe = recipe_of().but("tasks.weighting=false")
    ids = [task for step in run_steps(tmp_path, recipe, 30, False) for task in step]
    schedule = GroupSchedule(Kinds(30), seed=3)
    assert ids == [schedule.task(n).id for n in range(len(ids))]
    assert len(read_json_lines(tmp_path / TASKS_FILE)) == len(ids)
