"""Who hears of a run: `metrics.jsonl`, the terminal, TensorBoard, and whatever trackers a recipe names, all behind one `Tracker`."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.base import user_code
from agentrl.base.error_text import one_line_error
from agentrl.base.files import remove_torn_line
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.observe.terminal import Progress, Terminal
from agentrl.plugins import parts
from agentrl.protocols import Interval, Tracker
from agentrl.records import Group

logger = logging.getLogger(__name__)


class RunTracker(Tracker):
    """Tells each tracker of a run in turn, after the run's own record. Use it from one thread, and close it.

    What a person should hear of is worked out here, once: a reason for leaving episodes out that is new, a step that changed nothing.
    A tracker that raises is reported in the log and told of the next event all the same; only the run's own record ends the run.

    Args:
        run_dir: the run folder; `metrics.jsonl` is appended to.
        trackers: the others; `open_trackers` makes those of a recipe.
        steps: learner steps of the whole run; 0: unknown.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = (), *, steps: int = 0) -> None:
        self._metrics = MetricsFile(run_dir)
        self._trackers = tuple(trackers)
        self._progress = Progress(name=run_dir.name, steps=steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.log(step, metrics)
        self._each(lambda one: one.log(step, metrics))
        if idle := self._progress.finished_step(step, metrics):
            self.alert(f"step {step}: {idle}")

    def alert(self, text: str) -> None:
        self._each(lambda one: one.alert(text))

    def stage(self, name: str, detail: str = "") -> None:
        self._each(lambda one: one.stage(name, detail))

    def progress(self, index: int, group: Group) -> None:
        """Hands the group on; the first time that episodes are left out for a reason, that is told."""
        self._each(lambda one: one.progress(index, group))
        for reason in self._progress.finished_group(group):
            self.alert(f"episodes are left out: {reason}")

    def evaluating(self, done: int, total: int) -> None:
        self._each(lambda one: one.evaluating(done, total))

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        self._each(lambda one: one.evaluated(phase, rates))

    def close(self) -> None:
        """Closes them all, the run's own record last. Idempotent."""
        self._each(lambda one: one.close())
        self._metrics.close()

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                tell(tracker)
            except BaseException as error:  # a library may raise SystemExit: rich does if the pipe has no reader
                if user_code.is_interrupt(error):
                    raise
                user_code.log_unexpected(f"tracker {type(tracker).__name__}", error)


class MetricsFile(Tracker):
    """The run's own record, `metrics.jsonl`: a line for each step, from which summary and report are made."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        remove_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a finished step. A value that is not finite is written as null, which is what JSON can say."""
        finite = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(Tracker):
    """Scalars in a new event file in `logs/tensorboard` of the run folder. One that can no longer be written to is told of, and left.

    TensorBoard's own writer has a thread that dies of a full disk, and takes what it held with it; so each step is written here.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._scalar = Event, scalar_pb
        self._folder = run_dir / "logs" / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"  # readers know a file by this beginning
        self._file = (self._folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for key, value in metrics.items():
            event.summary.MergeFrom(self._scalar(f"{'eval' if key.startswith('heldout') else 'train'}/{key}", float(value)))
        self._write(event)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was told when it was
            self._file.close()

    def _write(self, event: Any) -> None:
        if self._file.closed:
            return
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as error:
            logger.warning("%s: %s; nothing more is written there", self._folder, one_line_error(error))
            self.close()


class TerminalTracker(Tracker):
    """Progress on standard output: live in a terminal, otherwise one line for each event.

    Args:
        steps: of the whole run, for the progress bar and the estimate of the time left; 0: unknown.
        stderr: print to standard error, because standard output is for a program.
    """

    def __init__(self, name: str, *, steps: int = 0, stderr: bool = False) -> None:
        self._progress = Progress(name=name, steps=steps)
        self._terminal = Terminal(self._progress, Console(stderr=stderr))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.finished_step(step, metrics)
        self._terminal.step_line()

    def alert(self, text: str) -> None:
        self._terminal.alert_line(text)

    def stage(self, name: str, detail: str = "") -> None:
        self._progress.begin_stage(name, detail)
        self._terminal.stage_line()

    def progress(self, index: int, group: Group) -> None:
        self._progress.finished_group(group)

    def evaluating(self, done: int, total: int) -> None:
        self._progress.counted = (done, total)

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        self._progress.evaluated({split: rate.value for split, rate in rates.items()})
        self._terminal.evaluation_line(phase, rates)

    def close(self) -> None:
        self._terminal.close()


class StageClock(Tracker):
    """Seconds by stage; a stage that is entered again adds to its time.

    `began`: when the stage `prepare` began, which runs until another does (monotonic seconds); None: no stage runs yet.
    """

    def __init__(self, *, began: float | None = None) -> None:
        self._wall_s: dict[str, float] = {} if began is None else {"prepare": 0.0}
        self._running = "" if began is None else "prepare"
        self._began = time.monotonic() if began is None else began

    def stage(self, name: str, detail: str = "") -> None:
        self.close()
        self._wall_s.setdefault(name, 0.0)
        self._running = name

    @property
    def wall_s(self) -> dict[str, float]:
        """Seconds by stage so far, the running stage included, in the order the stages began."""
        now = time.monotonic()
        return {name: spent + (now - self._began if name == self._running else 0.0) for name, spent in self._wall_s.items()}

    def close(self) -> None:
        """Ends the stage. Idempotent."""
        now = time.monotonic()
        if self._running:
            self._wall_s[self._running] += now - self._began
        self._running, self._began = "", now


def open_terminal(run_dir: Path, recipe: Recipe) -> TerminalTracker:
    """The tracker that a recipe calls terminal."""
    return TerminalTracker(run_dir.name, steps=recipe.steps)


def open_tensorboard(run_dir: Path, recipe: Recipe) -> TensorBoard:
    """The tracker that a recipe calls tensorboard."""
    return TensorBoard(run_dir)


def open_trackers(run_dir: Path, recipe: Recipe, *, console: bool) -> list[Tracker]:
    """The trackers that a recipe names, all or none of them open; without `console` the terminal's progress goes to standard error.

    Raises `PluginError` for one that cannot be opened.
    """
    opened: list[Tracker] = []
    try:
        for name in recipe.trackers:
            if name == "terminal" and not console:
                opened.append(TerminalTracker(run_dir.name, steps=recipe.steps, stderr=True))
            else:
                opened.append(parts.make_part(parts.TRACKER, name, recipe.tracker_options.get(name), run_dir, recipe))
    except (AgentRLError, OSError):
        for tracker in reversed(opened):
            tracker.close()
        raise
    return opened
