"""A resumed run completes the step of a driver that died between a swap and the step's end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.base.loop_lag import DRIVER_LAG, TICK_S
from agentrl.experience import DriverStore
from agentrl.observe.timeline import PARTS
from agentrl.records import PolicyVersion, VersionState
from agentrl.run import versions
from agentrl.run.versions import StepRecords
from agentrl.session.opening import Progress

FIELDS = ("recipe", "registry", "served", "tracker", "evaluation", "order", "store", "fault_rate")


def version(number: int) -> PolicyVersion:
    state = VersionState.SERVING if number == 2 else VersionState.SERVED
    return PolicyVersion(
        number=number, parent=number - 1 if number else None, folder=f"versions/{number:06d}", sha256="0" * 64, state=state
    )


def records(*, training: bool = False, **fields: Any) -> StepRecords:
    parts: dict[str, Any] = dict.fromkeys(FIELDS) | fields
    pace: Any = None
    progress = Progress(stop_at=4)
    if training:
        progress.timeline.restart()
    return StepRecords(folder=Path(), progress=progress, pace=pace, **parts)


@pytest.mark.parametrize(("recorded", "every", "evaluated"), [({1}, 2, ["step2"]), ({1, 2}, 2, []), ({1}, 3, []), (set(), 2, ["step2"])])
async def test_an_interrupted_evaluation_is_repeated(
    recorded: set[int], every: int, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: dict[int, dict[str, float]] = {number: {} for number in recorded}
    phases: list[str] = []

    async def evaluate(phase: str, *, step: int) -> dict[str, float]:
        phases.append(phase)
        return {"heldout": 0.5}

    monkeypatch.setattr(versions.measure, "recorded_steps", lambda folder: set(lines))

    async def measured(*_: Any) -> dict[str, float]:
        return {"reward_mean": 1.0}

    async def record(self: StepRecords, version: PolicyVersion, metrics: dict[str, float]) -> None:
        lines[version.number] = metrics

    monkeypatch.setattr(StepRecords, "_metrics", measured)
    monkeypatch.setattr(StepRecords, "_record", record)
    steps = records(
        recipe=SimpleNamespace(steps=4, evaluation=SimpleNamespace(every=every), learner=SimpleNamespace(keep_versions=2)),
        registry=SimpleNamespace(get=version, prune=lambda keep: None),
        served=SimpleNamespace(version=2),
        evaluation=SimpleNamespace(evaluate_once=evaluate),
        tracker=SimpleNamespace(stage=lambda *_: None),
    )
    await steps.finish_serving()
    await steps.record_missing()
    assert phases == evaluated and set(lines) == {1, 2}
    assert lines[2] == ({} if 2 in recorded else {"reward_mean": 1.0, **({"heldout": 0.5} if evaluated else {})})


@pytest.mark.parametrize("trained_here", [True, False])
async def test_only_a_step_of_this_driver_has_the_event_loops_lag(trained_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.measure, "step_metrics", lambda *_, **__: {})
    monkeypatch.setattr(versions.measure, "record_excluded", lambda *_: None)
    nothing = SimpleNamespace(figures=dict, attempt_metrics=dict)
    steps = records(
        training=trained_here,
        order=SimpleNamespace(extra=0, block=lambda number: range(number, number + 1)),
        store=DriverStore(lambda: cast(Any, SimpleNamespace(groups=tuple, entries=lambda **_: (), parked=tuple))),
        fault_rate=nothing,
        served=SimpleNamespace(figures=dict, version=0),
    )
    async with DRIVER_LAG.watched(lambda alert: None):
        await asyncio.sleep(5 * TICK_S)
        metrics = await steps._metrics(version(1), None)
    queues = {"groups_running", "groups_ready", "groups_assigned"}
    timeline = {f"timeline/{part}/down" for part in PARTS} | {f"utilization/{part}" for part in PARTS} | {"timeline/step/nothing"}
    assert set(metrics) == ({"loop_lag_ms_p99", "loop_lag_ms_max"} | queues | timeline if trained_here else set()) | {"groups_late"}
