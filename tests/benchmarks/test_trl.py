"""The peer's run, seen from our process: when it is evaluated, when it reaches the target, and the result of an early end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import InfrastructureError
from benchmarks.contest import trl
from benchmarks.contest.outcome import Outcome, Point
from benchmarks.contest.setting import ROOT, Setting
from benchmarks.contest.watch import Progress, running

SETTING = Setting(recipe="recipes/quickstart.py", mode="multi", backend="bubblewrap", every=2)
WORKER = """
import json, sys, time
from pathlib import Path
work, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
events = (work / "events.jsonl").open("a")
for step in range(1, steps + 1):
    time.sleep(seconds)
    parts = {"start": 1.0, "rollout": 2.0 * step}
    counts = dict(sampled=100 * step, trained=90 * step, episodes=8, faults=0)
    report = dict(event="step", step=step, clock_s=60.0 * step, asks=step % 2 == 0, parts=parts, **counts)
    print(json.dumps(report), file=events, flush=True)
    if report["asks"] and sys.stdin.readline().strip() != "go":
        break
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a stand-in for the worker. `success`: the success rate of its weights by step."""

    def run(setting: Setting, *, steps: int, success: dict[int, float], seconds: float = 0.0, code: str = WORKER) -> Outcome:
        def started(*_: Any, **__: Any) -> Any:
            tmp_path.joinpath("worker.py").write_text(code)
            command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), str(steps), str(seconds)]
            return running(command, log=tmp_path / "worker.log", root=ROOT, stdin=-1)

        def evaluated(*_: Any, step: int, clock_s: float) -> Point:
            return Point(step=step, clock_s=clock_s, value=success[step], ci_low=0.0, ci_high=1.0, n=8)

        monkeypatch.setattr(trl, "started", started)
        monkeypatch.setattr(trl, "evaluated", evaluated)
        monkeypatch.setattr(trl, "_POLL_S", 0.01)
        return trl.run("trl", setting, 0, tmp_path, Progress("t", 1.0), dict(trl.OPTIONS))

    return run


def test_the_peer_trains_until_an_evaluation_reaches_the_target(peer: Callable[..., Outcome]) -> None:
    outcome = peer(SETTING, steps=8, success={2: 0.5, 4: 0.95})
    assert (outcome.ended, outcome.arrived_s, outcome.steps, outcome.tokens_sampled) == ("arrived", 240.0, 4, 400)
    assert [point.step for point in outcome.curve] == [2, 4]
    assert outcome.after == outcome.curve[-1]


def test_a_run_that_ends_early_is_evaluated_at_its_last_step(peer: Callable[..., Outcome]) -> None:
    outcome = peer(SETTING, steps=3, success={2: 0.5, 3: 0.6})
    assert (outcome.ended, outcome.arrived_s, outcome.clock_s, outcome.steps) == ("steps", None, 180.0, 3)
    assert outcome.after is not None and outcome.after.value == 0.6


def test_a_run_whose_last_weights_reach_the_target_has_arrived(peer: Callable[..., Outcome]) -> None:
    outcome = peer(SETTING, steps=3, success={2: 0.5, 3: 0.95})
    assert (outcome.ended, outcome.arrived_s, outcome.clock_s, outcome.steps) == ("arrived", 180.0, 180.0, 3)


def test_a_target_reached_after_the_time_limit_does_not_count(peer: Callable[..., Outcome]) -> None:
    outcome = peer(replace(SETTING, minutes=3.0), steps=5, success={2: 0.5, 4: 0.95, 5: 0.96})
    assert (outcome.ended, outcome.arrived_s) == ("steps", None)


@pytest.mark.slow
def test_a_run_without_a_step_in_its_time_is_a_result(peer: Callable[..., Outcome]) -> None:
    outcome = peer(replace(SETTING, minutes=0.01), steps=1, success={}, seconds=60.0)
    assert (outcome.ended, outcome.steps, outcome.after, outcome.curve) == ("time", 0, None, ())


def test_a_failed_run_raises_an_error_with_the_end_of_its_log(peer: Callable[..., Outcome]) -> None:
    with pytest.raises(InfrastructureError, match="ended with exit code 3: out of memory"):
        peer(SETTING, steps=1, success={}, code="import sys; print('out of memory'); sys.exit(3)")
