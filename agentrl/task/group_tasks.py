"""The tasks of a run's groups, the outcome of each group (a line in `tasks.jsonl`), and the resulting task weights.

The weights for a block are a pure function of the groups that were consumed by the steps before the block's version
(`agentrl.experience.BlockStarts`). These groups are known when the block starts, so a resumed run assigns the same task to each group.
Because `tasks.jsonl` stores the outcomes, a resumed run need not read the groups again. Reports also read this file. After a crash, the
outcome of a group may be missing in `tasks.jsonl`. The group is then read from the store, and its task is created again. A group with late
scores is recorded twice: without these scores before the group is stored, and again when the scores have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from agentrl.base.files import append_lines, complete_lines
from agentrl.base.user_code import describe_error
from agentrl.config.recipe import Recipe
from agentrl.errors import StoreError, TaskError
from agentrl.experience import BlockStarts, DriverStore, GroupOrder
from agentrl.records import Group, LedgerEntry, Split, Task, codec
from agentrl.task import GroupOutcome, GroupSchedule, TaskHistory

TASKS_FILE = "tasks.jsonl"


class GroupTasks:
    """Chooses the tasks of a run's groups and records their outcomes."""

    def __init__(
        self, recipe: Recipe, folder: Path, store: DriverStore, schedule: GroupSchedule, order: GroupOrder, starts: BlockStarts
    ) -> None:
        self._path = folder / TASKS_FILE
        self._store = store
        self._schedule = schedule
        self._order = order
        self._starts = starts
        self._record: TaskHistory | None = None
        if recipe.tasks.weighting:
            by_task = schedule.family.size(Split.TRAIN) is not None
            self._record = TaskHistory(min_group_size=order.min_group_size, by_task=by_task)
        self._lines: dict[int, GroupOutcome] | None = None  # outcomes from the file that are not yet in the history
        self._reached = 0  # number of steps that are in the history
        self._open_block = 0  # first block with groups that these steps did not consume, apart from late groups
        self._weights = {0: self._record.weights()} if self._record is not None else {}  # by version
        self._reaching = asyncio.Lock()

    async def prepare_block(self, block: int) -> None:
        """Computes the weights of a block. Call this method when the block may start, because the groups that determine the weights are
        known only then. Raises `StoreError` if the ledger lacks these groups, and `TaskError` if a task whose outcome was lost cannot be
        created again."""
        if self._record is None:
            return
        async with self._reaching:
            if self._lines is None:
                self._lines = await asyncio.to_thread(self._read)
            while self._reached < self._starts.version_of(block):
                entries = [entry for entry in await self._store.entries(step=self._reached) if not entry.is_residual]
                self._record.add(self._outcomes(entries, await self._needed_groups(entries)))
                self._reached += 1
                self._weights[self._reached] = self._record.weights()
                await self._drop_weights()
                await asyncio.sleep(0)  # a resumed run may have many steps, and other asyncio tasks are waiting

    def task(self, index: int) -> Task:
        """Returns the task of group `index`. Raises the errors of `GroupSchedule.task`."""
        weights = None if self._record is None else self._weights[self._starts.version_of(self._order.block_of(index))]
        return self._schedule.task(self._order.position(index), weights, slot=self._order.slot(index))

    def record(self, task: Task, group: Group) -> None:
        """Records the outcome of a group, unless its task is a practice task.

        If some of the group's scores are late, call `record_scores` later.
        """
        if self._schedule.is_practice(self._order.position(group.index)):
            return
        taught = GroupOutcome.from_group(task, group)
        append_lines(self._path, [codec.to_json(taught) + b"\n"], durable=any(group.pending))
        if self._lines is not None:
            self._lines[group.index] = taught

    def record_scores(self, scored: Iterable[tuple[Task, Group]], *, again: bool) -> None:
        """Records the outcomes of groups whose late scores have arrived or expired. `again`: the outcomes may already be recorded; such
        outcomes are skipped."""
        recorded = self._read() if again else {}
        taught = [GroupOutcome.from_group(*pair) for pair in scored if not self._schedule.is_practice(self._order.position(pair[1].index))]
        append_lines(self._path, [codec.to_json(line) + b"\n" for line in taught if line != recorded.get(line.group)])

    async def _needed_groups(self, entries: Sequence[LedgerEntry]) -> dict[int, Group]:
        """Returns index -> group for the groups of a step that have no recorded outcome, or whose outcome was recorded before their late
        scores arrived."""
        assert self._lines is not None, "the file is read first"
        indices = [entry.index for entry in entries if entry.late_parts or entry.index not in self._lines]
        return {group.index: group for group in await self._store.groups(indices)} if indices else {}

    def _outcomes(self, entries: Sequence[LedgerEntry], groups: Mapping[int, Group]) -> Iterator[GroupOutcome]:
        """Yields the outcomes of the groups that a step consumed. `groups`: the result of `_needed_groups`."""
        assert self._lines is not None, "the file is read first"
        if not entries:
            raise StoreError(f"the outcomes of step {self._reached} are unknown: the ledger has no groups of this step")
        for entry in entries:
            if (line := self._lines.pop(entry.index, None)) is not None:
                yield line.with_scores(groups[entry.index]) if entry.late_parts else line
            elif not self._schedule.is_practice(self._order.position(entry.index)):
                group = groups[entry.index]
                if (task := self._again(group)) is not None:
                    yield GroupOutcome.from_group(task, group)

    async def _drop_weights(self) -> None:
        """Deletes the weights of consumed blocks. A block counts as consumed even if groups with late scores are not consumed yet, because
        the tasks of these groups are recorded."""
        stored = await self._store.entries(first=self._order.block(self._open_block).start)
        self._open_block = self._order.first_open_block(stored, before=self._reached, start=self._open_block)
        oldest = self._starts.oldest_version(self._open_block)
        for version in [version for version in self._weights if version < min(oldest, self._reached)]:
            del self._weights[version]

    def _again(self, group: Group) -> Task | None:
        """Returns the task of a group that has no recorded outcome; None if the group had no task. Raises `TaskError` if the task cannot be
        created again."""
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
