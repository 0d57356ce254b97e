"""The trackers of a run behind one `Tracker`: `metrics.jsonl`, the terminal, TensorBoard, and the trackers that a recipe names."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base import user_code
from agentrl.base.error_text import one_line_error
from agentrl.base.files import remove_torn_line
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.observe.background import BackgroundTracker
from agentrl.observe.terminal import Progress, TerminalTracker
from agentrl.plugins import parts
from agentrl.protocols import Interval, Tracker
from agentrl.records import Group, SwapReport

logger = logging.getLogger(__name__)


class RunTracker(Tracker):
    """Writes `metrics.jsonl`, then calls the other trackers. Use it from one thread only, and close it at the end.

    The tracker also sends alerts about new reasons for excluding episodes and about the first step in which nothing was learned. If a
    tracker raises an exception, the exception is logged, and the tracker is still called for later events. Only an exception while writing
    `metrics.jsonl` stops the run. The methods of a tracker must return at once. A tracker that may block is wrapped in
    `agentrl.observe.background.BackgroundTracker`.

    Args:
        run_dir: the run folder. Lines are appended to its `metrics.jsonl`.
        trackers: the other trackers; `open_trackers` opens those that a recipe names.
        steps: number of learner steps in the run; 0 means unknown.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = (), *, steps: int = 0) -> None:
        self._metrics = MetricsFile(run_dir)
        self._trackers = tuple(trackers)
        self._progress = Progress(name=run_dir.name, steps=steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a finished step."""
        self._metrics.log(step, metrics)
        self._each(lambda one: one.log(step, metrics))
        if idle := self._progress.finished_step(step, metrics):
            self.alert(f"step {step}: {idle}")

    def alert(self, text: str) -> None:
        """Reports a problem that needs attention."""
        self._each(lambda one: one.alert(text))

    def stage(self, name: str, detail: str = "") -> None:
        """Reports the start of a stage."""
        self._each(lambda one: one.stage(name, detail))

    def progress(self, index: int, group: Group) -> None:
        """Reports a finished group, with an alert for each new reason for excluding episodes."""
        self._each(lambda one: one.progress(index, group))
        for reason in self._progress.finished_group(group):
            self.alert(f"episodes are excluded: {reason}")

    def evaluating(self, done: int, total: int) -> None:
        """Reports the progress of an evaluation."""
        self._each(lambda one: one.evaluating(done, total))

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """Reports the success rates from an evaluation."""
        self._each(lambda one: one.evaluated(phase, rates))

    def swapped(self, report: SwapReport) -> None:
        """Reports a weight swap."""
        self._each(lambda one: one.swapped(report))

    def judged(self, version: int, outcome: str, reason: str) -> None:
        """Reports a decision of the gate."""
        self._each(lambda one: one.judged(version, outcome, reason))

    def close(self) -> None:
        """Closes all trackers, and then `metrics.jsonl`. Idempotent."""
        self._each(lambda one: one.close())
        self._metrics.close()

    def _each(self, notify: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            with user_code.logging_faults(f"tracker {type(tracker).__name__}"):
                notify(tracker)


class MetricsFile(Tracker):
    """Writes `metrics.jsonl`, which has one line per step and from which the summary and the report are computed."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        remove_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a finished step. Values that are not finite are written as null."""
        finite = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard(Tracker):
    """Writes scalars to a new event file in `logs/tensorboard` in the run folder. If writing fails, logs the error and writes nothing more.

    The writer of the TensorBoard package is not used, because its thread exits when the disk is full, and the buffered data is lost.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._scalar = Event, scalar_pb
        self._folder = run_dir / "logs" / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"  # TensorBoard recognizes files by this prefix
        self._file = (self._folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a finished step."""
        event = self._event(wall_time=time.time(), step=step)
        for key, value in metrics.items():
            event.summary.MergeFrom(self._scalar(f"{'eval' if key.startswith('heldout') else 'train'}/{key}", float(value)))
        self._write(event)

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):  # already reported when writing failed
            self._file.close()

    def _write(self, event: Any) -> None:
        if self._file.closed:
            return
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as error:
            logger.warning("%s: %s; no more events are written there", self._folder, one_line_error(error))
            self.close()


class StageClock(Tracker):
    """Measures the seconds spent in each stage of a run. If a stage is entered again, the time is added to its earlier time.

    `began` is the start time of the stage `prepare` in monotonic seconds; None means that no stage has started.
    """

    def __init__(self, *, began: float | None = None) -> None:
        self._wall_s: dict[str, float] = {} if began is None else {"prepare": 0.0}
        self._running = "" if began is None else "prepare"
        self._began = time.monotonic() if began is None else began

    def stage(self, name: str, detail: str = "") -> None:
        """Starts a stage."""
        self.close()
        self._wall_s.setdefault(name, 0.0)
        self._running = name

    @property
    def wall_s(self) -> dict[str, float]:
        """The seconds spent in each stage so far, in the order in which the stages started."""
        now = time.monotonic()
        return {name: spent + (now - self._began if name == self._running else 0.0) for name, spent in self._wall_s.items()}

    def close(self) -> None:
        """Ends the current stage. Idempotent."""
        now = time.monotonic()
        if self._running:
            self._wall_s[self._running] += now - self._began
        self._running, self._began = "", now


def open_terminal(run_dir: Path, recipe: Recipe) -> TerminalTracker:
    """Opens the tracker `terminal`."""
    return TerminalTracker(run_dir.name, steps=recipe.steps or 0)


def open_tensorboard(run_dir: Path, recipe: Recipe) -> TensorBoard:
    """Opens the tracker `tensorboard`."""
    return TensorBoard(run_dir)


def open_trackers(run_dir: Path, recipe: Recipe, *, console: bool) -> list[Tracker]:
    """Opens all trackers of a recipe, or none if one of them fails. If `console` is False, `terminal` prints to standard error. Third-party
    and user-supplied trackers run in the background.

    Raises `UserError` (usually `PluginError`) or `OSError` if a tracker cannot be opened.
    """
    opened: list[Tracker] = []
    try:
        for part in recipe.trackers:
            if part.ref == "terminal" and not console:
                opened.append(TerminalTracker(run_dir.name, steps=recipe.steps or 0, stderr=True))
            elif part.ref in ("terminal", "tensorboard"):
                opened.append(parts.make_part(parts.TRACKER, part, run_dir, recipe))
            else:
                make = partial(parts.make_part, parts.TRACKER, part, run_dir, recipe)
                opened.append(BackgroundTracker(make, name=part.ref))
    except (AgentRLError, OSError):
        for tracker in reversed(opened):
            tracker.close()
        raise
    return opened
