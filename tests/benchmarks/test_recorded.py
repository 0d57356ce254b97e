"""A recorded run is simulated with the delays that it recorded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from agentrl.experience import GroupOrder, SqliteStore
from agentrl.records import Episode, Group, GroupUse, Message, Score, ScoredEpisode, Trajectory, Turn, VersionSpan
from benchmarks.asynchronous import Simulation, ages_of
from benchmarks.recorded import RecordedRun, compare, steps_per_hour
from recipes.quickstart import recipe as quickstart

PER_STEP, STEPS, AGENTS, ATTEMPTS = 4, 12, 16, 4
RECIPE = quickstart.but(
    {"steps": STEPS, "max_staleness": 2, "rollout.groups_per_step": PER_STEP, "rollout.concurrency": AGENTS, "rollout.group.size": ATTEMPTS}
)


class DrawnDelays:
    """Delays of every kind, each drawn from its group or step."""

    def attempts(self, index: int) -> Sequence[float]:
        chance = Random(f"attempts {index}")
        return [chance.paretovariate(1.2) for _ in range(ATTEMPTS)]

    def storing(self, index: int) -> float:
        return Random(f"storing {index}").uniform(0.0, 2.0)

    def update(self, step: int) -> float:
        return Random(f"update {step}").uniform(0.5, 3.0)

    def swap(self, step: int) -> float:
        return Random(f"swap {step}").uniform(0.1, 1.0)


def group(index: int, wall_s: Sequence[float], version: int) -> Group:
    """A group whose last turn ended at second 1,000, after a tool call of 2 s."""
    last = Turn(
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-0.5,),
        versions=(VersionSpan(version=version, start=0, end=1),),
        message=Message(role="assistant", content=""),
        finish_reason="stop",
        tool_s=2.0,
        ended_at=998.0,
    )
    turns = [last, *(replace(last, ended_at=900.0) for _ in wall_s[1:])]
    episodes = [
        Episode(id=f"g{index}-{n}", task_id="t", task_key="k", trajectories=(Trajectory(agent="main", turns=(turns[n],)),), wall_s=seconds)
        for n, seconds in enumerate(wall_s)
    ]
    scored = tuple(ScoredEpisode(episode=episode, score=Score(value=1.0)) for episode in episodes)
    return Group(index=index, task_id="t", task_key="k", episodes=scored)


def record(folder: Path, run: Simulation, delays: DrawnDelays) -> None:
    """Writes the run folder that a real run with this schedule would have."""
    (folder / "recipe.json").write_text(RECIPE.model_dump_json())
    (folder / "sessions.jsonl").write_text('{"began": "2026-01-01T00:00:00+00:00", "step": 0}\n')
    steps = [
        {"time": 50.0 + end, "timeline/learner/busy": delays.update(step), "update_s": 0.1, "swap_total_ms": 1000 * delays.swap(step)}
        for step, end in enumerate(run.step_ends)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    path = folder / "experience.sqlite"
    with closing(SqliteStore(path)) as store:
        store.put_all([group(index, delays.attempts(index), entry.oldest_version or 0) for index, entry in run.trained.items()])
        for step in range(STEPS):
            store.commit(step, {index: GroupUse() for index, entry in run.trained.items() if entry.step == step}, f"{step + 1:06d}")
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany("UPDATE groups SET stored_at = ? WHERE idx = ?", [(1000 + delays.storing(index), index) for index in run.trained])


@pytest.fixture
def simulated(tmp_path: Path) -> Simulation:
    delays = DrawnDelays()
    run = Simulation(GroupOrder.from_recipe(RECIPE), delays, agents=AGENTS, steps=STEPS)
    run.run()
    record(tmp_path, run, delays)
    return run


def test_a_recorded_run_is_replayed_exactly(simulated: Simulation, tmp_path: Path) -> None:
    recorded = RecordedRun.of(tmp_path)
    replayed = recorded.simulate(GroupOrder.from_recipe(RECIPE))
    assert replayed.step_ends == pytest.approx(simulated.step_ends, abs=1e-3), "storage times are rounded to microseconds"
    ages = ages_of(simulated.trained.values())
    assert replayed.trained.keys() == simulated.trained.keys() and ages_of(replayed.trained.values()) == ages and max(ages) > 2
    assert recorded.staleness == pytest.approx(fmean(ages))
    rate = steps_per_hour(simulated.step_ends)
    assert f"| {rate:.0f} | {rate:.0f} | +0.0% |" in compare([tmp_path]).replace("-0.0%", "+0.0%")


@pytest.mark.parametrize("recorded", ["resumed", "evaluated"])
def test_a_run_with_time_that_is_not_simulated_is_an_error(simulated: Simulation, tmp_path: Path, recorded: str) -> None:
    if recorded == "resumed":
        (tmp_path / "sessions.jsonl").write_text('{"began": "a"}\n{"ended": "failed"}\n{"began": "b"}\n')
    else:
        (tmp_path / "recipe.json").write_text(RECIPE.but({"evaluation.every": 4}).model_dump_json())
    with pytest.raises(SystemExit, match="resumed, was evaluated"):
        RecordedRun.of(tmp_path)
