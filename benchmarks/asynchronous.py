"""Simulates the schedule of a run at scale: how close each order of groups comes to the maximum throughput.

    python benchmarks/asynchronous.py
    python benchmarks/asynchronous.py --agents 10000 --alpha 1.2 --steps 100 --seeds 0 1 2

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
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

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


@dataclass
class Simulation:
    """A run in which attempts and updates are delays."""

    setting: Setting
    seed: int
    env: simpy.Environment = field(default_factory=simpy.Environment)

    def __post_init__(self) -> None:
        setting = self.setting
        self.random = random.Random(self.seed)
        self.order = GroupOrder(per_step=setting.per_step, oldest_first=setting.oldest_first, depth=setting.max_staleness + 1)
        self.starts = BlockStarts(self.order)
        self.parked = 0
        self.slots = simpy.Resource(self.env, capacity=setting.agents)
        self.entries: dict[int, LedgerEntry] = {}
        self.durations: dict[int, float] = {}  # summed over the attempts of a group
        self.version, self.first_block = 0, 0
        self.changed, self.stored = self.env.event(), self.env.event()  # version or number of parked groups; entries
        self.ages: list[int] = []
        self.step_ends: list[float] = []

    def run(self) -> Result:
        """Simulates all steps. Does not count the first and last tenth, in which the pipeline fills and drains."""
        self.env.process(self.roll_out())
        self.env.run(self.env.process(self.learn()))
        warm = self.setting.steps // 10
        measured = self.step_ends[warm:-warm]
        step_s = (measured[-1] - measured[0]) / (len(measured) - 1)
        taken = [entry.index for entry in self.entries.values() if entry.step is not None and entry.step < self.setting.steps - warm]
        return Result(
            throughput=max(self.setting.rollout_s, self.setting.train_s) / step_s,
            staleness=statistics.fmean(self.ages),
            staleness_max=max(self.ages),
            late=sum(age > self.setting.max_staleness for age in self.ages) / len(self.ages),
            length=statistics.fmean(self.durations[index] for index in taken) / GROUP_SIZE / self.setting.attempt_s,
        )

    def roll_out(self) -> Generator[simpy.Event, Any, None]:
        """Starts groups, as `agentrl.run.loop._roll_out` does."""
        for slot in itertools.count():
            wanted = self.setting.steps * self.setting.per_step
            while slot >= wanted + self.parked or not self.starts.admit(slot, version=self.version, parked=self.parked):
                yield self.changed
            self.env.process(self.group(slot))

    def group(self, index: int) -> Generator[simpy.Event, Any, None]:
        """Runs all attempts of one group and stores its entry."""
        attempts = [min(self.random.paretovariate(self.setting.alpha), self.setting.longest) for _ in range(GROUP_SIZE)]
        versions: list[int] = []
        yield self.env.all_of([self.env.process(self.attempt(duration, versions)) for duration in attempts])
        self.durations[index] = sum(attempts)
        entry = LedgerEntry(
            index=index,
            task_id="t",
            attempts=GROUP_SIZE,
            counted=GROUP_SIZE,
            has_spread=True,
            oldest_version=min(versions),
            tokens_sampled=GROUP_SIZE,
        )
        if self.setting.late and self.random.random() < self.setting.late:
            self.park(replace(entry, late_parts=1, pending=1), +1)
            yield self.env.timeout(self.setting.late_s)
            self.park(replace(entry, late_parts=1), -1)
        self.entries.setdefault(index, entry)
        self.stored.succeed()
        self.stored = self.env.event()

    def park(self, entry: LedgerEntry, change: int) -> None:
        """Stores the entry of a group that is parked, or that has got its late scores."""
        self.entries[entry.index] = entry
        self.parked += change
        self.notify()

    def notify(self) -> None:
        """Lets the rollouts look whether another group may start."""
        self.changed.succeed()
        self.changed = self.env.event()

    def attempt(self, duration: float, versions: list[int]) -> Generator[simpy.Event, Any, None]:
        """Runs one attempt once an agent is free. Appends the version that serves at its start to `versions`."""
        with self.slots.request() as slot:
            yield slot
            versions.append(self.version)
            yield self.env.timeout(duration)

    def learn(self) -> Generator[simpy.Event, Any, None]:
        """Performs all learner steps, as `agentrl.learner.worker.Worker.run` does."""
        for step in range(self.setting.steps):
            while (chosen := self.take(step)) is None:
                yield self.stored
            yield self.env.timeout(self.setting.train_s)
            self.ages += [step - (self.entries[index].oldest_version or 0) for index in chosen]
            self.version = step + 1
            self.step_ends.append(self.env.now)
            self.notify()

    def take(self, step: int) -> tuple[int, ...] | None:
        """Selects the groups of a step and assigns them to it. Returns None if too few are finished."""
        if len(self.entries) - self.parked - step * self.setting.per_step < self.setting.per_step:
            return None  # the selection would say the same, in time linear in the number of groups
        first = self.order.block(self.first_block).start
        known = (self.entries[index] for index in sorted(self.entries))
        window = [entry for entry in known if entry.index >= first or (entry.late_parts and entry.step is None)]
        self.first_block = self.order.first_open_block(window, before=step, start=self.first_block)
        chosen = self.order.select(step, window)
        if chosen is not None:
            self.entries |= {index: replace(self.entries[index], step=step) for index in chosen}
        return chosen


def measure(setting: Setting, seeds: list[int]) -> Result:
    """Simulates a setting with each seed. Returns medians, and the maximum of `staleness_max`."""
    runs = [Simulation(setting, seed).run() for seed in seeds]
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
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--alpha", type=float, default=1.5, help="tail index of the durations, above 1; smaller means a heavier tail")
    parser.add_argument("--longest", type=float, default=100.0, help="maximum duration in seconds; the minimum is 1")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0, 0.5], help="learner time divided by agent time for a step")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--late", type=float, default=0.0, help="share of groups whose scores are late")
    parser.add_argument("--late-s", type=float, default=0.0, help="delay of late scores in seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
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
