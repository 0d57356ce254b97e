"""What is made up for when a run goes on whose driver died between a swap and the end of its step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.base.loop_lag import DRIVER_LAG, TICK_S
from agentrl.records import PolicyVersion, VersionState
from agentrl.run import versions


def version(number: int) -> PolicyVersion:
    state = VersionState.SERVING if number == 2 else VersionState.SERVED
    return PolicyVersion(
        number=number, parent=number - 1 if number else None, folder=f"versions/{number:06d}", sha256="0" * 64, state=state
    )


@pytest.mark.parametrize(("known", "every", "evaluated"), [({1}, 2, ["step2"]), ({1, 2}, 2, []), ({1}, 3, []), (set(), 2, ["step2"])])
async def test_an_evaluation_that_was_under_way_is_made_again(
    known: set[int], every: int, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: dict[int, dict[str, float]] = {number: {} for number in known}
    made: list[str] = []

    async def evaluate(run: Any, phase: str, *, step: int) -> dict[str, float]:
        made.append(phase)
        return {"heldout": 0.5}

    monkeypatch.setattr(versions.measure, "recorded", lambda folder: set(lines))
    monkeypatch.setattr(versions, "_figures", lambda run, version, report: {"reward_mean": 1.0})
    monkeypatch.setattr(versions, "_record", lambda run, version, metrics: lines.__setitem__(version.number, metrics))
    monkeypatch.setattr(versions, "evaluate_once", evaluate)
    run: Any = SimpleNamespace(
        folder="f",
        registry=SimpleNamespace(get=version, prune=lambda keep: None),
        served=SimpleNamespace(version=2),
        recipe=SimpleNamespace(steps=4, evaluation=SimpleNamespace(every=every), learner=SimpleNamespace(keep_versions=2)),
        tracker=SimpleNamespace(stage=lambda *_: None),
        stop_at=4,
        last_step_at=None,
    )
    await versions.finish_serving_step(run)
    versions.record_missing_steps(run)
    assert made == evaluated and set(lines) == {1, 2}
    assert lines[2] == ({} if 2 in known else {"reward_mean": 1.0, **({"heldout": 0.5} if evaluated else {})})


@pytest.mark.parametrize("made_here", [True, False])
async def test_a_step_has_the_lag_of_the_loop_if_this_driver_made_it(made_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.measure, "step_metrics", lambda *_, **__: {})
    monkeypatch.setattr(versions.measure, "keep_left_out", lambda *_: None)
    nothing = SimpleNamespace(figures=dict, suspects=dict)
    steps = SimpleNamespace(indices=lambda step: (), extra=0)
    run: Any = SimpleNamespace(
        store=SimpleNamespace(groups=tuple), step_groups=steps, folder=Path(), faults=nothing, served=nothing, last_step_at=None
    )
    run.last_step_at = 0.0 if made_here else None
    async with DRIVER_LAG.watched(lambda alert: None):
        await asyncio.sleep(5 * TICK_S)
        figures = versions._figures(run, version(1), None)
    assert set(figures) == ({"loop_lag_ms_p99", "loop_lag_ms_max"} if made_here else set())
