"""Processes of environments: who is at fault when one hangs or dies, bounds, and snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentrl.environment import is_resumable
from agentrl.environment.pool import PooledEnvironment, ProcessPool
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError
from agentrl.records import EnvironmentSpec

EXAMPLES = "tests.environment.examples:"


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(processes=1, timeout_s=0.5)
    yield pool
    await pool.close()


async def opened(pool: ProcessPool, name: str, seed: int = 0, **options: object) -> PooledEnvironment:
    return await pool.open(EnvironmentSpec(ref=f"{EXAMPLES}{name}", seed=seed, options=options))


async def test_only_the_environment_that_hangs_is_at_fault(pool: ProcessPool) -> None:
    good = [await opened(pool, "Count") for _ in range(4)]
    bad = await opened(pool, "Faulty", how="hang")
    more = await opened(pool, "Count")
    steps = [environment.step("1") for environment in (*good, bad, more)]
    *done, hung, after = await asyncio.gather(*steps, return_exceptions=True)
    assert "gave no result within 0.5 s" in str(hung) and "another" not in str(hung)
    assert isinstance(after, EnvironmentFault) and "the environment of another episode failed" in str(after)
    assert all(isinstance(step, EnvironmentFault) and "another" in str(step) for step in done)
    fresh = await opened(pool, "Count")  # in a new process
    assert (await fresh.step("1")).reward == 1.0


async def test_a_process_that_dies_fails_its_episodes_once_and_is_replaced(pool: ProcessPool) -> None:
    good, bad = await opened(pool, "Count"), await opened(pool, "Faulty", how="die")
    died, other = await asyncio.gather(bad.step("a"), good.step("1"), return_exceptions=True)
    assert "its process ended" in str(died) and "another" not in str(died)
    assert "another episode" in str(other)
    with pytest.raises(EnvironmentFault, match="has ended"):
        await good.step("1")
    await good.close()
    assert (await (await opened(pool, "Count")).step("2")).reward == 2.0


async def test_a_slow_frame_is_not_a_hang(pool: ProcessPool) -> None:
    """Each operation is within the deadline, all together are not."""
    environments = [await opened(pool, "Slow", seconds=0.2) for _ in range(6)]
    steps = await asyncio.gather(*(environment.step("a") for environment in environments))
    assert [step.observation.text for step in steps] == ["done"] * 6


async def test_a_cancelled_step_leaves_the_others_in_order(pool: ProcessPool) -> None:
    slow, good = await opened(pool, "Slow", seconds=0.2), await opened(pool, "Count")
    waiting = asyncio.ensure_future(slow.step("a"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    assert (await good.step("3")).observation.text == "total 3"


async def test_a_snapshot_continues_in_another_environment(pool: ProcessPool) -> None:
    first, second, plain = await opened(pool, "Count"), await opened(pool, "Count"), await opened(pool, "Faulty")
    await first.step("2")
    assert is_resumable(first) and not is_resumable(plain)
    assert (await second.restore(await first.snapshot())).text == "total 2"
    assert (await second.step("1")).observation.text == "total 3"


async def test_faults_have_their_blame(pool: ProcessPool) -> None:
    with pytest.raises(TaskError, match="no such level"):
        await (await opened(pool, "Faulty", how="task")).step("a")
    with pytest.raises(PolicyFault, match="write a number"):
        await (await opened(pool, "Count")).step("x")
    with pytest.raises(TaskError, match=r"[Nn]o module"):
        await pool.open(EnvironmentSpec(ref="tests.environment.nowhere:Guess"))
    with pytest.raises(EnvironmentFault, match="unexpected keyword"):
        await opened(pool, "Count", colour="red")


async def test_an_environment_that_prints_and_reads_does_not_disturb_the_messages(pool: ProcessPool) -> None:
    environment = await opened(pool, "Loud")
    assert (await environment.step("a")).observation.text == "''"


async def test_processes_end_with_the_pool() -> None:
    pool = ProcessPool(processes=2)
    environment = await opened(pool, "Count")
    process = pool._processes[0]._process
    await pool.close()
    assert process.returncode is not None
    with pytest.raises(EnvironmentFault):
        await environment.step("1")


def test_an_unknown_kind_is_reported() -> None:
    from agentrl.environment.opening import kind_of

    with pytest.raises(PluginError, match="is not an environment"):
        kind_of("tests.environment.examples:random")
