"""Simulates a run on 64 to 4,096 GPUs: where driver, Redis, routing and weight distribution saturate.

    python benchmarks/scale.py
    python benchmarks/scale.py --gpus 1024 --agents 10000 --episode-s 600 --driver-cores 1

The schedule is that of `benchmarks.asynchronous`: the code of a run decides which groups start and which a step takes. Attempts consist of
turns. Each turn, and each finished group, occupies the driver for its measured time, and waits for it in order of arrival. Finished groups
then occupy Redis and the disk. A version passes the link of the learner to the driver, then is relayed to the servers. The speed of servers
and learner is assumed, so throughput is relative to a run in which all other parts take no time.

Constants are measured on one core of the machine in docs/scale.md, unless they say otherwise:

    turn_s, group_s     the driver's CPU time for one request to the policy, and for one finished group (`benchmarks/cluster.py driver`)
    redis_s, disk_s     time of one group in a batch of 16, until it is durable (`benchmarks/stores.py`)
    route_s             time of the routing for one request and server; the first request of an attempt reads all (`--measure-routing`)
    link                bytes per second of each machine; assumed
    relay               time of the distribution to all servers divided by that to one; assumed from the chunked relay

Prints a Markdown table. `driver`, `Redis`, `disk` and `learner` are busy shares; `weights` is the time from the end of a step until all
servers have its version, divided by the time of a step; `limit` is the part with the largest share.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simpy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.experience import GroupOrder
from agentrl.protocols import CacheUse
from agentrl.serving.server_pool import EpisodeRouter, ServerPool
from benchmarks.asynchronous import GROUP_SIZE, RunningGroup, Simulation, ages_of

LEARNER_SHARE = 0.25  # of the GPUs


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each shared part. The module's docstring has their sources."""

    turn_s: float = 0.0022
    group_s: float = 0.012
    redis_s: float = 1 / 521
    disk_s: float = 1 / 1282
    route_s: float = 1.0e-7

    def without(self) -> Costs:
        """All parts take no time."""
        return Costs(turn_s=0.0, group_s=0.0, redis_s=0.0, disk_s=0.0, route_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One simulated run."""

    gpus: int
    agents: int
    turns: int
    episode_s: float  # mean duration of an attempt without waiting for the driver
    weights: float  # bytes of a version
    link: float  # bytes per second
    relay: float
    learner_share: float  # of the GPUs
    max_staleness: int
    steps: int
    driver_cores: int
    costs: Costs = field(default_factory=Costs)

    @property
    def servers(self) -> int:
        """Servers of the policy, a GPU each."""
        return max(1, self.gpus - round(self.gpus * self.learner_share))

    @property
    def per_step(self) -> int:
        """Groups per step: a quarter of those that the agents can have in flight."""
        return max(4, self.agents // GROUP_SIZE // 4)

    @property
    def step_s(self) -> float:
        """Seconds in which the agents sample the groups of one step. The learner needs 0.9 of it."""
        return self.per_step * GROUP_SIZE * self.episode_s / self.agents

    @property
    def weights_s(self) -> float:
        """Seconds from the first byte until every server has a version."""
        return self.weights / self.link * (1.0 + (self.relay if self.servers > 1 else 1.0))


class FixedDelays:
    """The delays of `Size`, for `Simulation`. Attempts differ by up to half of their mean."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def attempts(self, index: int) -> Sequence[float]:
        """Returns the durations of a group's attempts."""
        spread = [0.5 + ((index * GROUP_SIZE + number) * 0.6180339887) % 1.0 for number in range(GROUP_SIZE)]
        return [self._size.episode_s * factor for factor in spread]

    def storing(self, index: int) -> float:
        """Nothing: `ScaledSimulation` stores groups."""
        return 0.0

    def update(self, step: int) -> float:
        """Returns the learner's time for a step."""
        return 0.9 * self._size.step_s

    def swap(self, step: int) -> float:
        """Returns the time of the distribution. The learner continues meanwhile."""
        return self._size.weights_s


class Queue:
    """A part that handles one request at a time, in order of arrival, on each of `cores`."""

    def __init__(self, env: simpy.Environment, cores: int = 1) -> None:
        self._env, self._free_at, self.busy_s = env, [0.0] * cores, 0.0

    def use(self, seconds: float) -> simpy.Event:
        """Returns an event at the end of a request that arrives now."""
        core = min(range(len(self._free_at)), key=self._free_at.__getitem__)
        begin = max(self._env.now, self._free_at[core])
        self._free_at[core] = begin + seconds
        self.busy_s += seconds
        return self._env.timeout(self._free_at[core] - self._env.now)


class ScaledSimulation(Simulation):
    """A simulated run whose turns and groups pass the driver, and whose groups pass Redis and the disk."""

    def __init__(self, size: Size) -> None:
        order = GroupOrder(per_step=size.per_step, oldest_first=True, depth=size.max_staleness + 1)
        super().__init__(order, FixedDelays(size), agents=size.agents, steps=size.steps)
        self.size = size
        self.driver = Queue(self.env, size.driver_cores)
        self.redis, self.disk = Queue(self.env), Queue(self.env)
        self.waited_s: list[float] = []  # of attempts, for the driver

    def start_attempts(self) -> None:
        """Starts attempts as the base class does, each in turns."""
        while self.free and self.waiting:
            group, duration = self.waiting.popleft()
            self.free -= 1
            group.oldest_version = self.version if group.oldest_version is None else group.oldest_version
            self.env.process(self.attempt(group, duration))

    def attempt(self, group: RunningGroup, duration: float) -> Generator[simpy.Event, Any, None]:
        """One attempt: each turn passes the driver, then takes its share of the duration."""
        began, costs = self.env.now, self.size.costs
        for _ in range(self.size.turns):
            yield self.driver.use(costs.turn_s + costs.route_s * self.size.servers)
            yield self.env.timeout(duration / self.size.turns)
        self.waited_s.append(self.env.now - began - duration)
        ended = self.env.event()
        ended.callbacks.append(self.end_attempt)
        ended.succeed(group)

    def store(self, index: int) -> Generator[simpy.Event, Any, None]:
        """A finished group passes Redis, the driver and the disk."""
        costs = self.size.costs
        yield self.redis.use(costs.redis_s)
        yield self.driver.use(costs.group_s)
        yield self.disk.use(costs.disk_s)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of a simulated run."""

    step_s: float
    driver: float
    redis: float
    disk: float
    learner: float
    weights: float
    waited: float  # share of an attempt that waits for the driver
    staleness: float

    @property
    def limit(self) -> str:
        """The part with the largest busy share."""
        shares = {"driver": self.driver, "Redis": self.redis, "disk": self.disk, "learner": self.learner, "weights": self.weights}
        return max(shares, key=shares.__getitem__)


def simulate(size: Size) -> Outcome:
    """Simulates a run. A step is measured after the pipeline has filled and before it drains."""
    run = ScaledSimulation(size)
    run.run()
    depth = size.max_staleness + 1
    first, end = depth, size.steps - depth
    step_s = (run.step_ends[end - 1] - run.step_ends[first - 1]) / (end - first)
    total_s = size.steps * step_s  # each step has the same work
    return Outcome(
        step_s=step_s,
        driver=run.driver.busy_s / total_s / size.driver_cores,
        redis=run.redis.busy_s / total_s,
        disk=run.disk.busy_s / total_s,
        learner=0.9 * size.step_s / step_s,
        weights=size.weights_s / step_s,
        waited=sum(run.waited_s) / len(run.waited_s) / size.episode_s,
        staleness=sum(ages := ages_of(run.trained.values())) / len(ages),
    )


def measure_routing(servers: int, turns: int, requests: int = 2000) -> float:
    """Returns the seconds that a pool of servers takes to choose one for a request, with episodes of this many turns."""
    pool = object.__new__(ServerPool)  # without processes
    use = CacheUse(reading=1, shares=(0.5,))
    pool._replicas = [SimpleNamespace(accepts_requests=True, version=0, cache_use=use) for _ in range(servers)]  # type: ignore[misc]
    pool._floor, pool._routing = 0, EpisodeRouter(servers, apart=GROUP_SIZE)
    began = time.perf_counter()
    for number in range(requests // turns):
        episode, tokens = f"g{number:06d}-0-a0", 500
        with pool.episode(episode, f"task-{number // GROUP_SIZE}"):
            for turn in range(turns):
                pool._choose(episode, tokens + 150 * turn)
    return (time.perf_counter() - began) / (requests // turns * turns)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--agents", type=int, default=10_000, help="concurrent attempts at every size")
    parser.add_argument("--agents-per-server", type=int, help="concurrent attempts per server, instead of --agents")
    parser.add_argument("--turns", type=int, default=10, help="requests to the policy per attempt")
    parser.add_argument("--episode-s", type=float, nargs="+", default=[300.0], help="mean duration of an attempt")
    parser.add_argument("--weights-gb", type=float, default=16.0, help="size of a version; 16: 8 billion parameters in bfloat16")
    parser.add_argument("--link-gbit", type=float, default=100.0, help="network rate of each machine")
    parser.add_argument("--relay", type=float, default=1.3, help="time of a distribution to all servers, relative to one")
    parser.add_argument("--driver-cores", type=int, default=1, help="cores that share the driver's work; the real driver uses one")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--turn-ms", type=float, default=1000 * Costs().turn_s)
    parser.add_argument("--group-ms", type=float, default=1000 * Costs().group_s)
    parser.add_argument(
        "--measure-routing", action="store_true", help="print the time of a routing decision for each number of GPUs, and exit"
    )
    args = parser.parse_args()
    if args.measure_routing:
        for gpus in args.gpus:
            cost = measure_routing(gpus, args.turns)
            print(f"{gpus} servers: {1e6 * cost:.1f} us a request, {1e9 * cost / gpus:.0f} ns a server")
        return 0
    print("| GPUs | agents | attempt s | episodes/min | throughput | driver | Redis | disk | weights | waits for driver | limit |")
    print("| --- " * 11 + "|")
    costs = Costs(turn_s=args.turn_ms / 1000, group_s=args.group_ms / 1000)
    for gpus in args.gpus:
        for episode_s in args.episode_s:
            size = Size(
                gpus=gpus,
                agents=(gpus - round(gpus * LEARNER_SHARE)) * args.agents_per_server if args.agents_per_server else args.agents,
                turns=args.turns,
                episode_s=episode_s,
                weights=args.weights_gb * 1e9,
                link=args.link_gbit * 1e9 / 8,
                relay=args.relay,
                learner_share=LEARNER_SHARE,
                max_staleness=args.staleness,
                steps=args.steps,
                driver_cores=args.driver_cores,
                costs=costs,
            )
            print(row(size), flush=True)
    return 0


def row(size: Size) -> str:
    """Returns a row of the table."""
    run, free = simulate(size), simulate(replace(size, costs=size.costs.without(), weights=0.0))
    rate = 60 * size.per_step * GROUP_SIZE / run.step_s
    shares = f"{run.driver:.0%} | {run.redis:.1%} | {run.disk:.1%} | {run.weights:.0%} | {run.waited:.0%}"
    return f"| {size.gpus} | {size.agents} | {size.episode_s:g} | {rate:,.0f} | {free.step_s / run.step_s:.2f} | {shares} | {run.limit} |"


if __name__ == "__main__":
    sys.exit(main())
