"""Processes of environments: the blame when one hangs or dies, bounds, and snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.environment import is_resumable
from agentrl.environment.pool import PooledEnvironment, ProcessPool
from agentrl.errors import EnvironmentCrash, EnvironmentFault, NeighborCrash, PluginError, PolicyFault, TaskError
from agentrl.records import EnvironmentSpec

pytestmark = pytest.mark.slow

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
    *before, hung, after = await asyncio.gather(*steps, return_exceptions=True)
    assert "returned no result within 0.5 s" in str(hung) and "another" not in str(hung)
    assert isinstance(after, EnvironmentFault) and "the environment of another episode failed" in str(after)
    assert all(isinstance(step, EnvironmentFault) and "another" in str(step) for step in before)
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


@pytest.mark.slow
@pytest.mark.parametrize("child", [False, True])
async def test_the_process_that_takes_the_most_memory_is_killed(child: bool) -> None:
    pool = ProcessPool(processes=1, timeout_s=30.0, memory=400 << 20)
    good = await opened(pool, "Count")
    spec = EnvironmentSpec(ref=f"{EXAMPLES}Hungry", options={"seconds": 20.0, "child": child})
    hungry = await pool.open(spec, alone=True)
    with pytest.raises(EnvironmentCrash, match="of memory; at most 400 are allowed"):
        await hungry.step("400")
    assert (await good.step("1")).reward == 1.0
    await pool.close()


@pytest.mark.slow
async def test_memory_between_two_operations_blames_no_environment(tmp_path: Path) -> None:
    pool = ProcessPool(processes=1, timeout_s=30.0, memory=300 << 20)
    hungry, other = await opened(pool, "Hungry", signal=str(tmp_path / "eat")), await opened(pool, "Slow", seconds=20.0)
    assert (await hungry.step("300")).observation.text == "eaten"
    (tmp_path / "eat").touch()
    process = pool._processes[0]
    async with asyncio.timeout(30):
        while process.alive:
            await asyncio.sleep(0.05)
    with pytest.raises(NeighborCrash):
        await other.step("a")
    await pool.close()


async def test_a_slow_frame_is_not_a_hang(pool: ProcessPool) -> None:
    """Each operation is within the deadline, but their sum is not."""
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
    with pytest.raises(EnvironmentFault, match=r"unexpected keyword argument 'colour'$"):  # no line of agentrl
        await opened(pool, "Count", colour="red")
    with pytest.raises(EnvironmentFault, match=r"step\(\) raised RuntimeError: the lamp broke \(tests/environment/examples\.py:\d+\)"):
        await (await opened(pool, "Faulty", how="raise")).step("a")


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


@pytest.mark.parametrize("how", ["schema", "snapshot", "part"])
async def test_a_result_that_cannot_be_sent_is_a_fault_of_only_its_episode(how: str) -> None:
    pool = ProcessPool(processes=1)
    good = await opened(pool, "Count")
    with pytest.raises(EnvironmentFault, match=r"not JSON data|bytes; at most|invalid step") as fault:
        world = await opened(pool, "Careless", how=how)
        await (world.snapshot() if how == "snapshot" else world.step("a"))
    assert type(fault.value) is EnvironmentFault
    assert (await good.step("1")).reward == 1.0
    await pool.close()


async def test_many_long_observations_at_once_are_split_into_messages() -> None:
    pool = ProcessPool(processes=1)
    worlds = [await opened(pool, "Careless", how="wide") for _ in range(8)]
    steps = await asyncio.gather(*(world.step("a") for world in worlds))
    assert {len(step.observation.text) for step in steps} == {1 << 20}
    await pool.close()


async def test_a_fork_does_not_answer(pool: ProcessPool) -> None:
    world, good = await opened(pool, "Careless", how="fork"), await opened(pool, "Count")
    assert [(await world.step("a")).observation.text for _ in range(3)] == ["on"] * 3
    assert (await good.step("2")).reward == 2.0


async def test_a_process_whose_fork_holds_its_pipes_has_ended() -> None:
    pool = ProcessPool(processes=1, timeout_s=60.0)
    world = await opened(pool, "Careless", how="orphan")
    async with asyncio.timeout(20.0):
        with pytest.raises(EnvironmentCrash, match="its process ended"):
            await world.step("a")
        await pool.close()


async def test_the_processes_of_a_killed_environment_end_too(pool: ProcessPool, tmp_path: Path) -> None:
    world = await opened(pool, "Careless", how="hanging child")
    with pytest.raises(EnvironmentCrash):
        await world.step(str(tmp_path / "pid"))
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    async with asyncio.timeout(10.0):
        while child.exists() and child.read_text().split()[2] != "Z":
            await asyncio.sleep(0.05)


async def test_a_flood_of_error_messages_is_cut(pool: ProcessPool, capfd: pytest.CaptureFixture[str]) -> None:
    world = await opened(pool, "Careless", how="flood")
    for _ in range(3):
        await world.step("a")
    await pool.close()
    assert 0 < len(capfd.readouterr().err) < 1 << 17


async def test_an_exclusive_episode_has_a_separate_process_that_ends_with_it(pool: ProcessPool) -> None:
    spec = EnvironmentSpec(ref=f"{EXAMPLES}Faulty", options={"how": "die"})
    bad = await pool.open(spec, alone=True)
    good = await opened(pool, "Count")
    with pytest.raises(EnvironmentCrash):
        await bad.step("a")
    assert (await good.step("1")).reward == 1.0
    quiet = await pool.open(EnvironmentSpec(ref=f"{EXAMPLES}Count"), alone=True)
    assert [process.alone for process in pool._processes if process.alive] == [False, True]
    await quiet.close()
    assert [process.alone for process in pool._processes if process.alive] == [False]
