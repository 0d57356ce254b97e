"""What the timeline of a run records for real rollouts and for each state of server and learner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.base.activity import ACTIVITY, ATTEMPTS, GROUPS, SANDBOXES, SCORING
from agentrl.observe.timeline import BUSY, DOWN, PARTS, WALL, time_by_state
from agentrl.records import ExecResult
from agentrl.run import loop, utilization
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import ScriptedSandbox
from tests.driving import Family, Journaled, make_recipe, opened


class SlowSandbox(ScriptedSandbox):
    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        await asyncio.sleep(0.03)
        return ExecResult(exit_code=0, stdout="3", stderr="", wall_s=0.03)


class SlowSandboxes(ScriptedSandboxes):
    async def open(self, *arguments: Any, **options: Any) -> Any:
        return SlowSandbox("slow", cast(Any, None), {})


async def test_the_timeline_of_rollouts_adds_up_to_their_wall_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "LOOK_S", 0.005)
    recipe = make_recipe(groups_per_step=2, group={"size": 2})
    async with opened(tmp_path, Journaled(tmp_path / "j"), SlowSandboxes(cast(Any, None)), recipe, Family()) as run:
        run.learner = cast(Any, SimpleNamespace(alive=True, liveness=SimpleNamespace(work="waiting for groups")))
        run.progress.timeline.restart()
        watching = asyncio.create_task(utilization.watch_parts(run))
        before = asyncio.get_running_loop().time()
        await loop._roll_out(run)
        worked_s = asyncio.get_running_loop().time() - before
        await asyncio.sleep(0.2)
        watching.cancel()
        metrics = run.progress.timeline.take()
    spent = time_by_state([metrics])
    assert spent.keys() == set(PARTS)
    for part, states in spent.items():
        assert sum(states.values()) == pytest.approx(metrics[WALL]), part
    assert spent["learner"] == {"waiting for groups": pytest.approx(metrics[WALL], abs=0.1), DOWN: pytest.approx(0.0, abs=0.1)}
    assert worked_s / 3 <= spent["rollouts"][BUSY] <= worked_s + 0.1  # a busy machine delays the first group
    assert spent["rollouts"]["waiting for a version"] >= 0.1
    assert 0 < spent["sandboxes"][BUSY] <= spent["rollouts"][BUSY] + 0.1
    assert [ACTIVITY.count(kind) for kind in (GROUPS, ATTEMPTS, SANDBOXES, SCORING)] == [0, 0, 0, 0], "every activity has ended"


def run_with(*, accepts: bool = True, loading: bool = False, in_flight: int = 0, alive: bool = True, work: str = "") -> Any:
    return SimpleNamespace(
        served=SimpleNamespace(accepts_requests=accepts, loading=loading),
        groups=SimpleNamespace(runner=SimpleNamespace(pace=SimpleNamespace(in_flight=in_flight))),
        learner=SimpleNamespace(alive=alive, liveness=SimpleNamespace(work=work)),
    )


@pytest.mark.parametrize(
    ("run", "part", "state"),
    [
        (run_with(in_flight=3), "server", BUSY),
        (run_with(), "server", "waiting for requests"),
        (run_with(in_flight=3, loading=True), "server", "waiting for weights"),
        (run_with(accepts=False, loading=True), "server", DOWN),
        (run_with(work="computing a micro-batch"), "learner", BUSY),
        (run_with(work="writing a checkpoint"), "learner", BUSY),
        (run_with(work="waiting for groups"), "learner", "waiting for groups"),
        (run_with(work="waiting for the server to pause"), "learner", "waiting for the server"),
        (run_with(work="loading the model"), "learner", DOWN),
        (run_with(work="computing a micro-batch", alive=False), "learner", DOWN),
    ],
)
def test_the_state_of_each_part(run: Any, part: str, state: str) -> None:
    assert utilization.part_states(run)[part] == state
