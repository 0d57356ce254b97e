"""The tasks of a run's groups, the outcome of each group (a line in `tasks.jsonl`), and the resulting task weights.

The weights of a step are a pure function of the stored groups of all steps before step `s - max_staleness`, which are stored when step `s`
may start. So a resumed run gives each group the same task. The file saves rereading the groups, and the report reads it. A group without a
line, after a crash, is read from the store and its task is created again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from agentrl.base.files import append_lines, complete_lines
from agentrl.base.user_code import describe_error
from agentrl.config.recipe import Recipe
from agentrl.errors import StoreError, TaskError
from agentrl.experience import StepGroups
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, Split, Task, codec
from agentrl.task import GroupOutcome, GroupSchedule, TaskHistory

TASKS_FILE = "tasks.jsonl"
_KEPT = 4  # steps whose weights are kept after the learner has consumed them


class GroupTasks:
    """Chooses the tasks of a run's groups and records their outcomes."""

    def __init__(self, recipe: Recipe, folder: Path, store: ExperienceStore, schedule: GroupSchedule, steps: StepGroups) -> None:
        self._path = folder / TASKS_FILE
        self._store = store
        self._schedule = schedule
        self._steps = steps
        self._behind = recipe.max_staleness
        self._record: TaskHistory | None = None
        if recipe.tasks.weighting:
            by_task = schedule.family.size(Split.TRAIN) is not None
            self._record = TaskHistory(min_group_size=self._steps.min_group_size, by_task=by_task)
        self._lines: dict[int, GroupOutcome] | None = None  # outcomes from the file that are not in the history yet
        self._reached = 0  # steps that are in the history
        self._weights = {step: self._record.weights() for step in range(self._behind + 1)} if self._record is not None else {}
        self._reaching = asyncio.Lock()

    async def prepare_step(self, step: int) -> None:
        """Computes the weights of a step. Call it once the step may start, when the groups that they depend on are stored."""
        if self._record is None:
            return
        async with self._reaching:
            if self._lines is None:
                self._lines = await asyncio.to_thread(self._read)
                for line in self._lines.values():
                    self._steps.set_preference(line.group, line.has_spread and line.counted >= self._steps.min_group_size)
            while self._reached < step - self._behind:
                self._record.add(self._step(self._consumed(self._reached)))
                self._reached += 1
                self._weights[self._reached + self._behind] = self._record.weights()
                self._weights.pop(self._reached - _KEPT, None)
                await asyncio.sleep(0)  # a resumed run may have many steps, and other tasks wait

    def task(self, index: int) -> Task:
        """Returns the task of group `index`. Raises like `GroupSchedule.task`."""
        weights = None if self._record is None else self._weights[self._steps.step_of(index)]
        return self._schedule.task(self._steps.position(index), weights)

    def record(self, task: Task, group: Group) -> None:
        """Records the outcome of a stored group, unless its task is practice."""
        if self._schedule.is_practice(self._steps.position(group.index)):
            return
        taught = GroupOutcome.from_group(task, group)
        append_lines(self._path, [codec.to_json(taught) + b"\n"])
        if self._lines is not None:
            self._lines[group.index] = taught

    def _step(self, groups: Iterable[tuple[int, Group | None]]) -> Iterator[GroupOutcome]:
        """The outcomes of the groups that a step consumed."""
        assert self._lines is not None, "the file is read first"
        for index, group in groups:
            if (line := self._lines.pop(index, None)) is not None:
                yield line
            elif group is not None and (task := self._again(group)) is not None:
                yield GroupOutcome.from_group(task, group)

    def _consumed(self, step: int) -> list[tuple[int, Group | None]]:
        """The groups that a step consumed; those without a recorded outcome are read from the store."""
        assert self._lines is not None, "the file is read first"
        indices = self._steps.consumed_indices(step, self._store)
        if indices is None:
            raise StoreError(f"the outcomes of step {step} are unknown: some of its groups are not in the experience store")
        recorded = [index in self._lines or self._schedule.is_practice(self._steps.position(index)) for index in indices]
        return [(index, None if known else self._store.groups([index])[0]) for index, known in zip(indices, recorded, strict=True)]

    def _again(self, group: Group) -> Task | None:
        """The task of a group without a recorded outcome; None if it had none. Raises `TaskError` if it cannot be created again."""
        try:
            return self.task(group.index)
        except Exception as error:  # a family may raise anything
            if not group.scored:
                return None
            raise TaskError(
                f"the task of group {group.index}, which later weights depend on, cannot be created again: {describe_error(error)}",
                fix="repair the family's task(), then continue with --resume",
            ) from error

    def _read(self) -> dict[int, GroupOutcome]:
        outcomes = map(GroupOutcome.from_line, complete_lines(self._path))
        return {line.group: line for line in outcomes if line is not None}
