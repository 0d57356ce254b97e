"""Simulates the schedule of a run at scale: how close each order of groups comes to the maximum throughput.

    python benchmarks/asynchronous.py
    python benchmarks/asynchronous.py --agents 1000 --per-step 32 --alpha 1.2
    python benchmarks/asynchronous.py --recorded runs/quickstart        # replays the delays of a finished run (`benchmarks.recorded`)

Durations of attempts are Pareto-distributed and cut off at `--longest`, as by a wall limit. `--load` is the time of a learner step divided
by the time that the agents need for its attempts. At load 1, the hardest case, neither waits for the other on average. The code of a run
(`agentrl.experience.BlockStarts`, `GroupOrder`) determines which groups start and which a step consumes. With `--late 0.1 --late-s 500` a
tenth of the groups get their scores 500 s after their last attempt. Attempts, updates and swaps are delays in a
discrete-event simulation (SimPy), so the figures do not measure the speed of a server or learner. Prints a Markdown table for each load,
as medians over seeds:

    throughput      steps per second relative to min(rollout rate, training rate), which is the maximum
    speed-up        throughput relative to lock step (in_order, max_staleness=0)
    bound           maximum speed-up: 1 / throughput of lock step
    staleness       mean over trained groups, in versions, and the maximum over all seeds
    late            share of trained groups whose staleness exceeds max_staleness
    length          mean duration of trained attempts relative to all sampled attempts; 1 means no bias towards short attempts
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import simpy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.experience import BlockStarts, GroupOrder
from agentrl.records import LedgerEntry

GROUP_SIZE = 8


@dataclass(kw_only=True)
class Setting:
    """One simulated run. Times are in seconds."""

    agents: int
    per_step: int
    steps: int
    max_staleness: int
    oldest_first: bool
    alpha: float  # tail index of attempt durations, whose minimum is 1 s
    longest: float  # maximum duration of an attempt
    load: float  # the learner's time for a step divided by the agents' time for its attempts
    late: float = 0.0  # share of groups whose scores are late; only with oldest_first and max_staleness above 0
    late_s: float = 0.0  # delay of late scores

    @property
    def attempt_s(self) -> float:
        """Mean duration of an attempt: the mean of a Pareto distribution with minimum 1, cut off at `longest`."""
        return (self.alpha - self.longest ** (1 - self.alpha)) / (self.alpha - 1)

    @property
    def rollout_s(self) -> float:
        """The agents' time for the attempts of one step, if all agents are busy."""
        return self.per_step * GROUP_SIZE * self.attempt_s / self.agents

    @property
    def train_s(self) -> float:
        """The learner's time for one step."""
        return self.load * self.rollout_s


@dataclass(kw_only=True)
class Result:
    """Figures of a simulated run. The module's docstring defines them."""

    throughput: float
    staleness: float
    staleness_max: int
    late: float
    length: float


class Delays(Protocol):
    """The times of a simulated run, in seconds."""

    def attempts(self, index: int) -> Sequence[float]:
        """Returns the durations of a group's attempts, each of which occupies an agent."""

    def storing(self, index: int) -> float:
        """Returns the time from the end of a group's last attempt until it is stored: its scoring."""

    def update(self, step: int) -> float:
        """Returns the learner's time for a step."""

    def swap(self, step: int) -> float:
        """Returns the time from the end of a step until the server has its version. Meanwhile the learner continues."""


class ParetoDelays:
    """The delays of a `Setting`: attempts of Pareto-distributed durations and a constant update."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting, self._random = setting, random.Random(seed)

    def attempts(self, index: int) -> Sequence[float]:
        return [min(self._random.paretovariate(self._setting.alpha), self._setting.longest) for _ in range(GROUP_SIZE)]

    def storing(self, index: int) -> float:
        return 0.0

    def update(self, step: int) -> float:
        return self._setting.train_s

    def swap(self, step: int) -> float:
        return 0.0


@dataclass(kw_only=True, eq=False)
class RunningGroup:
    """A group whose attempts have not all ended."""

    index: int
    left: int
    ended: simpy.Event
    oldest_version: int | None = None  # that served when its first attempt started


class Simulation:
    """A run in which attempts, updates and swaps are delays.

    Args:
        late: share of groups whose scores arrive `late_s` seconds late.
    """

    def __init__(
        self, order: GroupOrder, delays: Delays, *, agents: int, steps: int, late: float = 0.0, late_s: float = 0.0, seed: int = 0
    ) -> None:
        self.order, self.delays, self.steps, self.late, self.late_s = order, delays, steps, late, late_s
        self.env = simpy.Environment()
        self.starts = BlockStarts(order)
        self.random = random.Random(-1 - seed)
        self.parked = 0
        self.free = agents
        self.waiting: deque[tuple[RunningGroup, float]] = deque()  # attempts that need an agent
        self.open: dict[int, LedgerEntry] = {}  # groups that are stored and not consumed
        self.ready: Counter[int] = Counter()  # of them without those that are parked, by block
        self.trained: dict[int, LedgerEntry] = {}  # consumed groups, with their steps
        self.durations: dict[int, float] = {}  # summed over the attempts of a group
        self.version = 0
        self.changed, self.stored = self.env.event(), self.env.event()  # version or number of parked groups; entries
        self.step_ends: list[float] = []  # times at which versions serve

    def run(self) -> None:
        """Simulates all steps."""
        self.env.process(self.roll_out())
        self.env.run(self.env.process(self.learn()))

    def roll_out(self) -> Generator[simpy.Event, Any, None]:
        """Starts groups, as `agentrl.run.loop._roll_out` does."""
        for slot in itertools.count():
            groups_needed = self.steps * self.order.per_step
            while slot >= groups_needed + self.parked or not self.starts.admit(slot, version=self.version, parked=self.parked):
                yield self.changed
            self.env.process(self.group(slot))

    def group(self, index: int) -> Generator[simpy.Event, Any, None]:
        """Runs all attempts of one group and stores its entry."""
        attempts = self.delays.attempts(index)
        running = RunningGroup(index=index, left=len(attempts), ended=self.env.event())
        self.waiting += [(running, duration) for duration in attempts]
        self.start_attempts()
        yield running.ended
        yield from self.store(index)
        self.durations[index] = sum(attempts)
        entry = LedgerEntry(
            index=index,
            task_id="t",
            attempts=len(attempts),
            counted=len(attempts),
            has_spread=True,
            oldest_version=running.oldest_version,
            tokens_sampled=len(attempts),
        )
        if self.late and self.random.random() < self.late:
            entry = replace(entry, late_parts=1)
            self.open[index] = replace(entry, pending=1)
            self.park(+1)
            yield self.env.timeout(self.late_s)
            self.park(-1)
        self.open[index] = entry
        self.ready[self.order.block_of(index)] += 1
        self.stored.succeed()
        self.stored = self.env.event()

    def store(self, index: int) -> Generator[simpy.Event, Any, None]:
        """Takes the time until a finished group is stored."""
        if storing := self.delays.storing(index):
            yield self.env.timeout(storing)

    def start_attempts(self) -> None:
        """Starts attempts in order of their arrival while agents are free."""
        while self.free and self.waiting:
            group, duration = self.waiting.popleft()
            self.free -= 1
            group.oldest_version = self.version if group.oldest_version is None else group.oldest_version
            self.env.timeout(duration, group).callbacks.append(self.end_attempt)

    def end_attempt(self, attempt: simpy.Event) -> None:
        """Frees the agent of an attempt."""
        self.free += 1
        group = attempt.value
        group.left -= 1
        if not group.left:
            group.ended.succeed()
        self.start_attempts()

    def park(self, change: int) -> None:
        """Changes the number of parked groups."""
        self.parked += change
        self.notify()

    def notify(self) -> None:
        """Lets the rollouts look whether another group may start."""
        self.changed.succeed()
        self.changed = self.env.event()

    def learn(self) -> Generator[simpy.Event, Any, None]:
        """Performs all learner steps, as `agentrl.learner.worker.Worker.run` does. Ends when the last version serves."""
        serving: simpy.Event = self.env.timeout(0)
        for step in range(self.steps):
            while not self.take(step):
                yield self.stored
            yield self.env.timeout(self.delays.update(step))
            serving = self.env.process(self.serve(step, serving))
        yield serving

    def serve(self, step: int, before: simpy.Event) -> Generator[simpy.Event, Any, None]:
        """Swaps the version of a step in, once the version before it serves."""
        yield before
        yield self.env.timeout(self.delays.swap(step))
        self.version = step + 1
        self.step_ends.append(self.env.now)
        self.notify()

    def take(self, step: int) -> bool:
        """Assigns groups to a step. Returns False if too few are stored.

        A run has no extra groups here, so groups of earlier steps have no influence on the selection.
        """
        ready = self.ready.total() if self.order.oldest_first else self.ready[step]
        chosen = self.order.select(step, list(self.open.values())) if ready >= self.order.per_step else None
        if chosen is None:
            return False
        self.trained |= {index: replace(self.open.pop(index), step=step) for index in chosen}
        self.ready -= Counter(map(self.order.block_of, chosen))
        return True


def ages_of(entries: Iterable[LedgerEntry]) -> list[int]:
    """Returns the staleness of consumed groups."""
    return [entry.step - entry.oldest_version for entry in entries if entry.step is not None and entry.oldest_version is not None]


def simulate(setting: Setting, seed: int) -> Result:
    """Simulates a setting. Measures the steps after a third of the run, in which the pipeline fills, and before the last tenth."""
    order = GroupOrder(per_step=setting.per_step, oldest_first=setting.oldest_first, depth=setting.max_staleness + 1)
    delays = ParetoDelays(setting, seed)
    run = Simulation(order, delays, agents=setting.agents, steps=setting.steps, late=setting.late, late_s=setting.late_s, seed=seed)
    run.run()
    first, end = setting.steps // 3, setting.steps - setting.steps // 10
    step_s = (run.step_ends[end - 1] - run.step_ends[first - 1]) / (end - first)
    measured = [entry for entry in run.trained.values() if entry.step is not None and first <= entry.step < end]
    ages = ages_of(measured)
    return Result(
        throughput=max(setting.rollout_s, setting.train_s) / step_s,
        staleness=statistics.fmean(ages),
        staleness_max=max(ages_of(run.trained.values())),
        late=sum(age > setting.max_staleness for age in ages) / len(ages),
        length=statistics.fmean(run.durations[entry.index] for entry in measured) / GROUP_SIZE / setting.attempt_s,
    )


def measure(setting: Setting, seeds: list[int]) -> Result:
    """Simulates a setting with each seed. Returns medians, and the maximum of `staleness_max`."""
    runs = [simulate(setting, seed) for seed in seeds]
    return Result(
        throughput=statistics.median(run.throughput for run in runs),
        staleness=statistics.median(run.staleness for run in runs),
        staleness_max=max(run.staleness_max for run in runs),
        late=statistics.median(run.late for run in runs),
        length=statistics.median(run.length for run in runs),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=10_000, help="maximum number of concurrent attempts")
    parser.add_argument("--per-step", type=int, default=256, help=f"groups of {GROUP_SIZE} attempts per learner step")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--alpha", type=float, default=1.5, help="tail index of the durations, above 1; smaller means a heavier tail")
    parser.add_argument("--longest", type=float, default=100.0, help="maximum duration in seconds; the minimum is 1")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0, 0.5], help="learner time divided by agent time for a step")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--late", type=float, default=0.0, help="share of groups whose scores are late")
    parser.add_argument("--late-s", type=float, default=0.0, help="delay of late scores in seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recorded", type=Path, nargs="+", metavar="RUN", help="replay finished runs instead, and compare the throughput")
    options = parser.parse_args()
    if options.recorded:
        from benchmarks.recorded import compare

        print(compare(options.recorded))
        return 0
    print(f"{options.agents} agents, {options.per_step} groups of {GROUP_SIZE} a step, {options.steps} steps, seeds {options.seeds}")
    print(f"attempts of Pareto({options.alpha:g}) seconds, at most {options.longest:g}")
    for load in options.load:
        print(f"\nload {load:g}: learner time divided by agent time for a step\n")
        print("| order | max_staleness | throughput | speed-up | bound | staleness | late | length |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        lock_step: float | None = None
        for bound, oldest_first in itertools.product(options.staleness, (False, True)):
            setting = Setting(
                agents=options.agents,
                per_step=options.per_step,
                steps=options.steps,
                max_staleness=bound,
                oldest_first=oldest_first,
                alpha=options.alpha,
                longest=options.longest,
                load=load,
                late=options.late if oldest_first and bound else 0.0,
                late_s=options.late_s,
            )
            result = measure(setting, options.seeds)
            lock_step = lock_step or result.throughput
            name = "oldest_first" if oldest_first else "in_order"
            speed = f"{result.throughput:.3f} | {result.throughput / lock_step:.2f} | {1 / lock_step:.2f}"
            age = f"{result.staleness:.1f} (max {result.staleness_max}) | {result.late:.1%} | {result.length:.3f}"
            print(f"| {name} | {bound} | {speed} | {age} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
