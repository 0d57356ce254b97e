"""Captures the failed episodes of a run as traces, and counts all episodes."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.base import user_code
from agentrl.base.database import is_damaged
from agentrl.base.files import fsync_path
from agentrl.base.numbers import is_at_least
from agentrl.config.gate import CaptureConfig
from agentrl.errors import StoreError
from agentrl.failure.collection import FILE, Collection, EpisodeCount, count_of_trace
from agentrl.failure.trace import CaptureReason, Trace, kind_of_task, newest_version
from agentrl.failure.triage import TriageRule, load_rules, tag_by_rules
from agentrl.records import Group, ScoredEpisode, Task
from agentrl.records.environment import PASS_THRESHOLD
from agentrl.records.trajectory import TRUNCATED

log = logging.getLogger(__name__)

Audit = Callable[[Task, ScoredEpisode], str]
"""Returns the reason why a score was not earned; empty if the score was earned."""

MAX_KINDS = 200
"""Maximum number of task kinds that are counted separately. All other kinds are counted together."""
OTHERS = "others"
KEPT = 500  # traces per phase
_KEEP_BYTES = 256 << 20  # bytes of compressed traces per phase: about 500 of 512 KiB; most have 4 KiB, so `KEPT` is reached first
_BUSY_S = 2.0  # maximum wait while another process writes
_SLOW_S, _PAUSE_FACTOR = 0.2, 50  # after a failure that took long, such as a locked file, capture pauses for 50 times as long
_TIMEOUTS, _LIMITS = ("wall_limit", "tool_timeout"), ("turn_limit", "token_limit")


def capture_reason(scored: ScoredEpisode, *, threshold: float | None, audit: str = "", passed_before: bool = False) -> CaptureReason | None:
    """Returns why an episode is a failure, or None if it is not.

    Args:
        threshold: the lowest score that counts as passed; None means that no score is too low.
        audit: the reason why the score was not earned; empty if it was earned.
        passed_before: whether an earlier version passed the same task.
    """
    value = scored.score.value
    if scored.episode.left_out or value is None or not math.isfinite(value):
        return CaptureReason.FAULT
    if audit:
        return CaptureReason.HACKED
    if threshold is None or is_at_least(value, threshold) or scored.episode.stop_reason == TRUNCATED:  # truncation is not a failure
        return None
    if passed_before:
        return CaptureReason.REGRESSED
    reason = scored.episode.stop_reason
    if reason in _TIMEOUTS:
        return CaptureReason.TIMEOUT
    return CaptureReason.LIMIT if reason in _LIMITS else CaptureReason.FAILED


class Capture:
    """Tags the failures of a run by rules, stores them in the run folder, and counts all episodes.

    The methods write to the disk, so call them in a thread. Several threads may call the methods at once. If a write fails, the error is
    logged, and the episodes of that write are lost. A damaged file is renamed, and a new file is started. If a write fails only after a
    long wait, for example for a locked file, capturing pauses and also loses the episodes of the pause, so that failing writes take at most
    one fiftieth of the run's time. Raises `PluginError` if a triage rule in `config` is invalid.

    Args:
        origin: run, recipe and model, stored with each trace.
        audit: called with each task and its scored episode; returns why the score was not earned.
    """

    def __init__(self, run_dir: Path, config: CaptureConfig, *, origin: dict[str, str], audit: Audit = lambda task, scored: "") -> None:
        self.spent_s = 0.0  # CPU seconds
        self.lost = 0  # episodes that were neither captured nor counted because of errors
        self._run_dir, self._origin, self._audit = run_dir, origin, audit
        self._rules: tuple[TriageRule, ...] = load_rules(config.rules)
        self._collection: Collection | None = None
        self._kinds: set[str] = set()
        self._paused_until = 0.0  # monotonic
        self._lock = threading.Lock()  # guards the attributes above

    def capture_group(self, task: Task | None, group: Group, *, step: int) -> None:
        """Captures the failures in a stored training group. A second call for the same group has no effect, even in a later process.

        A group with a fault counts as one episode. A group whose task was already quarantined is ignored.
        """
        once = f"group {group.index}"
        if group.fault is None:
            self._capture(task, group.episodes, phase="train", step=step, once=once)
        elif group.fault.kind != "quarantined":  # all of its episodes are empty and equal, so one is enough
            self._capture(task, group.episodes[:1], phase="train", step=step, once=once)

    def capture_episode(self, task: Task, scored: ScoredEpisode, *, phase: str, step: int, place: str = "") -> None:
        """Counts an evaluation episode, and captures it if it failed.

        Args:
            place: name of the evaluation if the phase has several. A failed task counts as regressed if it passed in a different
                evaluation.
        """
        self._capture(task, (scored,), phase=phase, step=step, place=place or phase)

    def reset_phase(self, phase: str, *, step: int | None = None, place: str = "") -> None:
        """Deletes the traces and counts of a phase, or of one step of the phase, before an evaluation starts or restarts."""
        with self._lock:
            self._guarded(lambda collection: collection.clear_phase(phase, step=step, place=place), episodes=0)

    def close(self) -> None:
        """Closes the file of traces, and logs how many episodes could not be written to it."""
        if self.lost:
            log.warning("%d episodes are missing from the captured failures and their counts: they could not be written", self.lost)
        with self._lock:
            self._close_collection()

    def _close_collection(self) -> None:
        if self._collection is not None:
            self._collection.close()
            self._collection = None

    def _capture(
        self, task: Task | None, episodes: Sequence[ScoredEpisode], *, phase: str, step: int, place: str = "", once: str = ""
    ) -> None:
        with self._lock:
            if time.monotonic() < self._paused_until:
                self.lost += len(episodes)
                return
            started = time.thread_time()
            self._guarded(lambda collection: self._store(collection, task, episodes, phase, step, place, once), episodes=len(episodes))
            self.spent_s += time.thread_time() - started

    def _store(
        self, collection: Collection, task: Task | None, episodes: Sequence[ScoredEpisode], phase: str, step: int, place: str, once: str
    ) -> None:
        traces: list[Trace] = []
        counts: list[EpisodeCount] = []
        passed: list[tuple[str, str]] = []
        for scored in episodes:
            trace = None if task is None else self._trace(collection, task, scored, phase, step, place)
            if trace is not None:
                traces.append(trace)
                counts.append(replace(count_of_trace(trace), kind=self._kind(task)))
                continue
            reason = capture_reason(scored, threshold=PASS_THRESHOLD) if task is None else None
            tag, version = "task_fault" if reason else "", newest_version(scored.episode)
            counts.append(EpisodeCount(phase=phase, step=step, version=version, why=str(reason or ""), tag=tag, kind=self._kind(task), n=1))
            if reason is None and place:
                passed.append((scored.episode.task_key, place))
        collection.add(traces, counts=counts, passed=passed, once=once)

    def _trace(self, collection: Collection, task: Task, scored: ScoredEpisode, phase: str, step: int, place: str) -> Trace | None:
        episode, audit = scored.episode, self._audit(task, scored)
        passed_in = collection.first_passed_phase(episode.task_key, but=place) if place else ""
        reason = capture_reason(scored, threshold=task.pass_threshold, audit=audit, passed_before=bool(passed_in))
        if reason is None:
            return None
        origin = dict(self._origin) | ({"audit": audit[:2000]} if audit else {})
        if reason is CaptureReason.REGRESSED:
            origin["passed_in"] = passed_in
        trace = Trace(id=episode.id, why=reason, task=task, episode=episode, score=scored.score, phase=phase, step=step, origin=origin)
        return replace(trace, tags=tag_by_rules(trace, self._rules))

    def _kind(self, task: Task | None) -> str:
        """Returns the kind under which a task is counted; `OTHERS` for a new kind if `MAX_KINDS` kinds are already counted."""
        kind = kind_of_task(task)
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            return OTHERS
        self._kinds.add(kind)
        return kind

    def _guarded(self, step: Callable[[Collection], object], *, episodes: int) -> None:
        started = time.monotonic()
        try:
            try:
                step(self._open())
            except StoreError as error:
                if not (isinstance(error.__cause__, sqlite3.Error) and is_damaged(error.__cause__)):
                    raise
                user_code.log_unexpected("the file of this run's traces is damaged and is renamed", error, trace=False)
                self._rename_damaged()
                step(self._open())
        except Exception as error:
            self.lost += episodes
            user_code.log_unexpected("capturing a failure", error)
            if (took := time.monotonic() - started) > _SLOW_S:
                self._paused_until = time.monotonic() + _PAUSE_FACTOR * took

    def _open(self) -> Collection:
        if self._collection is None:
            self._collection = Collection(self._run_dir, keep=KEPT, keep_bytes=_KEEP_BYTES, make=True, busy_timeout_s=_BUSY_S)
            self._kinds = {kind for (kind,) in self._collection.counts("kind")}
        return self._collection

    def _rename_damaged(self) -> None:
        self._close_collection()
        path = self._run_dir / FILE
        number = next(n for n in range(1, 10_000) if not path.with_name(f"damaged-{n}-{path.name}").exists())
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(path.with_name(f"damaged-{number}-{path.name}{suffix}"))
        fsync_path(path.parent)
