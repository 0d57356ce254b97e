from __future__ import annotations

import asyncio

import pytest

from agentrl.protocols import CacheUse
from agentrl.rollout import scheduling
from agentrl.rollout.scheduling import Admission
from tests.waiting import until


class Crowd:
    """Episodes that start when admitted and end on request."""

    def __init__(self, gate: Admission) -> None:
        self.gate = gate
        self.begun: list[int] = []
        self.go = asyncio.Event()
        self.jobs: list[asyncio.Task[None]] = []

    def arrive(self, count: int) -> None:
        self.jobs += [asyncio.create_task(self._run(len(self.jobs) + number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        async with self.gate:
            self.begun.append(number)
            await self.go.wait()

    async def settled(self, count: int) -> None:
        await until(lambda: len(self.begun) == count)
        await asyncio.sleep(0.02)
        assert self.begun == list(range(count)), "in the order in which they arrived, and no more"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "POLL_S", 0.001)


async def test_cache_use_limits_the_episodes_that_start() -> None:
    use: CacheUse | None = None
    crowd = Crowd(Admission(100, use=lambda: use, full=0.9))
    crowd.arrive(4)
    await crowd.settled(4)  # no reading yet
    use = CacheUse(reading=1, shares=(0.3,))
    crowd.arrive(30)
    await crowd.settled(4 + 8)  # 4 use 0.3, so 8 more would use 0.6
    use = CacheUse(reading=2, shares=(0.45,))
    await crowd.settled(12 + 12)  # they use less than estimated
    use = CacheUse(reading=3, shares=(0.95,))
    await asyncio.sleep(0.02)
    assert len(crowd.begun) == 24
    crowd.go.set()
    await crowd.settled(34)  # if none is in flight, one may always start
    await asyncio.gather(*crowd.jobs)
    assert crowd.gate.in_flight == 0


async def test_a_full_cache_delays_episodes_and_a_lost_server_does_not() -> None:
    use: CacheUse | None = CacheUse(reading=1, shares=(1.0,))
    crowd = Crowd(Admission(100, use=lambda: use, full=0.5))
    crowd.arrive(3)
    await crowd.settled(1)
    use = None
    await crowd.settled(3)
    use = CacheUse(reading=2, shares=(1.0,))
    crowd.arrive(2)
    await asyncio.sleep(0.02)
    crowd.jobs[3].cancel()  # a cancelled waiter keeps the order of the others
    use = CacheUse(reading=3, shares=(0.1,))
    await until(lambda: crowd.begun == [0, 1, 2, 4])
    crowd.go.set()
    await asyncio.gather(*crowd.jobs, return_exceptions=True)
    assert crowd.gate.in_flight == 0


async def test_the_number_of_episodes_is_limited_whatever_the_cache_use() -> None:
    crowd = Crowd(Admission(2, use=lambda: CacheUse(reading=0, shares=(0.0,)), full=0.9))
    crowd.arrive(3)
    await crowd.settled(2)
    crowd.jobs[0].cancel()
    await crowd.settled(3)
    crowd.go.set()
    await asyncio.gather(*crowd.jobs, return_exceptions=True)


async def test_a_nearly_empty_cache_limits_nothing() -> None:
    crowd = Crowd(Admission(3, use=lambda: CacheUse(reading=0, shares=(5e-324,)), full=0.9))
    crowd.arrive(3)
    await crowd.settled(3)
    crowd.go.set()
    await asyncio.gather(*crowd.jobs)


async def test_free_shares_of_several_caches_add_up_and_a_full_one_does_not_reduce_them() -> None:
    use: CacheUse | None = None
    crowd = Crowd(Admission(100, use=lambda: use, full=0.8))
    crowd.arrive(6)
    await crowd.settled(6)
    use = CacheUse(reading=1, shares=(0.9, 0.2, 0.1))  # 0.2 each: three more fit into the second, 3.5 into the third
    crowd.arrive(30)
    await crowd.settled(6 + 6)
    use = CacheUse(reading=2, shares=(0.9, 0.8, 0.9))
    await asyncio.sleep(0.02)
    assert len(crowd.begun) == 12
    use = CacheUse(reading=3, shares=(0.3, 0.2))  # one server died, and the other has room
    await crowd.settled(6 + 30)
    crowd.go.set()
    await asyncio.gather(*crowd.jobs)
