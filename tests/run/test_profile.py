"""A profile of learner steps: every table adds up to the wall time for any timeline."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.cpu_time import IDLE
from agentrl.base.liveness import Liveness
from agentrl.errors import StoreError
from agentrl.observe.timeline import BUSY, DOWN, LOADING, PARTS, WALL, Timeline
from agentrl.run import loop, utilization
from agentrl.run.profile import Profile, profile_steps, render_profile
from agentrl.session import opening
from tests.driving import Family, Journaled, make_recipe, opened
from tests.run.test_utilization import SlowSandboxes

MARKS = st.dictionaries(st.sampled_from(PARTS), st.sampled_from([BUSY, DOWN, LOADING, "waiting for groups"]))


@given(st.lists(st.lists(st.tuples(st.floats(0.001, 50), MARKS), min_size=1, max_size=8), min_size=1, max_size=3))
def test_every_table_adds_up_to_the_wall_time(steps: list[list[tuple[float, dict[str, str]]]]) -> None:
    now = 0.0
    work = Liveness("the learner", first_s=1.0, clock=lambda: now)
    timeline = Timeline(clock=lambda: now, counters={"learner_s": work.spent_s, "cpu_s": lambda: {"driver": now, IDLE: now}})
    timeline.restart()
    lines = []
    for number, marks in enumerate(steps):
        for seconds, states in marks:
            timeline.mark(states)
            if "learner" in states:
                work.progress(states["learner"])
            now += seconds
        metrics = timeline.take() | timeline.take_counts()
        lines.append({"step": float(number + 2), "step_s": metrics.pop(WALL), **metrics})
    profile = Profile.of("x", lines, [], {"start": 3.0})
    assert profile.wall_s == pytest.approx(now) and (profile.first_step, profile.steps) == (2, len(steps))
    for table in (profile.busy_at_once, profile.learner, *profile.parts.values()):
        assert sum(table.values()) == pytest.approx(now), table
    assert profile.parts.keys() == set(PARTS)
    assert sum(profile.cpu_s.values()) == pytest.approx(2 * now)
    text = render_profile(profile)
    sums = [line for line in text.splitlines() if line.startswith("  sum ")]
    assert len(sums) == 3 + len(PARTS) and sum(f" {now:.2f} s" in line for line in sums) >= 2 + len(PARTS)


def test_steps_without_a_timeline_are_an_error() -> None:
    with pytest.raises(StoreError, match="no timeline"):
        Profile.of("x", [{"step": 2.0, "loss": 1.0}], [], {})


async def test_the_profile_of_real_rollouts_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy and sandboxes are scripted; the loop, the timeline, the CPU clock and the episodes are real."""
    monkeypatch.setattr(utilization, "LOOK_S", 0.005)
    recipe = make_recipe(groups_per_step=2, group={"size": 2})
    async with opened(tmp_path, Journaled(tmp_path / "j"), SlowSandboxes(cast(Any, None)), recipe, Family()) as run:
        liveness = Liveness("the learner", first_s=1.0)
        liveness.progress("waiting for groups")
        run.learner = cast(Any, SimpleNamespace(alive=True, liveness=liveness))
        run.progress.timeline = opening._open_timeline(run.learner)
        before = time.monotonic()
        run.progress.timeline.restart()
        started = time.monotonic()
        watching = asyncio.create_task(utilization.watch_parts(run))
        await loop._roll_out(run)
        ended = time.monotonic()
        metrics = run.progress.timeline.take() | run.progress.timeline.take_counts()
        after = time.monotonic()
        watching.cancel()
        episodes = [scored for group in await run.store.groups([0, 1]) for scored in group.scored]
    profile = Profile.of("x", [{"step": 1.0, "step_s": metrics.pop(WALL), **metrics}], episodes, {})
    assert ended - started <= profile.wall_s <= after - before
    assert sum(profile.busy_at_once.values()) == pytest.approx(profile.wall_s)
    assert profile.learner == {"waiting for groups": pytest.approx(profile.wall_s, abs=0.05)}
    assert sum(profile.cpu_s.values()) == pytest.approx(profile.cpus * profile.wall_s, rel=0.1, abs=0.2)
    assert profile.episode["tools"] >= 0.08, "three calls of 30 ms"
    total = profile.episode["sampling"] + profile.episode["tools"] + profile.episode["other"]
    assert total == pytest.approx(profile.episode["all"])


@pytest.mark.parametrize("wanted", [range(1, 3), range(0), range(2, 2)])
async def test_the_first_step_and_an_empty_range_cannot_be_profiled(wanted: range, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one step, and start at step 2 or later"):
        await profile_steps(make_recipe(), cast(Any, None), cast(Any, None), root=tmp_path, wanted=wanted)
