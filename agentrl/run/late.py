"""Tracks the groups that wait for late scores: counts them, closes expired score parts, and records the outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import UserError
from agentrl.experience import DriverStore, GroupOrder
from agentrl.experience.blocks import MAX_PARKED_BLOCKS
from agentrl.experience.late_parts import Clock
from agentrl.failure import Capture
from agentrl.protocols import Tracker
from agentrl.records import Group, sampled_index
from agentrl.session.transcript import PendingTranscripts
from agentrl.task.group_tasks import GroupTasks

log = logging.getLogger(__name__)

_POLL_S = 0.5
_BATCH = 64  # maximum number of groups in memory at once


def check_late(order: GroupOrder, late: Sequence[str], residual: Sequence[str]) -> None:
    """Raises `UserError` if there are late scores but the order accepts none, or residuals but the order allows none.

    Args:
        late: descriptions of the late scores.
        residual: descriptions of those late scores that are applied as residuals.
    """
    if late and not order.accepts_late:
        raise UserError(
            f"{late[0]}: a step of this run waits for its own groups, so scores cannot be late",
            fix="use order=oldest_first and max_staleness of 1 or more, or a verifier that scores at once",
        )
    if residual and order.no_residuals:
        raise UserError(
            f"{residual[0]}: residual scores cannot be applied with {order.no_residuals}",
            fix="change this setting, or let the groups wait for their scores: residual=false in the verifier",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateGroups:
    """The parked groups of one run. `changed` is set when the number of parked or running groups changes, and the caller that waits for it
    clears it.

    The outcome of a group is recorded once, when the last late score arrives or expires. If no driver is running at that time, or if the
    driver dies while it records the outcome, the next driver records the outcome (`resume`).
    """

    folder: Path
    order: GroupOrder
    store: DriverStore
    tasks: GroupTasks
    capture: Capture
    tracker: Tracker
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)  # JSON-lines files must have one writer at a time
    _clock: Clock = field(default_factory=Clock)
    _parked: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """The number of parked groups, excluding residuals, when the store was last read."""
        return sum(index >= 0 for index in self._parked)

    async def resume(self) -> None:
        """Reads the parked groups that an earlier driver left, and records the outcomes of groups that became ready in the meantime."""
        parked = set(await self.store.call(lambda store: store.parked()))
        self._parked.update(parked)
        unrecorded = await asyncio.to_thread(PendingTranscripts(self.folder).groups) - set(map(sampled_index, parked))
        stored = await self.store.call(lambda store: [index for index in sorted(unrecorded) if store.has(index)])
        residual = await self.store.call(lambda store: [-1 - index for index in stored if store.has(-1 - index)])
        await self._record([index for index in stored if -1 - index not in residual] + residual, again=True)

    def check(self, group: Group) -> None:
        """Raises `UserError` if scores of the group are late and the run does not accept them."""
        late = [(f"late score {part.name!r} of group {group.index}", part.residual) for _, _, part in group.pending]
        check_late(self.order, [what for what, _ in late], [what for what, is_residual in late if is_residual])

    def park(self, group: Group) -> None:
        """Adds a stored group, or a residual, that waits for late scores."""
        self._parked.add(group.index)
        self.changed.set()
        if self.count == MAX_PARKED_BLOCKS * self.order.per_step:
            self.tracker.alert(
                f"{self.count} groups wait for late scores; no more groups are sampled to replace them. Send scores (agentrl score RUN"
                " --list shows them), or let the verifier's parts expire earlier"
            )

    async def watch(self) -> None:
        """Closes expired score parts and records the outcomes of groups that become ready, until the call is cancelled. Raises
        `StoreError`."""
        while True:
            if self._parked:
                await self.update()
            await asyncio.sleep(_POLL_S)

    async def update(self) -> None:
        """Closes expired score parts and records the outcomes of groups that became ready, once."""
        now = self._clock.now()
        if expired := await self.store.call(lambda store: store.expire_scores(now=now)):
            log.info("late scores of groups %s expired", ", ".join(str(sampled_index(index)) for index in expired))
        known = set(self._parked)  # copied before the call, because a group may be parked during the call
        await self._record(sorted(known.difference(await self.store.call(lambda store: store.parked()))))

    async def _record(self, ready: Sequence[int], *, again: bool = False) -> None:
        """Records the outcomes of groups whose scores are complete. `again`: whether an earlier driver may have recorded some of the
        outcomes."""
        for start in range(0, len(ready), _BATCH):
            groups = await self.store.groups(ready[start : start + _BATCH])
            async with self.recording:
                await asyncio.to_thread(self._write, groups, again=again)
            for group in groups:
                if group.index >= 0:
                    self.tracker.progress(group.index, group)
                self._parked.discard(group.index)
            self.changed.set()

    def _write(self, groups: Sequence[Group], *, again: bool) -> None:
        """Writes the outcomes and failures of groups, in a thread.

        Each write can be repeated, and the last one marks the outcomes as recorded.
        """
        pending = PendingTranscripts(self.folder)
        sampled = [group for group in groups if group.index >= 0]  # for a residual, the outcome was recorded with its group
        known = [(task, group) for group in sampled if (task := pending.task(group.index)) is not None]
        self.tasks.record_scores(known, again=again)
        for task, group in known:
            self.capture.capture_group(task, group, step=self.order.block_of(group.index))
        for group in groups:
            pending.remove(group.index)
