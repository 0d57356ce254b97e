"""Capture: which episodes are kept as traces, and why. It costs an episode that passed a count, and the run nothing when it fails."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.base import user_code
from agentrl.base.database import is_damaged
from agentrl.base.files import fsync_path
from agentrl.base.scores import is_at_least
from agentrl.config.failures import CaptureConfig
from agentrl.errors import StoreError
from agentrl.failure.collection import FILE, Collection
from agentrl.failure.listing import EpisodeCount, count_of_trace, kind_of_task, newest_version
from agentrl.failure.trace import CaptureReason, Trace
from agentrl.failure.triage import TriageRule, load_rules, tag_by_rules
from agentrl.records import Group, ScoredEpisode, Task

log = logging.getLogger(__name__)

Audit = Callable[[Task, ScoredEpisode], str]
"""Why a score was not earned, in words; empty when nothing speaks against it."""

MAX_KINDS = 200
"""Kinds of tasks counted apart; the rest are counted together."""
OTHERS = "others"
_BUSY_S = 2.0  # for another process that writes tags: all episodes wait meanwhile
_SLOW_S = 0.2  # what takes longer and fails all the same is left alone for `_REST` times as long: a locked file, a disk that hangs
_REST = 50
_TIMEOUTS, _LIMITS = ("wall_limit", "tool_timeout"), ("turn_limit", "token_limit")


def capture_reason(scored: ScoredEpisode, *, below: float, audit: str = "", passed_before: bool = False) -> CaptureReason | None:
    """Why an episode is a failure; None when it is none.

    Args:
        below: a finite score below this is a failure.
        audit: why the score was not earned, if anything says so.
        passed_before: whether an earlier version passed the same task.
    """
    value = scored.score.value
    if scored.episode.left_out or value is None or not math.isfinite(value):
        return CaptureReason.FAULT
    if audit:
        return CaptureReason.HACKED
    if is_at_least(value, below):
        return None
    if passed_before:
        return CaptureReason.REGRESSED
    reason = scored.episode.stop_reason
    if reason in _TIMEOUTS:
        return CaptureReason.TIMEOUT
    return CaptureReason.LIMIT if reason in _LIMITS else CaptureReason.FAILED


class Capture:
    """Keeps the failures of a run in its folder, tagged by rules, and counts all of them.

    What goes wrong here is logged, and costs that trace and nothing else: a damaged file is set aside and a new one begun, and where
    failing takes long, as with a locked file, no more than a fiftieth of the run's time goes into trying again.

    Args:
        origin: what is the same for all traces of the run: its name, recipe, model.
        audit: asked of every scored episode.
    """

    def __init__(self, run_dir: Path, config: CaptureConfig, *, origin: dict[str, str], audit: Audit = lambda task, scored: "") -> None:
        self.spent_s = 0.0  # CPU seconds
        self.lost = 0  # episodes that could not be looked at or written down
        self._run_dir, self._config, self._origin, self._audit = run_dir, config, origin, audit
        self._rules: tuple[TriageRule, ...] = load_rules(config.rules) if config.keep else ()
        self._collection: Collection | None = None
        self._kinds: set[str] = set()
        self._resting_until = 0.0  # monotonic

    def capture_group(self, task: Task | None, group: Group, *, step: int) -> None:
        """Looks at a stored group of training."""
        if group.fault is None:
            self._look(task, group.episodes, phase="train", step=step)
        elif group.fault.kind != "quarantined":  # its episodes are alike and empty: one stands for them
            self._look(task, group.episodes[:1], phase="train", step=step)

    def capture_episode(self, task: Task, scored: ScoredEpisode, *, phase: str, step: int, place: str = "") -> None:
        """Looks at an episode of an evaluation.

        Args:
            place: which evaluation it is, where several are of one phase: a task that another passed and this one fails has regressed.
        """
        self._look(task, (scored,), phase=phase, step=step, place=place or phase)

    def reset_phase(self, phase: str, *, step: int | None = None, place: str = "") -> None:
        """An evaluation begins, maybe again: what there is of it goes, of a phase or of one step of it."""
        if self._config.keep:
            self._guarded(lambda collection: collection.clear_phase(phase, step=step, place=place), episodes=0)

    def close(self) -> None:
        if self.lost:
            log.warning("%d episodes are not among the captured failures, nor in their counts: they could not be written", self.lost)
        self._shut()

    def _shut(self) -> None:
        if self._collection is not None:
            self._collection.close()
            self._collection = None

    def _look(self, task: Task | None, episodes: Sequence[ScoredEpisode], *, phase: str, step: int, place: str = "") -> None:
        if not self._config.keep:
            return
        if time.monotonic() < self._resting_until:
            self.lost += len(episodes)
            return
        started = time.thread_time()
        self._guarded(lambda collection: self._keep(collection, task, episodes, phase, step, place), episodes=len(episodes))
        self.spent_s += time.thread_time() - started

    def _keep(
        self, collection: Collection, task: Task | None, episodes: Sequence[ScoredEpisode], phase: str, step: int, place: str
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
            found = capture_reason(scored, below=self._config.below) if task is None else None
            tag, version = "task_fault" if found else "", newest_version(scored.episode)
            counts.append(EpisodeCount(phase=phase, step=step, version=version, why=str(found or ""), tag=tag, kind=self._kind(task), n=1))
            if found is None and place:
                passed.append((scored.episode.task_key, place))
        collection.add(traces, counts=counts, passed=passed)

    def _trace(self, collection: Collection, task: Task, scored: ScoredEpisode, phase: str, step: int, place: str) -> Trace | None:
        audit = self._audit(task, scored)
        passed = collection.first_passed_phase(scored.episode.task_key, but=place) if place else ""
        found = capture_reason(scored, below=self._config.below, audit=audit, passed_before=bool(passed))
        if found is None:
            return None
        origin = (
            dict(self._origin)
            | ({"audit": audit[:2000]} if audit else {})
            | ({"passed_in": passed} if found is CaptureReason.REGRESSED else {})
        )
        bare = Trace(
            id=scored.episode.id, why=found, task=task, episode=scored.episode, score=scored.score, phase=phase, step=step, origin=origin
        )
        return replace(bare, tags=tag_by_rules(bare, self._rules))

    def _kind(self, task: Task | None) -> str:
        """Kinds come from tasks, so there may be any number of them."""
        kind = kind_of_task(task)
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            return OTHERS
        self._kinds.add(kind)
        return kind

    def _guarded(self, step: Callable[[Collection], object], *, episodes: int) -> None:
        began = time.monotonic()
        try:
            try:
                step(self._opened())
            except StoreError as error:
                if not _damaged(error):
                    raise
                user_code.log_unexpected("the traces of this run are damaged; they are set aside, and new ones begun", error, trace=False)
                self._set_aside()
                step(self._opened())
        except Exception as error:
            self.lost += episodes
            user_code.log_unexpected("capturing a failure", error)
            if (took := time.monotonic() - began) > _SLOW_S:
                self._resting_until = time.monotonic() + _REST * took

    def _opened(self) -> Collection:
        if self._collection is None:
            config = self._config
            self._collection = Collection(
                self._run_dir, keep=config.keep, keep_bytes=config.keep_mb << 20, make=True, busy_timeout_s=_BUSY_S
            )
            self._kinds = {kind for (kind,) in self._collection.counts("kind")}
        return self._collection

    def _set_aside(self) -> None:
        self._shut()
        path = self._run_dir / FILE
        number = next(n for n in range(1, 10_000) if not path.with_name(f"damaged-{n}-{path.name}").exists())
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(path.with_name(f"damaged-{number}-{path.name}{suffix}"))
        fsync_path(path.parent)


def _damaged(error: StoreError) -> bool:
    return isinstance(error.__cause__, sqlite3.Error) and is_damaged(error.__cause__)
