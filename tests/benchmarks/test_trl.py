"""The peer's run from outside: when it is evaluated, when it has arrived, and what is kept of one that did not come far."""

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
    told = dict(event="step", step=step, clock_s=60.0 * step, asks=step % 2 == 0, parts=parts, **counts)
    print(json.dumps(told), file=events, flush=True)
    if told["asks"] and sys.stdin.readline().strip() != "go":
        break
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a stand-in for the worker whose weights succeed as `success` says, by step."""

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


def test_it_trains_until_an_evaluation_reaches_the_target(peer: Callable[..., Outcome]) -> None:
    made = peer(SETTING, steps=8, success={2: 0.5, 4: 0.95})
    assert (made.ended, made.arrived_s, made.steps, made.tokens_sampled) == ("arrived", 240.0, 4, 400)
    assert [point.step for point in made.curve] == [2, 4]
    assert made.after == made.curve[-1]


def test_one_that_ends_before_is_evaluated_where_it_ended(peer: Callable[..., Outcome]) -> None:
    made = peer(SETTING, steps=3, success={2: 0.5, 3: 0.6})
    assert (made.ended, made.arrived_s, made.clock_s, made.steps) == ("steps", None, 180.0, 3)
    assert made.after is not None and made.after.value == 0.6


def test_one_whose_last_weights_reach_the_target_has_arrived(peer: Callable[..., Outcome]) -> None:
    made = peer(SETTING, steps=3, success={2: 0.5, 3: 0.95})
    assert (made.ended, made.arrived_s, made.clock_s, made.steps) == ("arrived", 180.0, 180.0, 3)


def test_a_target_that_is_reached_too_late_is_not_reached(peer: Callable[..., Outcome]) -> None:
    made = peer(replace(SETTING, minutes=3.0), steps=5, success={2: 0.5, 4: 0.95, 5: 0.96})
    assert (made.ended, made.arrived_s) == ("steps", None)


@pytest.mark.slow
def test_one_that_makes_no_step_in_its_time_is_a_result(peer: Callable[..., Outcome]) -> None:
    made = peer(replace(SETTING, minutes=0.01), steps=1, success={}, seconds=60.0)
    assert (made.ended, made.steps, made.after, made.curve) == ("time", 0, None, ())


def test_one_that_fails_is_told_with_the_end_of_its_log(peer: Callable[..., Outcome]) -> None:
    with pytest.raises(InfrastructureError, match="ended with 3: out of memory"):
        peer(SETTING, steps=1, success={}, code="import sys; print('out of memory'); sys.exit(3)")
