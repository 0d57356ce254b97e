"""A verifier that fails on request, and the cases that use it. A failure must never result in a score."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.chaos.parts import Injected
from agentrl.chaos.subject import ChaosError, Subject
from agentrl.config import recipe as recipes
from agentrl.errors import ScoreRejected
from agentrl.experience.late_parts import Clock
from agentrl.plugins.references import add_project_root, resolve
from agentrl.records import Episode, LateScore, PendingPart, Score, Task
from agentrl.task.schedule import GroupSchedule, open_family

REFERENCE = f"{__name__}:unreliable"
_SOUND = "rewards.tables:exact_answer"
_BLOCK_S = 2.0
_PART = "chaos"  # name of the part whose score is late
_SHARE = 4  # one in this many tasks is affected


class UnreliableVerifier:
    """A `PreparedVerifier` that scores like the quickstart's verifier. While `RUN_DIR.verifier` contains the name of a fault (raise, nan,
    hang, block or late), the fault affects a quarter of the tasks. `RUN_DIR.verifier-calls` lists the affected calls."""

    timeout_s = 3.0

    def __init__(self) -> None:
        self._folder: Path | None = None

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Stores the path of the run folder. A file next to the folder requests a fault."""
        self._folder = folder

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores an episode, or fails as requested."""
        fault = self._fault(task)
        if fault and self._folder is not None:
            with journal_path(self._folder).open("a") as journal:
                journal.write(f"{fault} {episode.id}\n")
        if fault == "raise":
            raise RuntimeError("the verifier fails on request")
        if fault == "hang":
            await asyncio.sleep(3600.0)
        if fault == "block":
            time.sleep(_BLOCK_S)
        if fault == "late":
            return Score(value=None, pending=(PendingPart(name=_PART),))
        score: Score = await resolve(_SOUND)(task, episode)
        return Score(value=math.nan) if fault == "nan" else score

    def _fault(self, task: Task) -> str:
        if self._folder is None or zlib.crc32(task.key.encode()) % _SHARE:
            return ""
        try:
            return switch_path(self._folder).read_text().strip()
        except FileNotFoundError:
            return ""


unreliable = UnreliableVerifier()


def switch_path(run_dir: Path) -> Path:
    """Returns the path of the file that contains the name of the requested fault."""
    return run_dir.with_name(f"{run_dir.name}.verifier")


def journal_path(run_dir: Path) -> Path:
    """Returns the path of the file that lists the calls affected by a fault."""
    return run_dir.with_name(f"{run_dir.name}.verifier-calls")


def verifier_raises(run: Subject) -> Injected:
    """Makes the verifier raise on a quarter of the tasks, whose episodes must be excluded."""
    return _unscored(run, "raise")


def verifier_returns_nan(run: Subject) -> Injected:
    """Makes the verifier return NaN on a quarter of the tasks, whose episodes must be excluded."""
    return _unscored(run, "nan")


def verifier_hangs(run: Subject) -> Injected:
    """Makes the verifier never return on a quarter of the tasks, whose episodes must be excluded after its deadline."""
    return _unscored(run, "hang")


def verifier_blocks(run: Subject) -> Injected:
    """Makes the verifier block the driver's event loop for two seconds on a quarter of the tasks."""
    steps = run.steps_done()
    switch_path(run.run_dir).write_text("block")
    try:
        run.wait_for(lambda: _called(run, "block"), "a call that blocks")
    finally:
        switch_path(run.run_dir).unlink()

    def lag_ms() -> float:
        return max((line.get("loop_lag_ms_max", 0.0) for line in run.metrics() if line["step"] >= steps), default=0.0)

    run.wait_for(lambda: lag_ms() > 900.0 * _BLOCK_S, "a step that records the lag of the event loop")
    return Injected(witness=f"{len(_called(run, 'block'))} calls blocked, and metrics.jsonl records a lag of {lag_ms() / 1000:.1f} s")


def late_scores(run: Subject) -> Injected:
    """Leaves a quarter of the scores pending, then sends late scores, duplicates, contradictory scores and a score for an unknown
    episode."""
    pending = partial(run.store.pending_scores, limit=1000)
    switch_path(run.run_dir).write_text("late")
    try:
        run.wait_for(pending, "a group that waits for its scores")
    finally:
        switch_path(run.run_dir).unlink()
    run.wait_for_step()
    late, rejected, now = pending(), Counter[str](), Clock().now()
    for part in late:
        value = _sound_score(run, part.group, part.attempt)
        sent = LateScore(episode_id=part.episode_id, part=_PART, value=value, scored_by="chaos", key=part.episode_id)
        for wrong in (replace(sent, value=2.0), replace(sent, episode_id=f"{part.episode_id}-unknown")):
            rejected[_rejection(run, wrong, now)] += 1
        if run.store.add_score(sent, now=now).repeated or not run.store.add_score(sent, now=now).repeated:
            raise ChaosError(f"the score of {part.episode_id} was not stored exactly once")
        rejected[_rejection(run, replace(sent, value=1.0 - value, key=f"{part.episode_id}-2"), now)] += 1
    if set(rejected) - {"contradictory", "finished"} != {"out_of_range", "unknown"} or rejected.total() != 3 * len(late):
        raise ChaosError(f"the invalid scores had unexpected rejections: {dict(rejected)}")
    groups = {part.group for part in late}
    run.wait_for(lambda: all(entry.use for entry in run.entries() if entry.index in groups), "the steps that train these groups")
    return Injected(witness=f"{len(late)} scores of {len(groups)} groups arrived late and counted once; rejected: {_counts(rejected)}")


def _rejection(run: Subject, score: LateScore, now: float) -> str:
    """Returns the reason why a late score is rejected. Raises `ChaosError` if the score is accepted."""
    try:
        run.store.add_score(score, now=now)
    except ScoreRejected as error:
        return error.cause
    raise ChaosError(f"the score {score.value} of {score.episode_id} was accepted")


def _sound_score(run: Subject, index: int, attempt: int) -> float:
    """Returns the score that the verifier would have returned immediately."""
    recipe = recipes.load(run.run_dir / "recipe.json")
    add_project_root(run.root)
    task = GroupSchedule(open_family(recipe.tasks, seed=recipe.seed, root=run.root), recipe.seed).task(index)
    score: Score = asyncio.run(resolve(_SOUND)(task, run.store.groups([index])[0].episodes[attempt].episode))
    return score.value or 0.0


def _counts(causes: Counter[str]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))


def _unscored(run: Subject, fault: str) -> Injected:
    """Makes the verifier fail until an affected group is stored. Raises `ChaosError` if an affected episode has a score."""
    first = len(run.entries())
    switch_path(run.run_dir).write_text(fault)
    try:
        run.wait_for(lambda: _affected(run, fault, first), "a stored group with scores of the failing verifier")
        scores = _affected(run, fault, first)
    finally:
        switch_path(run.run_dir).unlink()
    if values := [score.value for score in scores if score.value is not None]:
        raise ChaosError(f"the scores {values} come from a verifier that failed")
    reasons = {score.reason.partition("\n")[0][:80] for score in scores}
    return Injected(witness=f"{len(scores)} episodes have no score: {'; '.join(sorted(reasons))}")


def _called(run: Subject, fault: str) -> set[str]:
    """Returns the ids of the episodes that this fault affected."""
    path = journal_path(run.run_dir)
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.partition(" ")[2] for line in lines if line.startswith(f"{fault} ")}


def _affected(run: Subject, fault: str, first: int) -> list[Score]:
    """Returns the scores of the stored episodes that this fault affected, in groups with index `first` - 8 or higher."""
    called = _called(run, fault)
    groups = run.store.groups(entry.index for entry in run.store.entries(first=max(first - 8, 0)))
    return [scored.score for group in groups for scored in group.episodes if scored.episode.id in called]
