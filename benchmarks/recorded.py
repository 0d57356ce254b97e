"""The delays of a finished run, which `benchmarks/asynchronous.py --recorded RUN` replays through the simulated schedule.

An attempt occupies an agent for its `wall_s`. A group is stored when its scores are there: `stored_at` of the ledger minus the end of its
last turn. The learner's time for a step is the busy time of its timeline, which is sampled every 0.2 s, and at least `update_s`. A swap
takes `swap_total_ms`.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config import Recipe
from agentrl.config import recipe as recipes
from agentrl.experience import GroupOrder, open_store
from agentrl.records import Group
from benchmarks.asynchronous import Simulation, ages_of


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A finished run as `Delays`, and its figures."""

    recipe: Recipe
    durations: dict[int, tuple[float, ...]]  # group -> seconds of its attempts
    storing_s: dict[int, float]  # group -> seconds from its last turn until it was stored
    updates: tuple[float, ...]  # by step
    swaps: tuple[float, ...]
    served_at: tuple[float, ...]  # when the versions served
    staleness: float  # mean over trained groups

    @classmethod
    def of(cls, folder: Path) -> RecordedRun:
        """Reads a run folder. Exits with an error if its steps include time that the simulation does not have."""
        recipe = recipes.load(folder / "recipe.json")
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sessions = (folder / "sessions.jsonl").read_text().count('"began"')
        if sessions != 1 or recipe.evaluation.every or recipe.rollout.extra_groups or any("groups_parked" in step for step in steps):
            sys.exit(f"error: {folder} was resumed, was evaluated between steps, or has extra or parked groups\nfix: pass a different run")
        with closing(open_store(folder, recipe)) as store:
            entries = store.entries()
            groups = store.groups([entry.index for entry in entries])
        stored_at: dict[int, float] = dict(sqlite3.connect(folder / "experience.sqlite").execute("SELECT idx, stored_at FROM groups"))
        return cls(
            recipe=recipe,
            durations={group.index: tuple(scored.episode.wall_s for scored in group.episodes) for group in groups},
            storing_s={group.index: storing_s(group, stored_at[group.index]) for group in groups},
            updates=tuple(max(step["update_s"], step.get("timeline/learner/busy", 0.0)) for step in steps),
            swaps=tuple(step["swap_total_ms"] / 1000 for step in steps),
            served_at=tuple(step["time"] for step in steps),
            staleness=statistics.fmean(ages_of(entries)),
        )

    def attempts(self, index: int) -> Sequence[float]:
        return self.durations[index]

    def storing(self, index: int) -> float:
        return self.storing_s[index]

    def update(self, step: int) -> float:
        return self.updates[step]

    def swap(self, step: int) -> float:
        return self.swaps[step]

    def simulate(self, order: GroupOrder) -> Simulation:
        """Replays the run with an order of groups."""
        run = Simulation(order, self, agents=self.recipe.rollout.concurrency, steps=len(self.updates))
        run.run()
        return run


def storing_s(group: Group, stored_at: float) -> float:
    """Returns the seconds from the end of a group's last turn, with its tool calls, until it was stored; 0 for a group without turns."""
    turns = (turn for scored in group.episodes for trajectory in scored.episode.trajectories for turn in trajectory.own_turns)
    return max(0.0, stored_at - max((turn.ended_at + turn.tool_s for turn in turns), default=stored_at))


def steps_per_hour(times: Sequence[float]) -> float:
    """Returns the rate of versions from the first to the last."""
    return 3600 * (len(times) - 1) / (times[-1] - times[0])


def compare(folders: Sequence[Path]) -> str:
    """Returns a Markdown table: the throughput of recorded runs next to that of their simulations, also with the other order."""
    lines = [
        "| run | `order` | steps | steps/h, real | simulated | difference | staleness, real | simulated | other order, steps/h |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for folder in folders:
        run = RecordedRun.of(folder)
        order = GroupOrder.from_recipe(run.recipe)
        simulated, other = run.simulate(order), run.simulate(replace(order, oldest_first=not order.oldest_first))
        real_rate, rate = steps_per_hour(run.served_at), steps_per_hour(simulated.step_ends)
        rates = f"{real_rate:.0f} | {rate:.0f} | {rate / real_rate - 1:+.1%}"
        ages = f"{run.staleness:.2f} | {statistics.fmean(ages_of(simulated.trained.values())):.2f}"
        lines.append(
            f"| {folder.name} | `{run.recipe.order}` | {len(run.updates)} | {rates} | {ages} | {steps_per_hour(other.step_ends):.0f} |"
        )
    return "\n".join(lines)
