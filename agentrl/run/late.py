"""Follows the groups that wait for late scores: counts them, closes expired parts, and records their outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.errors import UserError
from agentrl.experience import DriverStore, GroupOrder
from agentrl.experience.blocks import MAX_PARKED_BLOCKS
from agentrl.experience.late_parts import Clock
from agentrl.failure import Capture
from agentrl.protocols import Tracker
from agentrl.records import Group, Task
from agentrl.task.group_tasks import GroupTasks

log = logging.getLogger(__name__)

_POLL_S = 0.5


def check_order(order: GroupOrder, *late: str) -> None:
    """Raises `UserError` if there are late scores, which the arguments name, and the order accepts none."""
    if late and not order.accepts_late:
        raise UserError(
            f"{late[0]}: a step of this run waits for its own groups, so no score may be late",
            fix="use order=oldest_first and max_staleness of 1 or more, or a verifier that scores at once",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateGroups:
    """The parked groups of one run. `changed` is set when their number changes; the caller that waits for it clears it."""

    order: GroupOrder
    store: DriverStore
    tasks: GroupTasks
    capture: Capture
    tracker: Tracker
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _clock: Clock = field(default_factory=Clock)
    _parked: dict[int, Task | None] = field(default_factory=dict)  # a task that an earlier driver sampled is None

    @property
    def count(self) -> int:
        """The number of parked groups, as of the last look at the store."""
        return len(self._parked)

    async def resume(self) -> None:
        """Reads the parked groups that an earlier driver has left."""
        for index in await self.store.call(lambda store: store.parked()):
            self._parked.setdefault(index, None)

    def check(self, group: Group) -> None:
        """Raises `UserError` if scores of the group are late and the run's order accepts none."""
        check_order(self.order, *(f"late score {part.name!r} of group {group.index}" for _, _, part in group.pending))

    def park(self, task: Task | None, group: Group) -> None:
        """Counts a stored group that waits for late scores."""
        self._parked[group.index] = task
        self.changed.set()
        if self.count == MAX_PARKED_BLOCKS * self.order.per_step:
            self.tracker.alert(
                f"{self.count} groups wait for late scores; no more are sampled in their place. Send scores (agentrl score RUN --list"
                " shows them), or let the verifier's parts expire earlier"
            )

    async def watch(self) -> None:
        """Closes expired parts and records groups that become ready, until it is cancelled. Raises `StoreError`."""
        while True:
            if self._parked:
                await self.update()
            await asyncio.sleep(_POLL_S)

    async def update(self) -> None:
        """Looks at the store once."""
        now = self._clock.now()
        if expired := await self.store.call(lambda store: store.expire_scores(now=now)):
            log.info("late scores of groups %s have expired", ", ".join(map(str, expired)))
        known = set(self._parked)  # before the call, because a group may be parked meanwhile
        ready = sorted(known.difference(await self.store.call(lambda store: store.parked())))
        if not ready:
            return
        groups = await self.store.groups(ready)
        await asyncio.to_thread(self._record, groups)
        for group in groups:
            self.tracker.progress(group.index, group)
            del self._parked[group.index]
        self.changed.set()

    def _record(self, groups: Sequence[Group]) -> None:
        """Writes the outcomes and failures of groups that have their scores, in a thread."""
        self.tasks.record_scores(groups)
        for group in groups:
            if (task := self._parked[group.index]) is not None:
                self.capture.capture_group(task, group, step=self.order.block_of(group.index))
