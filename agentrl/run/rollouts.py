"""Runs the groups of a run, from their tasks to the store. Failures are recorded in the group; only a failing store ends the run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base import user_code
from agentrl.errors import StoreError, UserError
from agentrl.experience import DriverStore, FolderCheckpoints, GroupOrder, new_entry
from agentrl.failure import Capture, Quarantine
from agentrl.memory.run_memory import RunMemory, record_answer_leaks
from agentrl.protocols import Tracker
from agentrl.records import Group, Task
from agentrl.rollout import GroupRunner, excluded_group, failure_from_error, task_fault
from agentrl.session.transcript import append_transcripts, transcript
from agentrl.task.group_tasks import GroupTasks

if TYPE_CHECKING:
    from agentrl.session.opening import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The groups of one run: their tasks, their attempts and where they are stored."""

    folder: Path
    max_staleness: int
    tasks: GroupTasks
    order: GroupOrder
    runner: GroupRunner
    store: DriverStore
    checkpoints: FolderCheckpoints
    memory: RunMemory | None
    quarantine: Quarantine
    capture: Capture
    tracker: Tracker
    _recording: asyncio.Lock = field(default_factory=asyncio.Lock)  # files of lines have one writer at a time

    @classmethod
    def of(cls, run: Run) -> Rollouts:
        """The rollouts of an open run."""
        return cls(
            folder=run.folder,
            max_staleness=run.recipe.max_staleness,
            tasks=run.group_tasks,
            order=run.order,
            runner=run.groups,
            store=run.store,
            checkpoints=run.checkpoints,
            memory=run.memory,
            quarantine=run.quarantine,
            capture=run.capture,
            tracker=run.tracker,
        )

    async def prepare_block(self, block: int) -> None:
        """Brings notes and task weights up to date for the groups of a block. Call it once the block may start."""
        if self.memory is not None:
            await self.memory.prepare_block(block)
        await self.tasks.prepare_block(block)

    async def block(self, number: int) -> None:
        """Runs the groups of a block that are not stored yet, plus one for each without a preference, up to the recipe's limit."""
        await self.prepare_block(number)
        indices = self.order.block(number)
        waiting, stored = iter(indices), {entry.index: entry for entry in await self.store.entries(first=indices.start)}

        async def run_next(index: int) -> None:
            entry = stored.get(index) or new_entry(await self.group(index))
            if not self.order.has_preference(entry) and (extra := next(waiting, None)) is not None:
                running.create_task(run_next(extra))

        async with asyncio.TaskGroup() as running:
            for index in islice(waiting, self.order.per_step):
                running.create_task(run_next(index))

    async def group(self, index: int) -> Group:
        """Samples, scores and stores group `index`, and reports it to the tracker."""
        step = self.order.block_of(index)
        group, task = await self._sample(index, step)
        group = await self._stored(group)
        self.tracker.progress(index, group)
        try:
            self.quarantine.add(group)
        finally:
            async with self._recording:
                alert = await asyncio.to_thread(self._record, task, group, step)
        if alert:
            self.tracker.alert(alert)
        return group

    def _record(self, task: Task | None, group: Group, step: int) -> str:
        """Writes what the run folder has about a stored group, in addition to the store, in a thread. Returns an alert, or ""."""
        self.checkpoints.remove_group(group.index)
        self.capture.capture_group(task, group, step=step)
        if task is None:
            return ""
        self.tasks.record(task, group)
        if group.index == self.order.block(step).start:
            example = transcript(task, group.episodes[0], phase="train", step=step)
            append_transcripts(self.folder / "episodes" / "train.jsonl", [example])
        return record_answer_leaks(self.folder, task, group.episodes, phase="train", step=step)

    async def _sample(self, index: int, step: int) -> tuple[Group, Task | None]:
        """The group of a task, and the task. No attempts if the task is quarantined or cannot be created; in the latter case the task is
        None."""
        size = self.runner.group_size
        try:
            task = self.tasks.task(index)
        except Exception as error:  # user-supplied; a retry would fail again, because the task is a pure function of the index
            if not isinstance(error, UserError):
                user_code.log_unexpected(f"task of group {index}", error)
            return excluded_group(index, f"task of group {index}", f"group {index}", task_fault(error), size=size), None
        if (fault := self.quarantine.known_fault(task.key)) is not None:
            return excluded_group(index, task.id, task.key, fault, size=size), task
        # With oldest_first, late groups are trained too, so an interrupted attempt continues whatever version it started with.
        oldest_version = 0 if self.order.oldest_first and self.max_staleness else step - self.max_staleness
        return await self.runner.run_group(index, task, oldest_version=oldest_version), task

    async def _stored(self, group: Group) -> Group:
        """Stores the group, or an excluded group if it cannot be serialized. A `StoreError`, such as a full disk, ends the run."""
        try:
            await self.store.put(group)
            return group
        except StoreError:
            raise
        except Exception as error:
            failure = failure_from_error(error, stage="store")
            excluded = excluded_group(group.index, f"group {group.index}", group.task_key, failure, size=self.runner.group_size)
            await self.store.put(excluded)
            return excluded
