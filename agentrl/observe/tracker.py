"""Where the metrics of a run go: `metrics.jsonl`, TensorBoard, and the terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from agentrl.observe.stats import Rate
from agentrl.observe.terminal import Progress, Terminal
from agentrl.records import Group


class RunTracker:
    """A `Tracker` for one run folder. Use it from one thread, and close it.

    Args:
        run_dir: the run folder; `metrics.jsonl` is appended to, `logs/tensorboard/` gets a new event file.
        console: show progress on standard output: live in a terminal, otherwise one line a step.
        steps: learner steps of the whole run, for the progress bar and the estimate of the time left; 0: unknown.
    """

    def __init__(self, run_dir: Path, *, console: bool, steps: int = 0) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        _drop_torn_line(path)
        self._progress = Progress(name=run_dir.name, steps=steps)
        self._metrics = path.open("a", encoding="utf-8")
        self._tensorboard = Writer(str(run_dir / "logs" / "tensorboard"))
        self._terminal = Terminal(self._progress, Console()) if console else None
        self._wall_s: dict[str, float] = {}
        self._stage_began = time.monotonic()
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a finished step. A value that is not finite is written as null, which is what JSON can say."""
        finite = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._metrics.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._metrics.flush()
        for key, value in metrics.items():
            self._tensorboard.add_scalar(f"{'eval' if key.startswith('heldout') else 'train'}/{key}", float(value), step)
        self._tensorboard.flush()
        idle = self._progress.finished_step(step, metrics)
        if self._terminal:
            self._terminal.step_line()
        if idle:
            self.alert(f"step {step}: {idle}")

    def alert(self, text: str) -> None:
        """Tells a person, where there is one, what must not be missed."""
        if self._terminal:
            self._terminal.alert_line(text)

    def stage(self, name: str, detail: str = "") -> None:
        """Ends the stage before and begins this one; a stage entered again adds to its time."""
        self._end_stage()
        self._wall_s.setdefault(name, 0.0)
        self._progress.begin_stage(name, detail)
        if self._terminal:
            self._terminal.stage_line()

    def progress(self, index: int, group: Group) -> None:
        """A group of the current stage was scored, or left out; the first time for a reason, that is told."""
        for reason in self._progress.finished_group(group):
            self.alert(f"episodes are left out: {reason}")

    def evaluating(self, done: int, total: int) -> None:
        """So many of the tasks of one evaluation are done."""
        self._progress.counted = (done, total)

    def evaluated(self, phase: str, rates: Mapping[str, Rate]) -> None:
        """The result of one evaluation, by split."""
        self._progress.evaluated({split: rate.value for split, rate in rates.items()})
        if self._terminal:
            self._terminal.evaluation_line(phase, rates)

    @property
    def wall_s(self) -> dict[str, float]:
        """Seconds by stage so far, the running stage included, in the order the stages began."""
        running = self._progress.stage
        return {
            name: spent + (time.monotonic() - self._stage_began if name == running and not self._closed else 0.0)
            for name, spent in self._wall_s.items()
        }

    def close(self) -> None:
        """Ends the stage and closes files and terminal. Idempotent."""
        if self._closed:
            return
        self._end_stage()
        self._closed = True
        if self._terminal:
            self._terminal.close()
        self._tensorboard.close()
        self._metrics.close()

    def _end_stage(self) -> None:
        now = time.monotonic()
        if self._progress.stage:
            self._wall_s[self._progress.stage] += now - self._stage_began
        self._stage_began = now


def _drop_torn_line(path: Path) -> None:
    """Cuts off a last line without its end, which a killed process may have left."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
