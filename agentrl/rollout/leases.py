"""Leases groups to rollout workers. Each group is sampled by one worker at a time, and is not lost if its worker is lost.

The driver queues groups, and workers take them, with one lease per group. A worker that leaves, or that is silent for too long, loses its
leases, and its groups return to the head of the queue. A different worker continues these groups from their saved episodes
(`EpisodeCheckpoints`). Only the holder of a group's newest lease may deliver the result over HTTP, so if a silent worker returns, the group
is not delivered twice. Attempts that were in flight in a lost worker count as infrastructure faults.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from agentrl.records import Failure, Group, Task
from agentrl.records.failure import WORKER_LOST
from agentrl.rollout.faults import infrastructure_fault
from agentrl.rollout.group import excluded_group
from agentrl.rollout.hooks import AttemptListener

log = logging.getLogger(__name__)

SILENT_S = 15.0
"""Seconds without a request after which a worker counts as lost."""
MAX_LOSSES = 3
"""A group is excluded after this many workers were lost while they sampled it, because it may have caused the losses."""
_LOOK_S = 2.0
_UNHEARD_S = 10.0  # if a worker does not list a lease of this age, it never received the lease
_LOST = 256  # number of lost workers that are remembered, the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A group that is assigned to a worker."""

    id: str
    index: int
    task: Task
    oldest_version: int  # see `GroupRunner.run_group`


@dataclass(slots=True, eq=False)
class _Job:
    """A group that waits for a worker or is leased to a worker."""

    index: int
    task: Task
    oldest_version: int
    result: asyncio.Future[Group] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    losses: int = 0
    lease: str = ""  # empty while the group waits
    worker: str = ""
    leased_at: float = 0.0

    def is_for(self, group: Group) -> bool:
        return (group.index, group.task_id, group.task_key) == (self.index, self.task.id, self.task.key)

    def accepts(self, group: Group) -> bool:
        """Whether a complete group that was sampled under a different lease may be accepted as the result of this job."""
        episodes = [scored.episode for scored in group.episodes]
        fresh = all(episode.oldest_version is None or episode.oldest_version >= self.oldest_version for episode in episodes)
        return self.is_for(group) and fresh and not any(episode.left_out for episode in episodes)


class GroupLeases:
    """The queue of groups and their leases. A `GroupSampler`; use an instance from only one event loop.

    Args:
        group_size: number of scored attempts per group.
        concurrency: maximum number of attempts in flight in one worker.
        on_attempt: called with the fault of each attempt that was in flight in a lost worker.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        group_size: int,
        concurrency: int,
        on_attempt: AttemptListener = lambda failure: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group_size = group_size
        self.losses = 0  # leases that were lost with their workers
        self.on_end: Callable[[str], None] = lambda lease: None
        """Called with each lease that is finished, lost or withdrawn."""
        self._concurrency, self._on_attempt = concurrency, on_attempt
        self._clock = clock
        self._waiting = deque[_Job]()
        self._leased: dict[str, _Job] = {}
        self._early: dict[int, Group] = {}  # index -> group that arrived while it was neither queued nor leased
        self._silent_s: dict[str, float] = {}  # worker -> counted seconds since its newest request
        self._lost = deque[str](maxlen=_LOST)  # lost workers that have sent no renewal since they were lost
        self._looked = clock()
        self._queued = asyncio.Condition()

    @property
    def waiting(self) -> int:
        """The number of groups that no worker has taken."""
        return len(self._waiting)

    @property
    def workers(self) -> int:
        """The number of workers that are not lost."""
        return len(self._silent_s)

    def expect(self, worker: str, *, within_s: float) -> None:
        """Counts a worker that is starting. The worker is lost if it sends no request within `within_s` seconds."""
        self._silent_s[worker] = SILENT_S - within_s

    async def run_group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """Queues a group and returns it after a worker has sampled it, or as an excluded group after `MAX_LOSSES` lost workers.
        Cancellation withdraws the group from the queue or the worker."""
        job = _Job(index, task, oldest_version)
        await self._queue(job)
        try:
            return await job.result
        finally:
            if job in self._waiting:
                self._waiting.remove(job)
            if job.lease in self._leased:
                self._end(job)

    async def take(self, worker: str, *, wait_s: float) -> Lease | None:
        """Returns a lease on the next group; None if no group is queued within `wait_s` seconds, or if the worker is lost."""
        self._silent_s[worker] = 0.0
        try:
            async with asyncio.timeout(wait_s), self._queued:
                await self._queued.wait_for(lambda: self._waiting or worker not in self._silent_s)
        except TimeoutError:
            return None
        if worker not in self._silent_s or not self._waiting:
            return None
        job = self._waiting.popleft()
        job.lease, job.worker, job.leased_at = uuid.uuid4().hex, worker, self._clock()
        self._leased[job.lease] = job
        return Lease(id=job.lease, index=job.index, task=job.task, oldest_version=job.oldest_version)

    def is_valid(self, lease: str) -> bool:
        """Whether a lease is neither finished nor lost."""
        return lease in self._leased

    def group_of(self, lease: str) -> int | None:
        """Returns the index of the leased group; None if the lease is finished or lost."""
        job = self._leased.get(lease)
        return None if job is None else job.index

    def was_lost(self, worker: str) -> bool:
        """Whether a worker was lost after its last renewal. The attempts that a lost worker reports as ended are already counted."""
        return worker in self._lost

    async def renew(self, worker: str, leases: Collection[str]) -> list[str]:
        """Records that a worker is alive and works on `leases`. Returns the leases that the worker must abandon."""
        with suppress(ValueError):
            self._lost.remove(worker)
        self._silent_s[worker], now = 0.0, self._clock()
        lost = [
            job for job in self._leased.values() if job.worker == worker and job.lease not in leases and now - job.leased_at > _UNHEARD_S
        ]
        await self._requeue(lost, failed=False)
        return [lease for lease in leases if lease not in self._leased]

    def finish(self, lease: str, group: Group) -> bool:
        """Delivers the result of a lease.

        Returns False, and drops the result, if the lease is lost. Raises `ValueError` if `group` is not the leased group.
        """
        job = self._leased.get(lease)
        if job is None:
            return False
        if not job.is_for(group):
            raise ValueError(
                f"the lease is for task {job.task.id!r} in group {job.index}, but the result is for task {group.task_id!r} in group"
                f" {group.index}"
            )
        self._settle(job, group)
        return True

    async def arrive(self, lease: str, group: Group) -> None:
        """Delivers a group that arrived through a transport.

        A group that was sampled under a lost lease, or for an earlier driver, is accepted if it is the first group with its index, no older
        version than allowed sampled it, and none of its attempts is excluded. An attempt may be excluded because the lease was lost.
        """
        if (job := self._leased.get(lease)) is not None:
            if job.is_for(group):
                self._settle(job, group)
            else:
                log.warning("a worker sent a result for group %d with the lease of group %d", group.index, job.index)
                await self._requeue([job], failed=True)
            return
        open_jobs = [job for job in (*self._waiting, *self._leased.values()) if job.index == group.index]
        if not open_jobs:
            self._early[group.index] = group
        elif open_jobs[0].accepts(group):
            self._settle(open_jobs[0], group)

    def forget(self, index: int) -> None:
        """Drops a group that has arrived but is not needed, because the store already contains a group with its index."""
        self._early.pop(index, None)

    def _settle(self, job: _Job, group: Group) -> None:
        if job.lease in self._leased:
            self._end(job)
        else:
            self._waiting.remove(job)
        if not job.result.done():
            job.result.set_result(group)

    async def lose(self, worker: str, *, failed: bool = True) -> int:
        """Requeues the groups of a worker that was lost or left, and returns the number of groups.

        `failed`: True if the worker was lost, False if it left.
        """
        self._silent_s.pop(worker, None)
        async with self._queued:
            self._queued.notify_all()  # wakes the worker's pending requests for a lease, which then return None
        lost = [job for job in self._leased.values() if job.worker == worker]
        if failed and worker not in self._lost:
            self._lost.append(worker)
        await self._requeue(lost, failed=failed)
        return len(lost)

    async def lose_silent(self) -> list[str]:
        """Requeues the groups of silent workers, and returns the names of these workers. Call this method at least every `_LOOK_S` seconds.

        One call counts at most `_LOOK_S` seconds of silence, because the driver reads no requests while its process is suspended.
        """
        now = self._clock()
        passed_s, self._looked = min(now - self._looked, _LOOK_S), now
        for worker in self._silent_s:
            self._silent_s[worker] += passed_s
        silent = [worker for worker, seconds in self._silent_s.items() if seconds > SILENT_S]
        for worker in silent:
            await self.lose(worker)
        return silent

    async def _requeue(self, jobs: list[_Job], *, failed: bool) -> None:
        faults = [self._record_loss(job) for job in jobs] if failed else []
        faults.sort(key=lambda fault: not fault.policy_reachable)
        for fault in [fault for fault in faults for _ in range(self.group_size)][: self._concurrency]:
            self._on_attempt(fault)
        for job in jobs:  # end all leases before queueing, because a result may arrive while the first job is being queued
            self._end(job)
        for job in sorted(jobs, key=lambda job: -job.index):
            await self._queue(job, first=True)

    def _record_loss(self, job: _Job) -> Failure:
        """Returns the fault for the attempts under a lost lease. Excludes the group after it has lost `MAX_LOSSES` workers."""
        self.losses += 1
        job.losses += 1
        if job.losses < MAX_LOSSES:
            return infrastructure_fault("worker", WORKER_LOST, f"rollout worker {job.worker} was lost while it sampled this group")
        why = f"{job.losses} rollout workers were lost while they sampled this group; the group is not sampled again"
        fault = infrastructure_fault("group", WORKER_LOST, why)
        if not job.result.done():
            job.result.set_result(excluded_group(job.index, job.task.id, job.task.key, fault, size=self.group_size))
        return fault

    def _end(self, job: _Job) -> None:
        """Ends the lease of a group."""
        lease = job.lease
        del self._leased[lease]
        job.lease = job.worker = ""
        self.on_end(lease)

    async def _queue(self, job: _Job, *, first: bool = False) -> None:
        """Queues a group, unless its result has already arrived, while the group was neither queued nor leased."""
        async with self._queued:
            group = self._early.pop(job.index, None)
            if group is not None and job.accepts(group) and not job.result.done():
                job.result.set_result(group)
            if job.result.done():  # arrived just now, or excluded or withdrawn in the meantime
                return
            if first:
                self._waiting.appendleft(job)
            else:
                self._waiting.append(job)
            self._queued.notify_all()  # a single notified request may be cancelled at the same moment, and the group would wait
