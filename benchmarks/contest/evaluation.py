"""One evaluation for both sides: `agentrl eval` of a model folder, greedily, on the same held-out tasks and the same vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from agentrl.errors import InfrastructureError
from benchmarks.contest.outcome import Point
from benchmarks.contest.setting import ROOT, Setting
from benchmarks.contest.watch import running

LIMIT_S = 3600.0


def evaluated(setting: Setting, seed: int, model: Path, work: Path, *, step: int, clock_s: float) -> Point:
    """Returns the success of a model folder. Raises `InfrastructureError`, with the end of the log, if the evaluation has no rate."""
    folder = work / f"eval-{step:04d}"
    shutil.rmtree(folder, ignore_errors=True)
    log = work / f"eval-{step:04d}.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "agentrl", "eval", setting.recipe, *setting.arguments(seed)]
    with running([*command, "--model", str(model), "--run-dir", str(folder)], log=log, root=ROOT) as watched:
        try:
            code = watched.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
    rates_path = folder / "evaluations.json"
    if code != 0 or not rates_path.exists():
        problem = f"did not end within {LIMIT_S:.0f} s" if code is None else f"ended with exit code {code}"
        raise InfrastructureError(f"the evaluation of step {step} {problem}: {tail(log)}")
    return read(json.loads(rates_path.read_text())["eval"], step=step, clock_s=clock_s)


def read(phase: dict[str, dict[str, float]], *, step: int, clock_s: float) -> Point:
    """A phase of `evaluations.json`."""
    rate = phase["heldout"]
    values = {name: float(rate[name]) for name in ("value", "ci_low", "ci_high")}
    return Point(step=step, clock_s=clock_s, n=int(rate["n"]), **values)


def tail(log: Path, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "no log"
