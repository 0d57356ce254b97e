"""The benchmark of waiting tool calls: which tasks wait, how long, and when a run has reached a success rate."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.records import ExecResult, Limits, Split
from benchmarks.waits import ORDERS, WAIT_FILE, Curve, WaitingTables, python, row, wait_s


class LocalSandbox:
    """Runs programs in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def python(self, text: str, **_: Any) -> ExecResult:
        completed = subprocess.run([sys.executable, "-c", text], cwd=self._folder, capture_output=True, text=True)
        return ExecResult(exit_code=completed.returncode, stdout=completed.stdout, stderr=completed.stderr, wall_s=0.0)


def test_a_call_waits_for_the_time_of_its_task_and_then_runs_the_program(tmp_path: Path) -> None:
    (tmp_path / WAIT_FILE).write_text("0.25")
    start = time.monotonic()
    outcome = asyncio.run(python({"code": "print(6 * 7)"}, LocalSandbox(tmp_path), Limits()))  # type: ignore[arg-type]
    assert outcome.ok and "42" in outcome.output and time.monotonic() - start >= 0.25


def test_training_tasks_wait_up_to_half_a_minute_and_held_out_tasks_do_not() -> None:
    tasks = [WaitingTables().task(Split.TRAIN, index) for index in range(40)]
    waits = [float(task.files[WAIT_FILE]) for task in tasks]
    assert waits == pytest.approx([wait_s(task.id) for task in tasks], abs=1e-3) and len(set(waits)) > 30
    assert all(task.limits.tool_timeout_s > wait and task.limits.wall_s > 4 * wait for task, wait in zip(tasks, waits, strict=True))
    many = [wait_s(f"t{index}") for index in range(4000)]
    assert min(many) >= 0.1 and sum(wait == 30 for wait in many) / 4000 == pytest.approx(300**-0.5, rel=0.2)
    held_out = WaitingTables().task(Split.HELDOUT, 0)
    assert WAIT_FILE not in held_out.files and "python" in held_out.tools


def test_success_is_reached_at_the_first_window_of_steps_whose_mean_is_high_enough() -> None:
    quick = Curve(rewards=(0.2, 0.6, 0.8, 0.9), seconds=(10.0, 20.0, 30.0, 40.0), heldout=0.9)
    slow = Curve(rewards=(0.2, 0.6, 0.8, 0.9), seconds=(25.0, 50.0, 75.0, 100.0), heldout=0.8)
    assert [quick.steps_to(success, window=2) for success in (0.3, 0.7, 0.85, 0.9)] == [2, 3, 4, None]
    assert row(5, dict(zip(ORDERS, (slow, quick), strict=True)), success=0.7, window=2) == (
        "| 5 | 75 s (3) | 30 s (3) | 2.5 | 100 s | 40 s | 0.80 | 0.90 |"
    )
    assert "not reached" in row(5, dict(zip(ORDERS, (slow, quick), strict=True)), success=0.95, window=2)
