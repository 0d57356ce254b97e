"""Runs the groups of a run, from their tasks to the store. Failures are recorded in the group. Only a failure of the store stops the
run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base import user_code
from agentrl.base.activity import ACTIVITY, GROUPS
from agentrl.errors import StoreError, UserError
from agentrl.experience import DriverStore, FolderCheckpoints, GroupOrder, new_entry
from agentrl.experience.residuals import split_group
from agentrl.failure import Capture, Quarantine
from agentrl.memory.run_memory import RunMemory, record_answer_leaks
from agentrl.protocols import Tracker
from agentrl.records import Group, LedgerEntry, Task
from agentrl.rollout import GroupSampler, excluded_group, failure_from_error, task_fault
from agentrl.run.late import LateGroups
from agentrl.session.transcript import PendingTranscripts, append_transcripts, transcript
from agentrl.task.group_tasks import GroupTasks

if TYPE_CHECKING:
    from agentrl.session.opening import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Runs the groups of one run, with their tasks and attempts, and records them in the store and the run folder."""

    folder: Path
    max_staleness: int
    tasks: GroupTasks
    order: GroupOrder
    runner: GroupSampler
    store: DriverStore
    checkpoints: FolderCheckpoints
    memory: RunMemory | None
    quarantine: Quarantine
    capture: Capture
    tracker: Tracker
    late: LateGroups

    @classmethod
    def of(cls, run: Run) -> Rollouts:
        """Returns the rollouts of an open run."""
        return cls(
            folder=run.folder,
            max_staleness=run.recipe.max_staleness,
            tasks=run.group_tasks,
            order=run.order,
            runner=run.workers or run.groups,
            store=run.store,
            checkpoints=run.checkpoints,
            memory=run.memory,
            quarantine=run.quarantine,
            capture=run.capture,
            tracker=run.tracker,
            late=run.late,
        )

    async def prepare_block(self, block: int) -> None:
        """Updates the notes and the task weights for the groups of a block. Call this method when the block may start."""
        if self.memory is not None:
            await self.memory.prepare_block(block)
        await self.tasks.prepare_block(block)

    async def group(self, index: int) -> Group:
        """Samples, scores and stores group `index`. Reports the group to the tracker if none of its scores are late. Raises `UserError` if
        the run does not accept the group's late scores, and `StoreError` if the group cannot be stored."""
        step = self.order.block_of(index)
        with ACTIVITY.doing(GROUPS):
            group, task = await self._sample(index, step)
        group = group if task is None else group.with_task(task)
        self.late.check(group)
        if any(group.pending) and task is not None:
            async with self.late.recording:
                await asyncio.to_thread(self._record_pending, task, group, step)
        group, *residual = split_group(await self._stored(group))
        late = any(group.pending)
        for parked in residual or [group] * late:
            self.late.park(parked)
        if not late:
            self.tracker.progress(index, group)
        try:
            await asyncio.to_thread(self.quarantine.add, group)
        finally:
            async with self.late.recording:
                alert = await asyncio.to_thread(self._record, task, group, step, late=late, scored=not late and not residual)
        if alert:
            self.tracker.alert(alert)
        return group

    def _record_pending(self, task: Task, group: Group, step: int) -> None:
        """Writes the data that will be needed when the late scores of a group arrive, because its task may no longer be known then.

        Runs in a thread, before the group is stored.
        """
        if any(split_group(group)[0].pending):
            self.tasks.record(task, group)
        PendingTranscripts(self.folder).write(task, group, step=step)

    def _record(self, task: Task | None, group: Group, step: int, *, late: bool, scored: bool) -> str:
        """Writes the records of a stored group to the run folder, in addition to the store. Runs in a thread. Returns an alert if an
        episode was shown the answer to its task or the search for such episodes failed; otherwise ""."""
        self.checkpoints.remove_group(group.index)
        if scored:
            PendingTranscripts(self.folder).remove(group.index)  # left by a killed driver whose attempts at the task had late scores
        if not late:
            self.capture.capture_group(task, group, step=step)
        if task is None:
            return ""
        if not late:
            self.tasks.record(task, group)
        if group.index == self.order.block(step).start:
            example = transcript(task, group.episodes[0], phase="train", step=step)
            append_transcripts(self.folder / "episodes" / "train.jsonl", [example])
        return record_answer_leaks(self.folder, task, group.episodes, phase="train", step=step)

    async def _sample(self, index: int, step: int) -> tuple[Group, Task | None]:
        """Samples group `index`. Returns the group and its task.

        If the task is quarantined or cannot be created, the group is an excluded group without attempts. If the task cannot be created,
        None is returned in its place.
        """
        size = self.runner.group_size
        try:
            task = self.tasks.task(index)
        except Exception as error:  # user-supplied code; a retry would fail again, because the task is a pure function of the index
            if not isinstance(error, UserError):
                user_code.log_unexpected(f"task of group {index}", error)
            return excluded_group(index, f"task of group {index}", f"group {index}", task_fault(error), size=size), None
        if (fault := self.quarantine.known_fault(task.key)) is not None:
            return excluded_group(index, task.id, task.key, fault, size=size), task
        # With oldest_first, late groups are also used for training, so an interrupted attempt continues with any start version.
        oldest_version = 0 if self.order.oldest_first and self.max_staleness else step - self.max_staleness
        return await self.runner.run_group(index, task, oldest_version=oldest_version), task

    async def _stored(self, group: Group) -> Group:
        """Stores and returns the group, or an excluded group if it cannot be serialized. A `StoreError`, such as for a full disk, stops the
        run."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A block whose groups are running."""

    groups: range
    stored: Mapping[int, LedgerEntry]  # groups in this and later blocks that an earlier driver stored, by index
    prepared: asyncio.Task[None]  # task that prepares the notes and task weights of the block
    extra: Iterator[int]  # indices of extra groups that are not started yet


class RunningGroups:
    """The groups that run in an asyncio task group. Stored groups are not run again."""

    def __init__(self, rollouts: Rollouts, running: asyncio.TaskGroup) -> None:
        self.tasks = set[asyncio.Task[None]]()
        self._rollouts = rollouts
        self._running = running
        self._block: _Block | None = None  # the newest block

    async def start(self, slot: int) -> None:
        """Starts the group in a slot. For each group that may be replaced (`GroupOrder.is_replaceable`), starts an extra group, up to the
        limit in the recipe."""
        order = self._rollouts.order
        number, place = divmod(slot, order.per_step)
        groups = order.block(number)
        if self._block is None or self._block.groups != groups:
            stored = {entry.index: entry for entry in await self._rollouts.store.entries(first=groups.start)}
            prepared = self._running.create_task(self._rollouts.prepare_block(number))
            self._block = _Block(groups=groups, stored=stored, prepared=prepared, extra=iter(groups[order.per_step :]))
        self._start(groups[place], self._block)

    def _start(self, index: int, block: _Block) -> None:
        task = self._running.create_task(self._run(index, block))
        self.tasks.add(task)
        task.add_done_callback(self._end)

    async def _run(self, index: int, block: _Block) -> None:
        await block.prepared
        entry = block.stored.get(index) or new_entry(await self._rollouts.group(index))
        if self._rollouts.order.is_replaceable(entry) and (another := next(block.extra, None)) is not None:
            self._start(another, block)

    def _end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._rollouts.late.changed.set()
