"""Group leases: each group is delivered once and only by its newest lease, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InfrastructureError
from agentrl.failure import FaultRate
from agentrl.records import Failure, Group
from agentrl.rollout import excluded_group
from agentrl.rollout.faults import infrastructure_fault
from agentrl.rollout.leases import MAX_LOSSES, SILENT_S, GroupLeases, Lease
from agentrl.testing.store_contract import make_group
from tests.driving import make_task


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def result_of(lease: Lease, worker: str) -> Group:
    """Returns a group that records the worker that sampled it."""
    return excluded_group(lease.index, lease.task.id, lease.task.key, infrastructure_fault("test", worker, worker), size=1)


def sampled_by(group: Group) -> str:
    return group.episodes[0].episode.failures[0].kind


async def pass_time(leases: GroupLeases, clock: Clock, seconds: float) -> list[str]:
    """Advances the driver's clock, and returns the workers that were lost."""
    lost = []
    for _ in range(int(seconds)):
        clock.now += 1.0
        lost += await leases.lose_silent()
    return lost


@given(st.integers(min_value=0, max_value=2**32), st.integers(min_value=1, max_value=12))
def test_each_group_is_delivered_once_whatever_happens_to_its_workers(seed: int, groups: int) -> None:
    async def play() -> None:
        choose, clock = random.Random(seed), Clock()
        faults = list[Failure | None]()
        leases = GroupLeases(group_size=1, concurrency=64, on_attempt=faults.append, clock=clock)
        leases_by_worker = dict[str, list[Lease]]()
        waiting = [asyncio.create_task(leases.run_group(index, make_task(index))) for index in range(groups)]
        await asyncio.sleep(0)
        delivered = dict[int, str]()
        while len(delivered) < groups:
            worker = choose.choice("abc")
            match choose.choice(["take", "take", "finish", "finish", "die", "silent", "leave"]):
                case "take":
                    if (lease := await leases.take(worker, wait_s=0)) is not None:
                        leases_by_worker.setdefault(worker, []).append(lease)
                case "finish" if leases_by_worker.get(worker):
                    lease = leases_by_worker[worker].pop(choose.randrange(len(leases_by_worker[worker])))
                    if leases.finish(lease.id, result_of(lease, worker)):
                        assert lease.index not in delivered, "delivered once"
                        delivered[lease.index] = worker
                    assert not leases.finish(lease.id, result_of(lease, "again")), "a lease delivers once"
                case "die":
                    leases_by_worker.pop(worker, None)
                    await leases.lose(worker)
                case "silent":  # it keeps its leases and returns later
                    others = [name for name in leases_by_worker if name != worker]
                    for _ in range(int(SILENT_S) + 2):
                        await pass_time(leases, clock, 1)
                        for name in others:
                            await leases.renew(name, [lease.id for lease in leases_by_worker[name]])
                    abandoned = await leases.renew(worker, [lease.id for lease in leases_by_worker.get(worker, [])])
                    assert set(abandoned) == {lease.id for lease in leases_by_worker.get(worker, []) if not leases.is_valid(lease.id)}
                case "leave":
                    leases_by_worker.pop(worker, None)
                    await leases.lose(worker, failed=False)
                case _:
                    pass
            await asyncio.sleep(0)
            for index, running in enumerate(waiting):
                if running.done() and index not in delivered:
                    assert sampled_by(running.result()) == "worker_lost", "only a group that lost too many workers ends without a result"
                    delivered[index] = "worker_lost"
        results = await asyncio.gather(*waiting)
        assert [group.index for group in results] == list(range(groups))
        assert {group.index: sampled_by(group) for group in results} == delivered
        assert len(faults) == leases.losses, "each lost attempt is a fault, once"
        excluded = [fault for fault in faults if fault is not None and fault.policy_reachable]
        assert len(excluded) == sum(name == "worker_lost" for name in delivered.values()), "the policy may have ended several workers"
        assert leases.waiting == 0

    asyncio.run(play())


async def test_a_group_that_ends_its_workers_is_excluded() -> None:
    leases = GroupLeases(group_size=4, concurrency=64)
    waiting = asyncio.create_task(leases.run_group(7, make_task(7)))
    for attempt in range(MAX_LOSSES):
        assert not waiting.done()
        assert (lease := await leases.take(f"worker {attempt}", wait_s=1)) is not None and lease.index == 7
        await leases.lose(f"worker {attempt}")
    group = await waiting
    assert len(group.episodes) == 4 and all(scored.episode.left_out for scored in group.episodes), "excluded, with no score"
    assert sampled_by(group) == "worker_lost" and leases.losses == MAX_LOSSES


async def test_a_worker_that_leaves_costs_a_group_no_attempt() -> None:
    leases = GroupLeases(group_size=1, concurrency=64)
    waiting = asyncio.create_task(leases.run_group(0, make_task(0)))
    for number in range(3 * MAX_LOSSES):
        assert await leases.take(f"{number}", wait_s=1) is not None
        assert await leases.lose(f"{number}", failed=False) == 1
    assert not waiting.done() and leases.losses == 0
    waiting.cancel()


async def test_a_withdrawn_group_is_abandoned_by_its_worker() -> None:
    leases = GroupLeases(group_size=1, concurrency=64)
    waiting = asyncio.create_task(leases.run_group(0, make_task(0)))
    assert (lease := await leases.take("a", wait_s=1)) is not None
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await leases.renew("a", [lease.id]) == [lease.id]
    assert not leases.finish(lease.id, result_of(lease, "a"))
    withdrawn = asyncio.create_task(leases.run_group(1, make_task(1)))
    await asyncio.sleep(0)
    withdrawn.cancel()
    await asyncio.gather(withdrawn, return_exceptions=True)
    assert leases.waiting == 0


async def test_a_lease_whose_delivery_failed_is_given_to_another_worker() -> None:
    clock = Clock()
    leases = GroupLeases(group_size=1, concurrency=64, clock=clock)
    waiting = asyncio.create_task(leases.run_group(0, make_task(0)))
    assert await leases.take("a", wait_s=1) is not None  # the answer is lost
    assert await leases.renew("a", []) == [] and leases.waiting == 0, "the answer may still arrive"
    clock.now += 11
    await leases.renew("a", [])
    assert (lease := await leases.take("b", wait_s=1)) is not None and leases.losses == 0
    assert leases.finish(lease.id, result_of(lease, "b"))
    assert sampled_by(await waiting) == "b"


async def test_a_group_does_not_wait_for_a_request_that_is_cancelled_when_it_is_queued() -> None:
    leases = GroupLeases(group_size=1, concurrency=64)
    first, second = (asyncio.create_task(leases.take(worker, wait_s=30)) for worker in "ab")
    await asyncio.sleep(0)
    waiting = asyncio.create_task(leases.run_group(0, make_task(0)))
    await asyncio.sleep(0)  # the group is queued, and no request has taken it
    assert leases.waiting == 1 and first.cancel()
    assert await asyncio.wait_for(second, 5) is not None
    waiting.cancel()


async def test_a_stopped_driver_loses_no_worker() -> None:
    clock = Clock()
    leases = GroupLeases(group_size=1, concurrency=64, clock=clock)
    assert await leases.take("a", wait_s=0) is None
    clock.now += 3600.0  # SIGSTOP of the driver: the requests of its workers are unread
    assert await leases.lose_silent() == [] and leases.workers == 1
    assert await pass_time(leases, clock, SILENT_S + 1) == ["a"] and leases.workers == 0


async def test_a_worker_that_never_starts_is_lost_after_a_longer_time() -> None:
    clock = Clock()
    leases = GroupLeases(group_size=1, concurrency=64, clock=clock)
    leases.expect("a", within_s=60.0)
    leases.expect("b", within_s=60.0)
    assert await pass_time(leases, clock, 59) == []
    await leases.renew("b", [])
    assert await pass_time(leases, clock, 2) == ["a"]
    assert await pass_time(leases, clock, SILENT_S) == ["b"], "the usual timeout applies after its first request"


async def test_a_result_for_another_group_is_rejected() -> None:
    leases = GroupLeases(group_size=1, concurrency=64)
    waiting = asyncio.create_task(leases.run_group(0, make_task(0)))
    lease = await leases.take("a", wait_s=1)
    assert lease is not None
    for other in (replace(lease, index=1), replace(lease, task=make_task(3))):
        with pytest.raises(ValueError, match="the lease is for"):
            leases.finish(lease.id, result_of(other, "a"))
    assert not waiting.done() and leases.is_valid(lease.id)
    waiting.cancel()


@pytest.mark.parametrize(("deaths", "pauses"), [(1, False), (12, True)])
async def test_a_run_pauses_if_its_workers_keep_dying(deaths: int, pauses: bool) -> None:
    """Each death loses all attempts in flight, however many groups were leased. One death among finished groups pauses nothing."""
    rate = FaultRate(concurrency=16)
    leases = GroupLeases(group_size=4, concurrency=8, on_attempt=rate.record_attempt)
    watching = asyncio.create_task(rate.watch())
    groups = [asyncio.create_task(leases.run_group(index, make_task(index))) for index in range(8 * deaths)]
    for number in range(deaths):
        for _ in range(4):  # twice the concurrency, because ending groups leave slots free
            assert await leases.take(f"w{number}", wait_s=1) is not None
        await leases.lose(f"w{number}")
        lease = await leases.take("sound", wait_s=1)
        assert lease is not None and leases.finish(lease.id, result_of(lease, "sound"))
        for _ in range(4):
            rate.record_attempt(None)
    assert rate.attempt_metrics()["attempts_failed"] == 8 * deaths
    await asyncio.sleep(0)
    assert watching.done() == pauses
    if pauses:
        with pytest.raises(InfrastructureError, match=r"the run pauses: .*\n.*worker worker_lost: rollout worker w\d+ was lost while"):
            await watching
    watching.cancel()
    for group in groups:
        group.cancel()


async def test_a_result_that_arrives_while_lost_groups_are_requeued_is_rejected() -> None:
    clock = Clock()
    leases = GroupLeases(group_size=1, concurrency=64, clock=clock)
    groups = [asyncio.create_task(leases.run_group(index, make_task(index))) for index in range(3)]
    taken = [await leases.take("a", wait_s=1) for _ in range(3)]
    clock.now += 60.0
    async with leases._queued:  # another coroutine queues a group
        losing = asyncio.create_task(leases.renew("a", []))
        await asyncio.sleep(0)
        for lease in taken:
            assert lease is not None and not leases.finish(lease.id, result_of(lease, "a"))
    assert await losing == [] and leases.waiting == 3
    assert [(await leases.take("b", wait_s=1)).index for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    for group in groups:
        group.cancel()


def complete(index: int, worker: str) -> Group:
    """Returns a group with one scored attempt."""
    group = make_group(index)
    task = make_task(index)
    episodes = tuple(replace(e, episode=replace(e.episode, task_id=task.id, task_key=task.key, answer=worker)) for e in group.episodes)
    return replace(group, task_id=task.id, task_key=task.key, episodes=episodes)


@given(st.integers(min_value=0, max_value=2**32), st.integers(min_value=1, max_value=8))
def test_the_first_complete_group_of_an_index_is_delivered_whichever_worker_sampled_it(seed: int, groups: int) -> None:
    """Entries arrive late, repeatedly, under lost leases, and from the worker of an earlier driver."""

    async def play() -> None:
        choose = random.Random(seed)
        leases, stream = GroupLeases(group_size=1, concurrency=64), list[tuple[str, Group]]()
        early = {index for index in range(groups) if choose.random() < 0.3}
        for index in sorted(early):
            await leases.arrive("of an earlier driver", complete(index, "earlier"))
        running = [asyncio.create_task(leases.run_group(index, make_task(index))) for index in range(groups)]
        await asyncio.sleep(0)
        assert {index for index in range(groups) if running[index].done()} == early
        first = dict.fromkeys(early, "earlier")
        while len(first) < groups:
            worker = choose.choice("ab")
            match choose.choice(["take", "send", "fail", "die", "read", "read"]):
                case "take":
                    await leases.take(worker, wait_s=0)
                case "send" if jobs := [job for job in leases._leased.values() if job.worker == worker]:
                    job = choose.choice(jobs)
                    stream += [(job.lease, complete(job.index, job.lease))] * choose.choice([1, 1, 2])
                case "fail" if jobs := [job for job in leases._leased.values() if job.worker == worker]:
                    job = choose.choice(jobs)
                    lease = Lease(id=job.lease, index=job.index, task=job.task, oldest_version=0)
                    await leases.lose(worker, failed=False)
                    stream.append((job.lease or lease.id, result_of(lease, "failed, because its lease was lost")))
                case "die":
                    await leases.lose(worker, failed=False)
                case "read" if stream:
                    lease_id, group = stream.pop(choose.randrange(len(stream)))
                    await leases.arrive(lease_id, group)
                    if not group.episodes[0].episode.left_out:
                        first.setdefault(group.index, lease_id)
                    await asyncio.sleep(0)
                case _:
                    pass
            await asyncio.sleep(0)
            assert {index for index in range(groups) if running[index].done()} == set(first)
        results = await asyncio.gather(*running)
        assert {group.index: group.episodes[0].episode.answer for group in results} == first
        assert leases.waiting == 0 and not leases._leased
        for index in range(groups):
            leases.forget(index)
        assert not leases._early

    asyncio.run(play())


async def test_a_group_that_arrives_while_it_is_queued_is_not_sampled_again() -> None:
    leases = GroupLeases(group_size=1, concurrency=64)
    leased = asyncio.create_task(leases.run_group(0, make_task(0)))
    lease = await leases.take("a", wait_s=1)
    assert lease is not None
    async with leases._queued:  # another coroutine queues a group
        new = asyncio.create_task(leases.run_group(1, make_task(1)))
        losing = asyncio.create_task(leases._requeue([*leases._leased.values()], failed=False))
        await asyncio.sleep(0)
        await leases.arrive(lease.id, complete(0, "a"))
        await leases.arrive("earlier", complete(1, "earlier"))
    await losing
    answers = [group.episodes[0].episode.answer for group in await asyncio.wait_for(asyncio.gather(leased, new), 10)]
    assert answers == ["a", "earlier"] and leases.waiting == 0


async def test_a_group_of_another_task_or_older_weights_is_not_accepted() -> None:
    leases = GroupLeases(group_size=1, concurrency=64)
    other = replace(complete(0, "x"), task_key="0" * 64)
    await leases.arrive("earlier", complete(0, "old"))
    waiting = asyncio.create_task(leases.run_group(0, make_task(0), oldest_version=9))
    await asyncio.sleep(0)
    await leases.arrive("earlier", complete(0, "old"))
    await leases.arrive("earlier", other)
    assert not waiting.done() and leases.waiting == 1
    lease = await leases.take("a", wait_s=1)
    assert lease is not None
    await leases.arrive(lease.id, complete(1, "of another group"))
    assert not leases.is_valid(lease.id) and leases.waiting == 1 and leases.losses == 1, "otherwise the group would wait forever"
    waiting.cancel()
