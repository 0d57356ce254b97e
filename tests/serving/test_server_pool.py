"""One policy on several scripted servers that die at the worst moments: affinity, liveness, versions, swaps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.base.files import sha256_file
from agentrl.config import GroupConfig, PolicyConfig, Recipe, RolloutConfig, ServingConfig, TasksConfig
from agentrl.errors import ServingError, SwapError
from agentrl.protocols import CacheUse
from agentrl.records import Completion, PolicyVersion, Probe, SamplingParams, SwapReport, VersionSpan, VersionState, codec
from agentrl.serving import UnsentError, server_pool, supervisor
from agentrl.serving.process import thread_count
from agentrl.serving.server import VLLMServer, server_log_name
from agentrl.serving.server_pool import ServerPool, max_load_lead
from agentrl.version import FolderRegistry
from tests.waiting import until

RECIPE = Recipe(
    name="replicas",
    policy=PolicyConfig(model="unused"),
    tasks=TasksConfig(family="unused:unused"),
    rollout=RolloutConfig(group=GroupConfig(size=4), groups_per_step=4, concurrency=12),
    serving=ServingConfig(replicas=3, startup_timeout_s=30.0),
)
PARAMS = SamplingParams(max_tokens=4)

During = Callable[["Server", PolicyVersion], Awaitable[None]]


class Server:
    """A scripted server: a weight version, and whether it is alive."""

    newest: ClassVar[dict[int, Server]] = {}  # by replica
    started: ClassVar[list[tuple[int, int]]] = []  # replica, version
    probed: ClassVar[list[tuple[int, int]]] = []  # replica, version
    broken: ClassVar[set[int]] = set()  # replicas that do not start any more

    def __init__(self, *, version: int, name: str, **_: object) -> None:
        self.replica, self.weights, self.dead, self.reason = int(name), version, False, ""
        self.request_ids: list[str] = []
        self.released = asyncio.Event()  # requests wait until it is set
        self.released.set()
        self.control, self.share, self.end_reason = self, 0.0, "it died"

    async def differs(self, number: int, probe: Probe) -> float:
        """Replaces `agentrl.serving.probe.max_logprob_difference`."""
        self.probed.append((self.replica, number))
        return 0.0

    async def metrics(self) -> dict[str, float]:
        return {"vllm:kv_cache_usage_perc": self.share}

    async def start(self) -> None:
        await asyncio.sleep(0.01)
        if self.replica in self.broken:
            raise ServingError("it does not start")
        self.newest[self.replica] = self
        self.started.append((self.replica, self.weights))

    async def alive(self) -> bool:
        return not self.dead

    def mark_unsound(self, reason: str) -> None:
        self.dead, self.reason = True, reason

    async def was_killed(self) -> bool:
        return False

    def kill(self) -> None:
        self.dead = True

    async def stop(self) -> None:
        self.dead = True
        self.released.set()


class Channel:
    """Swaps weights. `during` runs in the middle of a swap and may kill the server or raise."""

    during: ClassVar[During | None] = None

    def __init__(self, config: ServingConfig, server: Server, **_: object) -> None:
        self.server = server

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, **_: object) -> SwapReport:
        await asyncio.sleep(0.002)
        if Channel.during is not None:
            await Channel.during(self.server, version)
        if self.server.dead:
            raise SwapError("cannot reach the inference server")
        self.server.weights = version.number
        replica = self.server.replica
        return SwapReport(version=version.number, stall_ms=1.0 + replica, total_ms=9.0, probe_max_abs_diff=0.1 * replica)

    async def close(self) -> None:
        pass


class Client:
    """Answers with the version of its server's weights."""

    def __init__(self, server: Server) -> None:
        self.server, self.closed = server, False

    @classmethod
    def for_server(cls, server: Server) -> Client:
        return cls(server)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        await asyncio.sleep(0)
        if self.server.dead or self.closed:
            raise UnsentError("cannot reach the inference server")
        self.server.request_ids.append(request_id)
        version = self.server.weights
        await self.server.released.wait()
        if self.server.dead:
            raise ServingError("the connection was closed before the answer")
        spans = (VersionSpan(version=version, start=0, end=2),)
        return Completion(token_ids=(7, self.server.replica), logprobs=(-1.0, -1.0), versions=spans, finish_reason="stop")

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, double in (("VLLMServer", Server), ("open_channel", Channel), ("TokenClient", Client)):
        monkeypatch.setattr(supervisor, name, double)
    monkeypatch.setattr(supervisor, "max_logprob_difference", Server.differs)
    monkeypatch.setattr(supervisor, "_WATCH_S", 0.005)
    monkeypatch.setattr(Server, "probed", [])
    monkeypatch.setattr(server_pool, "POLL_S", 0.002)
    for owner, name, empty in ((Server, "newest", {}), (Server, "started", []), (Server, "broken", set()), (Channel, "during", None)):
        monkeypatch.setattr(owner, name, empty)


def publish(registry: FolderRegistry, number: int, weights: bytes = b"") -> PolicyVersion:
    folder = registry.folder / f"{number:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights or bytes([number]))
    if number:
        (folder / "probe.json").write_bytes(codec.to_json(Probe(token_ids=((1, 2),), logprobs=((-1.0,),))))
    sha256 = sha256_file(folder / "model.safetensors")
    version = PolicyVersion(number=number, parent=number - 1 if number else None, folder=f"versions/{number:06d}", sha256=sha256)
    registry.add(version)
    return version


@asynccontextmanager
async def running(run: Path, recipe: Recipe = RECIPE) -> AsyncIterator[tuple[ServerPool, FolderRegistry, asyncio.Task[None]]]:
    """Version 0 on every replica, watched."""
    registry = FolderRegistry(run / "versions")
    base = publish(registry, 0)
    policy = ServerPool(recipe, run, registry)
    await policy.start(base)
    registry.set_state(0, VersionState.SERVING)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    try:
        async with asyncio.timeout(60):
            yield policy, registry, watcher
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await policy.close()
        registry.close()


async def ask(policy: ServerPool, episode: str, turn: int = 0, tokens: int = 10) -> tuple[int, int]:
    """The replica that answered, and the version it sampled with."""
    answer = await policy.generate((1,) * tokens, PARAMS, request_id=f"{episode}-{turn}", timeout_s=5.0)
    return answer.token_ids[1], answer.versions[0].version


def weights() -> list[int]:
    return [Server.newest[replica].weights for replica in sorted(Server.newest)]


async def test_episodes_stay_with_their_replica_groups_together_and_replicas_share_the_load(tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, _, _):
        with ExitStack() as episodes:
            homes = {}
            for group in range(3):
                for member in range(4):
                    name = f"g{group}-{member}-a0"
                    episodes.enter_context(policy.episode(name, f"task {group}"))
                    homes[name] = (await ask(policy, name))[0]
            assert sorted(homes.values()) == [0] * 4 + [1] * 4 + [2] * 4
            assert all(len({home for name, home in homes.items() if name.startswith(f"g{group}-")}) == 1 for group in range(3))
            for turn in range(1, 4):
                for name, home in random.sample(sorted(homes.items()), len(homes)):
                    assert await ask(policy, name, turn, tokens=10 + 10 * turn) == (home, 0)
            figures = policy.figures()
            assert figures["replicas_able"] == 3 and figures["episodes_moved"] == 0
            assert [figures[f"replica{n}_tokens"] for n in range(3)] == [2 * 4 * 4] * 3
            assert [figures[f"replica{n}_load"] for n in range(3)] == [4 * 42] * 3
        figures = policy.figures()
        assert [figures[f"replica{n}_{figure}"] for n in range(3) for figure in ("tokens", "load", "restarts")] == [0] * 9


async def test_a_request_of_a_placed_episode_checks_only_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as (policy, _, _):
        with policy.episode("g0-0-a0", "task 0"):
            chosen = (await ask(policy, "g0-0-a0"))[0]
            looks: list[int] = []
            is_able = policy._is_able
            monkeypatch.setattr(policy, "_is_able", lambda number: looks.append(number) or is_able(number))
            assert (await ask(policy, "g0-0-a0", 1))[0] == chosen
            assert looks == [chosen], "checking thousands of servers would take a third of the driver's time"
            Server.newest[chosen].dead = True
            await policy._replicas[chosen].check_died()
            assert (await ask(policy, "g0-0-a0", 2))[0] != chosen


async def test_a_dead_replica_loses_only_requests_in_flight(tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, _, _):
        with ExitStack() as episodes:
            for number in range(3):
                episodes.enter_context(policy.episode(f"e{number}", f"task {number}"))
                assert (await ask(policy, f"e{number}", tokens=10 + number))[0] == number
            lost = Server.newest[1]
            lost.released.clear()
            in_flight = asyncio.create_task(ask(policy, "e1", 1))
            await until(lambda: len(lost.request_ids) == 2)
            lost.dead = True
            lost.released.set()
            with pytest.raises(ServingError, match="closed before the answer"):
                await in_flight
            new_replica, _ = await ask(policy, "e1", 2, tokens=30)  # immediately, before the restart
            assert new_replica != 1 and (await ask(policy, "e0", 1))[0] == 0 and (await ask(policy, "e2", 1))[0] == 2
            await until(lambda: Server.newest[1] is not lost and policy.figures()["replicas_able"] == 3)
            assert (await ask(policy, "e1", 3))[0] == new_replica, "the episode stays with the replica that has its context"
            episodes.enter_context(policy.episode("e3", "task 3"))
            assert (await ask(policy, "e3"))[0] == 1 and policy.restarts == 1
            assert policy.figures()["episodes_moved"] == 1


async def test_requests_wait_for_the_first_replica_to_come_back(tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, _, _):
        for server in Server.newest.values():
            server.dead = True
        answers = await asyncio.gather(*(ask(policy, f"e{number}") for number in range(50)))
        assert len(answers) == 50 and {version for _, version in answers} == {0}
    late = RECIPE.but({"serving.startup_timeout_s": 0.05})
    async with running(tmp_path / "late", late) as (policy, _, watcher):
        watcher.cancel()
        for server in Server.newest.values():
            server.dead = True
        with pytest.raises(ServingError, match="no inference server became ready again"):
            await ask(policy, "e")


async def test_a_version_is_announced_when_every_replica_has_it(tmp_path: Path) -> None:
    order: list[tuple[int, int]] = []  # replica, and the version that the run served at that time

    async with running(tmp_path) as (policy, registry, _):

        async def during(server: Server, version: PolicyVersion) -> None:
            order.append((server.replica, policy.version))

        Channel.during = during
        waiting = asyncio.create_task(policy.wait_version(1))
        report = await policy.swap(publish(registry, 1))
        await waiting
        assert order[0] == (0, 0) and sorted(order[1:]) == [(1, 0), (2, 0)], "one replica first, then the others"
        assert weights() == [1, 1, 1] and policy.version == 1 and policy.sha256 == registry.get(1).sha256  # type: ignore[union-attr]
        assert (report.version, report.stall_ms, report.probe_max_abs_diff) == (1, 3.0, 0.2), "the maximum over the replicas"
        assert registry.get(1).state is VersionState.SERVING  # type: ignore[union-attr]


@pytest.mark.parametrize("victim", [0, 2])
async def test_a_replica_that_dies_in_a_swap_catches_up(victim: int, tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, registry, _):

        async def during(server: Server, version: PolicyVersion) -> None:
            if server.replica == victim and not policy.restarts:
                server.dead = True

        Channel.during = during
        await policy.swap(publish(registry, 1))
        assert policy.version == 1 and sum(number == 1 for number in weights()) >= 2
        await until(lambda: weights() == [1, 1, 1] and policy.figures()["replicas_able"] == 3)
        assert policy.restarts == 1


async def test_a_replica_that_starts_during_a_swap_gets_no_request_before_its_swap(tmp_path: Path) -> None:
    starting = asyncio.Event()
    async with running(tmp_path) as (policy, registry, _):
        original, may_start, behind = Server.start, asyncio.Event(), 0

        async def slow_start(server: Server) -> None:
            starting.set()
            await may_start.wait()  # it starts with version 0; the others have version 1 before it is up
            await original(server)

        async def during(server: Server, version: PolicyVersion) -> None:
            nonlocal behind
            if server.replica == 1:
                behind += 1
                assert policy._ready() == [0, 2], "replica 1 is up, with an old version"
                assert {(await ask(policy, f"new{n}"))[1] for n in range(6)} == {1}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Server, "start", slow_start)
            Server.newest[1].dead = True
            await starting.wait()
            await policy.swap(publish(registry, 1))
            assert policy.version == 1
            Channel.during = during
            may_start.set()
            await until(lambda: policy._ready() == [0, 1, 2])
        assert Server.started[-1] == (1, 0) and weights() == [1, 1, 1] and behind > 0


async def test_a_version_rejected_by_the_first_replica_reaches_no_other(tmp_path: Path) -> None:
    replicas: list[int] = []

    async def during(server: Server, version: PolicyVersion) -> None:
        replicas.append(server.replica)
        raise SwapError("the probe disagrees")

    async with running(tmp_path) as (policy, registry, _):
        Channel.during = during
        with pytest.raises(SwapError, match="the probe disagrees"):
            await policy.swap(publish(registry, 1))
        assert replicas == [0, 0, 0] and policy.version == 0 and weights() == [0, 0, 0] and policy.restarts == 0


async def test_a_replica_that_rejects_a_served_version_is_replaced(tmp_path: Path) -> None:
    async def during(server: Server, version: PolicyVersion) -> None:
        if server.replica == 1 and server is first:
            raise SwapError("the probe disagrees")

    async with running(tmp_path) as (policy, registry, _):
        first = Server.newest[1]
        Channel.during = during
        await policy.swap(publish(registry, 1))
        assert policy.version == 1 and first.reason == "it rejects version 1"
        await until(lambda: weights() == [1, 1, 1])
        assert policy.restarts == 1


@pytest.mark.parametrize("removed", [False, True])
async def test_a_version_retracted_during_a_swap_stays_on_no_replica(removed: bool, tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, registry, _):
        await policy.swap(publish(registry, 1))

        async def during(server: Server, version: PolicyVersion) -> None:
            if version.number != 2:
                return
            if removed:
                registry.reconcile(1)
            elif server.replica:
                registry.set_state(2, VersionState.ROLLED_BACK)
                raise SwapError("its folder is gone")

        Channel.during = during
        with pytest.raises(SwapError, match="has no probe.json in" if removed else "its folder is gone"):
            await policy.swap(publish(registry, 2))
        assert policy.version == 1 and weights() == [1, 1, 1] and policy.restarts == 0
        Channel.during = None
        next_version = publish(registry, 2 if removed else 3, b"again")
        await policy.swap(next_version)
        assert policy.version == next_version.number and weights() == [next_version.number] * 3


@pytest.mark.parametrize("back_to", [1, 0])
async def test_all_replicas_fall_back_with_the_learner(back_to: int, tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, registry, _):
        for number in (1, 2):
            await policy.swap(publish(registry, number))
        registry.reconcile(back_to)
        target = registry.get(back_to)
        assert target is not None
        original, ready = Server.start, []

        async def recording_start(server: Server) -> None:
            ready.append(policy._ready())
            await original(server)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Server, "start", recording_start)
            await policy.fall_back(target)
        assert ready == ([] if back_to else [[1, 2], [0], [0]]), "version 0 has no probe to swap with; some replicas stay ready"
        assert policy.version == back_to and weights() == [back_to] * 3 and policy.sha256 == target.sha256
        next_version = publish(registry, back_to + 1, b"again")
        await policy.swap(next_version)
        assert weights() == [back_to + 1] * 3 and policy.sha256 == next_version.sha256


async def test_a_restarted_replica_loads_the_served_version(tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, registry, _):
        for number in (1, 2):
            await policy.swap(publish(registry, number))
        registry.set_state(2, VersionState.ROLLED_BACK)  # it serves until its successor is ready
        Server.newest[1].dead = True
        await until(lambda: policy.restarts == 1 and policy._ready() == [0, 1, 2])
        assert Server.started[-1] == (1, 2) and policy.version == 2
        for server in Server.newest.values():
            server.dead = True
        for replica in policy._replicas:  # all are detected dead at once; a single one would start with the version of the others
            replica._gone = replica._server
        assert (await ask(policy, "e"))[1] == policy.version == 1, "the newest version that was not rolled back"
        await until(lambda: policy._ready() == [0, 1, 2])
        await policy.swap(publish(registry, 3))
        assert weights() == [3, 3, 3]


async def test_a_failing_replica_is_abandoned_and_the_last_one_ends_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, registry, watcher):
        Server.broken |= {0, 1, 2}
        for victim, remaining in ((1, [0, 2]), (2, [0])):
            Server.newest[victim].dead = True
            while policy._ready() != remaining:
                await asyncio.sleep(0.005)
            assert (await ask(policy, "e"))[0] in remaining and not watcher.done()
        await policy.swap(publish(registry, 1))
        assert policy.version == 1 and policy.figures()["replicas_able"] == 1
        Server.newest[0].dead = True
        with pytest.raises(ExceptionGroup) as error:
            await watcher
        assert error.group_contains(ServingError, match="it does not start")


@pytest.mark.parametrize("seed", range(2))
async def test_no_request_is_sampled_with_a_version_older_than_served(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers die at random during swaps and requests: no answer is older than the version announced before its request."""
    rng, stale, answered = random.Random(seed), [], 0
    monkeypatch.setattr(supervisor, "_RESTARTS", 10**6)
    async with running(tmp_path) as (policy, registry, _):

        async def episode(number: int) -> None:
            nonlocal answered
            while policy.version < 6:
                name = f"e{number}-{rng.randrange(10**9)}"
                with policy.episode(name, f"task {number % 5}"):
                    for turn in range(4):
                        announced = policy.version
                        try:
                            _, version = await ask(policy, name, turn, 10 + turn)
                        except ServingError:
                            break  # it was in flight on a replica that died
                        answered += 1
                        if version < announced:
                            stale.append((announced, version))
                        await asyncio.sleep(rng.random() / 500)

        async def kill() -> None:
            while True:
                await asyncio.sleep(rng.random() / 50)
                rng.choice(list(Server.newest.values())).dead = True

        killer = asyncio.create_task(kill())
        players = [asyncio.create_task(episode(number)) for number in range(20)]
        for number in range(1, 7):
            await policy.swap(publish(registry, number))
            assert policy.version == number
            await asyncio.sleep(0.01)
        killer.cancel()
        await asyncio.gather(*players)
        await until(lambda: weights() == [6, 6, 6] and len(policy._ready()) == 3)
        assert stale == [] and answered > 100 and policy.restarts > 1
        assert policy._routing.loads == [0, 0, 0]


async def test_cache_use_covers_each_replica(tmp_path: Path) -> None:
    async with running(tmp_path) as (policy, _, _):
        for number, (reading, share) in enumerate([(8, 0.5), (4, 0.95), (8, 0.2)]):
            policy._replicas[number].cache_use = CacheUse(reading=reading, shares=(share,))
        assert policy.cache_use == CacheUse(reading=4, shares=(0.5, 0.95, 0.2)) and policy._full() == [1]
        assert policy.figures()["replica1_cache_use"] == 0.95


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"group.size": 8, "groups_per_step": 16, "concurrency": 64}, 8),
        ({"group.size": 64, "groups_per_step": 1, "concurrency": 256}, 21),
        ({"group.size": 32, "groups_per_step": 4, "concurrency": 12}, 4),
        ({"group.size": 2, "groups_per_step": 1, "concurrency": 64}, 1),
    ],
)
def test_the_largest_load_lead(rollout: dict[str, Any], expected: int) -> None:
    assert max_load_lead(RECIPE.but({f"rollout.{key}": value for key, value in rollout.items()})) == expected


def test_each_replica_has_a_separate_log_and_a_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("", "0", "gate")
    pool = [VLLMServer(recipe=RECIPE, model=tmp_path, version=0, run_dir=tmp_path, name=name) for name in names]
    assert [server.log_path.name for server in pool] == ["server.log", "server-0.log", "server-gate.log"] == [*map(server_log_name, names)]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [thread_count(threads, servers=servers) for threads, servers in ((0, 1), (0, 3), (0, 9), (5, 2))] == [8, 2, 1, 5]
