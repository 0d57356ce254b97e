"""agentrl's run: starts `agentrl train`, reads its run folder, and stops it when it has reached the target."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.base.files import read_json_lines
from agentrl.errors import InfrastructureError
from benchmarks.contest.evaluation import evaluated, read, tail
from benchmarks.contest.outcome import Outcome, Point
from benchmarks.contest.setting import ROOT, Setting
from benchmarks.contest.watch import Progress, Watched, poll, running

_POLL_S = 0.5
_LEARNER_LINE = re.compile(r"step (\d+): .*checkpoint ([\d.]+) s, publish ([\d.]+) s")


class Follower:
    """Reads a run folder during the run: the time at which each version was published, and the evaluations."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._folder, self._setting = folder, setting
        self.published: dict[int, float] = {0: 0.0}  # version -> seconds from the command to its publication
        self.curve: list[Point] = []
        self.before_s = 0.0  # duration of the evaluation before training, which does not count as training
        self._began_before: float | None = None

    def look(self, elapsed_s: float) -> bool:
        """Reads new entries of the run folder. Returns True if the run can be stopped."""
        for path in sorted(self._folder.glob("versions/[0-9]*/version.json")):
            number = int(path.parent.name)
            if number == 0 and self._serving() and self._began_before is None:
                self._began_before = elapsed_s
            self.published.setdefault(number, elapsed_s)
        for phase, rates in self._phases().items():
            step = 0 if phase == "before" else self._last() if phase == "after" else int(phase.removeprefix("step"))
            if any(point.step == step for point in self.curve) or "value" not in rates.get("heldout", {}):
                continue
            if phase == "before" and self._began_before is not None:
                self.before_s = elapsed_s - self._began_before
            self.curve.append(read(rates, step=step, clock_s=self.clock(self.published.get(step, elapsed_s))))
        return self.arrived() is not None or self.clock(elapsed_s) > self._setting.minutes * 60

    def clock(self, elapsed_s: float) -> float:
        """Seconds of training: from the command on, without the evaluation before the first step."""
        return max(0.0, elapsed_s - self.before_s)

    def arrived(self) -> Point | None:
        return next(
            (point for point in self.curve if point.value >= self._setting.target and point.clock_s <= self._setting.minutes * 60), None
        )

    def _last(self) -> int:
        return max(self.published)

    def _serving(self) -> bool:
        """Whether version 0 answers, so that its evaluation has begun."""
        path = self._folder / "versions" / "000000" / "version.json"
        return path.exists() and '"serving"' in path.read_text()

    def _phases(self) -> dict[str, Any]:
        path = self._folder / "evaluations.json"
        try:
            phases: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        return phases


def run(setting: Setting, seed: int, work: Path, progress: Progress) -> Outcome:
    """Runs agentrl, from the command to the evaluation of the resulting model. A run that learned nothing is also a result.

    Raises `InfrastructureError` if the run fails before its last step.
    """
    steps = setting.build_recipe(seed).steps
    shutil.rmtree(work, ignore_errors=True)
    folder, log = work / "run", work / "train.log"
    command = [sys.executable, "-m", "agentrl", "train", setting.recipe, *setting.arguments(seed), "--run-dir", str(folder)]
    follower = Follower(folder, setting)
    with running(command, log=log, root=ROOT) as watched:
        poll(watched, _POLL_S, lambda: _looked(follower, watched, progress))
        ended_s, ended_by_itself = watched.elapsed_s, watched.ended()
    lines = _steps(folder)
    if ended_by_itself and len(lines) < steps:
        raise InfrastructureError(f"our run of seed {seed} ended with exit code {watched.process.returncode}: {tail(log)}")
    arrived = follower.arrived()
    outcome = Outcome(
        side="ours",
        seed=seed,
        ended="arrived" if arrived else "steps" if ended_by_itself else "time",
        arrived_s=arrived.clock_s if arrived else None,
        clock_s=follower.clock(ended_s),
        steps=len(lines),
        curve=tuple(follower.curve),
        after=None,
        tokens_sampled=_total(lines, "tokens_sampled"),
        tokens_trained=_total(lines, "tokens_trained"),
        episodes=_total(lines, "episodes"),
        faults=_total(lines, "episodes_left_out"),
        peak_gib=watched.peak_bytes / 2**30,
        parts=parts(folder, lines, arrived.step if arrived else None) if lines else {},
    )
    progress.say(f"{outcome.ended} after {outcome.steps} steps and {outcome.clock_s / 60:.1f} min; evaluating its model")
    if (folder / "model").is_dir():
        outcome = replace(outcome, after=evaluated(setting, seed, folder / "model", work, step=len(lines), clock_s=follower.clock(ended_s)))
    return outcome


def parts(folder: Path, lines: list[dict[str, Any]], arrived: int | None) -> dict[str, float]:
    """Returns the seconds per activity, from the run's metrics. Activities concurrent with the learner count as learner time; `rollout` is
    the rest.

    The evaluation of the step that reached the target is excluded, because the time to the target excludes it too.
    """
    stages: dict[str, float] = json.loads((folder / "summary.json").read_text())["wall_s"]
    learner = (folder / "logs" / "learner.log").read_text(errors="replace")
    saved = {int(step): float(checkpoint_s) + float(publish_s) for step, checkpoint_s, publish_s in _LEARNER_LINE.findall(learner)}
    if silent := [line["step"] for line in lines if int(line["step"]) - 1 not in saved]:
        raise InfrastructureError(f"{folder / 'logs' / 'learner.log'} does not contain the publishing time of steps {silent}")
    steps_s = sum(float(line["step_s"]) for line in lines)
    seconds = {
        "start": sum(stages.get(name, 0.0) for name in ("prepare", "start")),
        "update": sum(float(line.get("update_s", 0.0)) for line in lines),
        "sync": sum(saved[int(line["step"]) - 1] + float(line.get("swap_total_ms", 0.0)) / 1000 for line in lines),
        "evaluation": sum(stages[name] for name in stages if name.startswith("evaluate step") and name != f"evaluate step{arrived}"),
    }
    seconds["rollout"] = max(0.0, steps_s - seconds["update"] - seconds["sync"])
    return seconds


def _looked(follower: Follower, watched: Watched, progress: Progress) -> bool:
    over = follower.look(watched.elapsed_s)
    newest = max(follower.published)
    success = f"success {follower.curve[-1].value:.2f} at step {follower.curve[-1].step}" if follower.curve else "not yet evaluated"
    progress.show(follower.clock(watched.elapsed_s), f"step {newest}, {success}")
    return over


def _steps(folder: Path) -> list[dict[str, Any]]:
    """The last line of every step."""
    return list({line["step"]: line for line in read_json_lines(folder / "metrics.jsonl") if "episodes" in line}.values())


def _total(lines: list[dict[str, Any]], name: str) -> int:
    return int(sum(line.get(name) or 0 for line in lines))
