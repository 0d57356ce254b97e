"""What the groups of a run taught, a line each in `tasks.jsonl` of its folder, and the weights of its tasks that follow from it.

The weights of a step are a pure function of the stored groups of all steps before step `s - max_staleness`, which are there when step `s`
may begin: a resumed run gives each group the task that it had. The file saves reading the groups again, and is what the report reads; a
group without a line, which a killed process may leave, is read from the store and its task made anew.
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
_KEPT = 4  # steps whose weights are remembered after the learner has consumed them


class GroupTasks:
    """The tasks of a run's groups, chosen and written down."""

    def __init__(self, recipe: Recipe, folder: Path, store: ExperienceStore, schedule: GroupSchedule, steps: StepGroups) -> None:
        self._path = folder / TASKS_FILE
        self._store = store
        self._schedule = schedule
        self._steps = steps
        self._behind = recipe.max_staleness
        self._record: TaskHistory | None = None
        if recipe.tasks.weighting is not None:
            by_task = schedule.family.size(Split.TRAIN) is not None
            self._record = TaskHistory(recipe.tasks.weighting, min_group_size=self._steps.min_group_size, by_task=by_task)
        self._lines: dict[int, GroupOutcome] | None = None  # of the file, until they are in the record
        self._reached = 0  # steps that are in the record
        self._weights = {step: self._record.weights() for step in range(self._behind + 1)} if self._record is not None else {}
        self._reaching = asyncio.Lock()

    async def prepare_step(self, step: int) -> None:
        """Makes the weights of a step. Called once the step may begin, when the groups that they follow from are in the store."""
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
                await asyncio.sleep(0)  # a resumed run may have many steps, and others wait

    def task(self, index: int) -> Task:
        """The task of group `index`. Raises what `GroupSchedule.task` does."""
        weights = None if self._record is None else self._weights[self._steps.step_of(index)]
        return self._schedule.task(self._steps.position(index), weights)

    def record(self, task: Task, group: Group) -> None:
        """Writes down what a stored group taught; nothing of a task that practises a suite, which is none of the family's."""
        if self._schedule.is_practice(self._steps.position(group.index)):
            return
        taught = GroupOutcome.from_group(task, group)
        append_lines(self._path, [codec.to_json(taught) + b"\n"])
        if self._lines is not None:
            self._lines[group.index] = taught

    def _step(self, groups: Iterable[tuple[int, Group | None]]) -> Iterator[GroupOutcome]:
        """What the groups taught that a step consumed."""
        assert self._lines is not None, "the file is read first"
        for index, group in groups:
            if (line := self._lines.pop(index, None)) is not None:
                yield line
            elif group is not None and (task := self._again(group)) is not None:
                yield GroupOutcome.from_group(task, group)

    def _consumed(self, step: int) -> list[tuple[int, Group | None]]:
        """The groups that a step consumed, each as it is stored where it has no line."""
        assert self._lines is not None, "the file is read first"
        indices = self._steps.consumed_indices(step, self._store)
        if indices is None:
            raise StoreError(f"what step {step} taught is not known: some of its groups are not in the experience store")
        told = [index in self._lines or self._schedule.is_practice(self._steps.position(index)) for index in indices]
        return [(index, None if known else self._store.groups([index])[0]) for index, known in zip(indices, told, strict=True)]

    def _again(self, group: Group) -> Task | None:
        """The task of a group without a line; None where there was none. Raises `TaskError` for one that cannot be made any more."""
        try:
            return self.task(group.index)
        except Exception as error:  # a family may raise anything
            if not group.scored:
                return None
            raise TaskError(
                f"group {group.index} had a task that cannot be made again, to weigh the next ones by it: {describe_error(error)}",
                fix="repair the family's task(), then continue with --resume",
            ) from error

    def _read(self) -> dict[int, GroupOutcome]:
        found = map(GroupOutcome.from_line, complete_lines(self._path))
        return {line.group: line for line in found if line is not None}
