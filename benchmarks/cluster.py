"""Measures the driver's cost of a run on several machines.

    python benchmarks/cluster.py driver                           # groups over HTTP and over Redis
    python benchmarks/cluster.py driver --episodes 8000 --concurrent 4000 --delay 10 30

driver: finished episodes per minute and core. This process is the driver: its interface for workers, leases, routing, token client, and the
experience store on disk. The workers are `agentrl.run.worker.Worker` in other processes, with scripted groups. Each turn of an episode is a
request to the policy, which the driver sends to a scripted server with vLLM's route, in another process. Workers would also run sandboxes
and score; the driver would also swap weights, capture failures and write metrics. Neither is included. Prints a Markdown table:

    episodes     number of finished episodes, and the maximum number in flight
    per core     finished episodes per minute of CPU time of the driver, all threads
    record       KiB of one episode as JSON
    loop lag     99th percentile of the lag of the driver's event loop
    Redis        CPU time of the Redis server as a share of the driver's
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.processes import rare_collections  # noqa: E402
from agentrl.cluster.process_host import LocalLauncher  # noqa: E402
from agentrl.config import Recipe, build  # noqa: E402
from agentrl.experience import DriverStore, SqliteStore  # noqa: E402
from agentrl.experience.redis_server import RedisServer  # noqa: E402
from agentrl.protocols import CacheUse  # noqa: E402
from agentrl.records import (  # noqa: E402
    Completion,
    Episode,
    Group,
    Message,
    SamplingParams,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    codec,
)
from agentrl.rollout.leases import GroupLeases  # noqa: E402
from agentrl.run.group_stream import GroupStream, Outbox, open_transport  # noqa: E402
from agentrl.run.worker import DriverConnection, Worker  # noqa: E402
from agentrl.run.worker_access import read_address  # noqa: E402
from agentrl.run.worker_api import WorkerApi  # noqa: E402
from agentrl.serving.client import TokenClient  # noqa: E402
from agentrl.serving.server_pool import EpisodeRouter  # noqa: E402
from agentrl.serving.weight_state import WeightState  # noqa: E402

GROUP_SIZE = 8
PROMPT_TOKENS, TOKENS = 250, 150  # of a turn: new context, and completion
REPLICAS = 16  # that the routing chooses from
SERVER = ROOT / "benchmarks" / "load" / "server.py"
ROUTE = "/inference/v1/generate"
LAG_S = 0.01
_PASSWORD = "AGENTRL_BENCHMARK_REDIS"
PARAMS = SamplingParams(max_tokens=TOKENS)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of one measurement."""

    episodes: int
    concurrent: int
    turns: int
    delay_s: tuple[float, float]  # range of the server's time for a turn
    clients: int = 1

    @property
    def groups(self) -> int:
        """Groups in total."""
        return self.episodes // GROUP_SIZE


@dataclass(kw_only=True)
class Capacity:
    """The result of one measurement."""

    episodes: int
    most_in_flight: int
    driver_cpu_s: float
    wall_s: float
    record_kib: float
    lag_ms: float
    redis_cpu_s: float | None = None

    @property
    def per_core(self) -> float:
        """Finished episodes per minute of the driver's CPU time."""
        return 60 * self.episodes / self.driver_cpu_s


def make_task(index: int) -> Task:
    """A task with a prompt of a realistic length."""
    prompt = Message(role="user", content=f"Task {index}. " + "Describe the table. " * 50)
    sandbox = SandboxSpec(image="none")
    return Task(
        id=f"task-{index}", family="benchmark", prompt=(prompt,), tools=(), sandbox=sandbox, verifiers=(), data={}, split=Split.TRAIN
    )


def make_turn(number: int) -> Turn:
    """A turn whose numbers have as many digits as those of a real one."""
    ids = tuple(1000 + (7919 * (number * TOKENS + position)) % 99_000 for position in range(TOKENS))
    return Turn(
        prompt_ids=ids[:1] * PROMPT_TOKENS,
        completion_ids=ids,
        logprobs=tuple(-0.123456789 - token / 1e6 for token in ids),
        versions=(VersionSpan(version=0, start=0, end=TOKENS),),
        message=Message(role="assistant", content="word " * TOKENS),
        finish_reason="stop",
    )


class ScriptedGroups:
    """Samples each turn through the driver, and returns groups of prepared turns."""

    group_size = GROUP_SIZE

    def __init__(self, worker: Worker, turns: int) -> None:
        self._worker, self._turns = worker, tuple(map(make_turn, range(turns)))

    async def run_group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """Samples all episodes of a group concurrently."""
        names = [f"g{index:06d}-{number}-a0" for number in range(GROUP_SIZE)]
        async with asyncio.TaskGroup() as sampling:
            for name in names:
                sampling.create_task(self._sample(name))
        trajectory = Trajectory(agent="main", turns=self._turns)
        episodes = (Episode(id=name, task_id=task.id, task_key=task.key, trajectories=(trajectory,)) for name in names)
        scored = tuple(ScoredEpisode(episode=episode, score=Score(value=1.0)) for episode in episodes)
        return Group(index=index, task_id=task.id, task_key=task.key, episodes=scored)

    async def _sample(self, name: str) -> None:
        context: list[int] = []
        for number, turn in enumerate(self._turns):
            context += turn.prompt_ids
            completion = await self._worker.generate(context, PARAMS, request_id=f"{name}-{number}", timeout_s=600.0)
            context += completion.token_ids


async def run_client(folder: Path, lanes: int, turns: int) -> None:
    """Works for the driver until the driver ends."""
    url, key = read_address(folder)
    driver = DriverConnection(url, key, worker=f"client-{os.getpid()}")
    redis = json.loads(await driver.call("/spec"))["redis"]
    worker = Worker(driver, lanes, Outbox(open_transport(redis)) if redis else None)
    with contextlib.suppress(BaseExceptionGroup):  # a lane ends with an error when the driver closes
        async with rare_collections():
            await worker.run(ScriptedGroups(worker, turns))  # type: ignore[arg-type]
    driver.close()


class ScriptedServed:
    """The policy's servers: the routing of a pool, and the token client of a server that is scripted."""

    version, sha256, token_s = 0, "0" * 64, 0.01
    cache_use = CacheUse(reading=1, shares=(0.5,))

    def __init__(self, url: str) -> None:
        self._client = TokenClient(url, weights=WeightState(0))
        self._routing = EpisodeRouter(REPLICAS, apart=GROUP_SIZE)
        self._able = range(REPLICAS)
        self.in_flight: set[str] = set()
        self.most_in_flight = 0

    @contextmanager
    def episode(self, episode_id: str, task_key: str) -> Iterator[None]:
        """As `ServerPool.episode`."""
        self._routing.begin(episode_id, task_key)
        self.in_flight.add(episode_id)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        try:
            yield
        finally:
            self._routing.end(episode_id)
            self.in_flight.remove(episode_id)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """As `ServerPool.generate`, with all servers able."""
        episode_id = request_id.rpartition("-")[0]
        self._routing.choose(episode_id, len(prompt_ids), able=self._able)
        completion = await self._client.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self._routing.record_context(episode_id, len(prompt_ids) + len(completion.token_ids))
        return completion

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


@contextmanager
def scripted_server(folder: Path, delay_s: tuple[float, float]) -> Iterator[str]:
    """Runs the scripted server. Yields its address."""
    content = [{"token_id": token, "logprob": -0.1234567, "top_logprobs": []} for token in make_turn(0).completion_ids]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "token_ids": list(make_turn(0).completion_ids)}
    choice["weight_versions"] = [{"version": "0", "start": 0, "end": TOKENS}]
    script = {
        "answers": {ROUTE: [json.dumps({"request_id": "r", "choices": [choice]})]},
        "delay_s": delay_s,
        "delay_from": -1,  # the script counts ends of messages, and there are none
        "end": 0,
    }  # no message ends, so each is turn -1
    (folder / "script.json").write_text(json.dumps(script))
    with subprocess.Popen(
        [sys.executable, str(SERVER), str(folder / "script.json")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def cpu_s(pid: int) -> float:
    """CPU seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def watch_lag(lags: list[float]) -> None:
    """Appends the lag of the event loop, in seconds, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_S
        await asyncio.sleep(LAG_S)
        lags.append(loop.time() - due)


@contextlib.asynccontextmanager
async def stream_of(folder: Path, store: DriverStore, leases: GroupLeases, server: RedisServer | None) -> AsyncIterator[dict[str, Any]]:
    """Yields what workers need to open the stream; empty without one."""
    if server is None:
        yield {}
        return
    address, _, path = server.url.partition("@")
    os.environ[_PASSWORD] = address.rpartition(":")[2]
    options = {"url": f"unix://{path}", "password": f"env:{_PASSWORD}"}
    recipe: Recipe = build(
        {
            "name": "b",
            "policy": {"model": "m"},
            "tasks": {"family": "a:b"},
            "rollout": {"workers": 1},
            "store": {"ref": "redis", "options": options},
        }
    )
    stream = GroupStream(recipe, folder, store, launcher=LocalLauncher(folder), alert=print)
    async with stream.serving(lambda arrival: leases.arrive(arrival.lease, arrival.group), leases.forget) as opened:
        yield opened


async def measure_driver(load: Load, folder: Path, server: RedisServer | None) -> Capacity:
    """Takes all episodes of the load from workers in other processes."""
    store = await DriverStore.open(partial(SqliteStore, folder / "experience.sqlite"))
    leases = GroupLeases(group_size=GROUP_SIZE, concurrency=load.concurrent // load.clients)
    slots, lags, records = asyncio.Semaphore(load.concurrent // GROUP_SIZE), list[float](), list[int]()
    lanes = -(-load.concurrent // GROUP_SIZE // load.clients)
    with scripted_server(folder, load.delay_s) as url:
        served = ScriptedServed(url)

        async def take(index: int) -> None:
            async with slots:
                group = await leases.run_group(index, make_task(index))
                await store.put(group)
            if not records:
                records.append(len(codec.to_json(group.episodes[0].episode)))

        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(rare_collections())  # as in a run
            redis = await stack.enter_async_context(stream_of(folder, store, leases, server))
            api = WorkerApi(
                folder=folder,
                spec={"redis": redis},
                leases=leases,
                served=served,  # type: ignore[arg-type]
                on_attempt=lambda failure: None,
                alert=print,
            )
            await stack.enter_async_context(api.serving())
            command = [sys.executable, __file__, "client", str(folder), str(lanes), str(load.turns)]
            clients = [subprocess.Popen(command) for _ in range(load.clients)]
            stack.callback(lambda: [client.kill() for client in clients])
            while leases.workers < load.clients:
                await asyncio.sleep(0.05)
            began, redis_began = time.perf_counter(), 0.0 if server is None else cpu_s(server.pid)
            used = resource.getrusage(resource.RUSAGE_SELF)
            watching = asyncio.create_task(watch_lag(lags))
            async with asyncio.TaskGroup() as taking:
                for index in range(load.groups):
                    taking.create_task(take(index))
            watching.cancel()
            now = resource.getrusage(resource.RUSAGE_SELF)
            result = Capacity(
                episodes=load.groups * GROUP_SIZE,
                most_in_flight=served.most_in_flight,
                driver_cpu_s=now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
                wall_s=time.perf_counter() - began,
                record_kib=records[0] / 1024,
                lag_ms=1000 * sorted(lags)[int(0.99 * len(lags))],
                redis_cpu_s=None if server is None else cpu_s(server.pid) - redis_began,
            )
        for client in clients:
            client.wait()
        await served.close()
    stored = len(await store.entries())
    await store.close()
    if stored != load.groups:
        raise RuntimeError(f"the store has {stored} of {load.groups} groups")
    return result


def driver_part(load: Load, transports: Sequence[str]) -> dict[str, Capacity]:
    """Measures the driver with each transport, one after the other. Prints the table."""
    print(f"{load.turns} turns of {PROMPT_TOKENS} + {TOKENS} tokens, groups of {GROUP_SIZE}, load average {os.getloadavg()[0]:.1f}\n")
    print("| groups over | episodes | in flight | per core | record | loop lag | Redis | wall |")
    print("| --- " * 8 + "|")
    results: dict[str, Capacity] = {}
    for transport in transports:
        with tempfile.TemporaryDirectory() as name:
            server = RedisServer(LocalLauncher(Path(name)), Path(name) / "redis") if transport == "redis" else None
            try:
                if server is not None:
                    asyncio.run(server.start())
                    server.wait_ready()
                result = results[transport] = asyncio.run(measure_driver(load, Path(name), server))
            finally:
                if server is not None:
                    asyncio.run(server.close())
        share = "-" if result.redis_cpu_s is None else f"{result.redis_cpu_s / result.driver_cpu_s:.1%}"
        print(
            f"| {transport} | {result.episodes} | {result.most_in_flight} | {result.per_core:,.0f}/min | {result.record_kib:.1f} KiB |"
            f" {result.lag_ms:.0f} ms | {share} | {result.wall_s:.0f} s |",
            flush=True,
        )
    return results


def main() -> int:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    driver = parts.add_parser("driver", help="measure finished episodes per minute and core of the driver")
    driver.add_argument("--episodes", type=int, default=8000)
    driver.add_argument("--concurrent", type=int, default=4000)
    driver.add_argument("--turns", type=int, default=4)
    driver.add_argument("--delay", type=float, nargs=2, default=(10.0, 30.0), help="range of seconds that the server takes for a turn")
    driver.add_argument("--clients", type=int, default=2, help="number of processes with workers")
    driver.add_argument("--transport", nargs="+", choices=("http", "redis"), default=["http", "redis"])
    client = parts.add_parser("client")
    client.add_argument("folder", type=Path)
    client.add_argument("lanes", type=int)
    client.add_argument("turns", type=int)
    args = parser.parse_args()
    if args.part == "client":
        asyncio.run(run_client(args.folder, args.lanes, args.turns))
        return 0
    load = Load(episodes=args.episodes, concurrent=args.concurrent, turns=args.turns, delay_s=tuple(args.delay), clients=args.clients)
    driver_part(load, args.transport)
    return 0


if __name__ == "__main__":
    sys.exit(main())
