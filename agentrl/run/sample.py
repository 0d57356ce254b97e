"""Samples attempts of one policy at training tasks, without a learner. The attempts are scored and stored as in a training run."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.base.numbers import plural
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.evaluation.splits import AttemptTotals, SplitEvaluation
from agentrl.experience import GroupOrder, new_entry
from agentrl.failure.digest import write_digest
from agentrl.observe.stats import format_duration
from agentrl.records import Group, Split, Task
from agentrl.records.environment import PASS_THRESHOLD
from agentrl.run.rollouts import Rollouts
from agentrl.run.supervise import watch_run
from agentrl.session import measure
from agentrl.session.ending import handle_interrupts, warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.opening import Run, open_run
from agentrl.session.preflight import PreflightResult
from agentrl.session.transcript import append_transcripts, transcript

SAMPLE_FILE = "sample.json"
"""File in a run folder that contains the requested number of groups and the result."""
DEFAULT_GROUPS = 32
"""Default number of groups."""
_REPORTS = 10  # number of progress reports


@dataclass(slots=True)
class SampleTotals(AttemptTotals):
    """Totals over the attempts in sampled groups."""

    differ: int = 0  # number of groups with different scores, which a learner could use

    @property
    def tasks(self) -> int:
        """The number of tasks with a scored attempt."""
        return len(self.scored)

    @property
    def attempts(self) -> int:
        """The number of scored attempts."""
        return sum(map(len, self.tries))

    @property
    def solved(self) -> int:
        """The number of tasks that at least one attempt solved."""
        return sum(any(attempt.passed for attempt in tries) for tries in self.tries)

    def add_group(self, group: Group, task: Task | None, *, min_group_size: int) -> None:
        """Counts a group. `task` is None if the task could not be created."""
        self.add(group.task_key, group.episodes, threshold=PASS_THRESHOLD if task is None else task.pass_threshold)
        entry = new_entry(group)
        self.differ += entry.counted >= min_group_size and entry.has_spread

    def as_json(self) -> dict[str, Any]:
        """Returns the totals as JSON data."""
        counts = {name: getattr(self, name) for name in ("tasks", "attempts", "left_out", "solved", "differ")}
        return counts | {"rate": None if self.rate is None else asdict(self.rate)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The content of a run folder after sampling."""

    folder: Path
    requested: int  # number of requested groups
    totals: SampleTotals
    by_kind: dict[str, SampleTotals]
    unfinished: bool  # whether sampling was interrupted before all groups were sampled

    def as_json(self) -> dict[str, Any]:
        """Returns the result as JSON data."""
        kinds = {kind: came.as_json() for kind, came in self.by_kind.items()}
        rest = {"groups": self.requested, "unfinished": self.unfinished, "left_out_reasons": self.totals.left_out_reasons}
        return {"folder": str(self.folder), **rest, "all": self.totals.as_json(), "by_kind": kinds}

    def evaluation(self) -> SplitEvaluation:
        """Returns the result as an evaluation of the training tasks."""
        return self.totals.evaluation(self.by_kind, attempts=max(map(len, self.totals.tries), default=0))


async def sample(
    recipe: Recipe, start: RunStart, checked: PreflightResult, *, groups: int | None, root: Path, console: bool = True
) -> SampleResult:
    """Serves the recipe's model, and samples those of the first `groups` groups that the run folder does not contain yet.

    Each group uses the next task. The recipe's steps, extra groups and task weights do not apply. The requirements and the errors are the
    same as for `agentrl.run.loop.train`. Finished groups are kept.

    Args:
        groups: None means the number that was requested before, or `DEFAULT_GROUPS`. Raises `UserError` if the number is lower than before.
    """
    requested = _requested_groups(start.folder, groups)
    async with open_run(recipe, start, checked, root=root, console=console, order=GroupOrder.single_block(recipe.rollout)) as run:
        write_atomically(start.folder / SAMPLE_FILE, json.dumps({"groups": requested}) + "\n")
        with handle_interrupts(run.stop_after_step, in_hand="the groups"):
            stored = {entry.index for entry in await run.store.entries()}
            if missing := [index for index in range(requested) if index not in stored]:
                await _served(run, missing)
            result = await sample_result(run, requested)
    write_atomically(start.folder / SAMPLE_FILE, json.dumps(result.as_json(), indent=2) + "\n")
    measure.save_evaluation(start.folder, "sample", {Split.TRAIN: result.evaluation()})
    with warn_on_error(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return result


def _requested_groups(folder: Path, groups: int | None) -> int:
    path = folder / SAMPLE_FILE
    try:
        before = int(json.loads(path.read_text(encoding="utf-8"))["groups"]) if path.exists() else 0
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}", fix="delete it, and set --groups") from None
    wanted = groups or before or DEFAULT_GROUPS
    if wanted < before:
        raise UserError(
            f"{folder}: an earlier command requested {plural(before, 'group')}",
            fix=f"use --groups {before} or more, or a different --run-dir",
        )
    return wanted


async def _served(run: Run, indices: Sequence[int]) -> None:
    run.tracker.stage("start", "server and sandbox image")
    await run.start_serving(await run.base_version())
    async with asyncio.TaskGroup() as parts:
        watchers = [parts.create_task(coroutine) for coroutine in watch_run(run)]
        await sample_groups(run, indices)
        for watcher in watchers:
            watcher.cancel()


async def sample_groups(run: Run, indices: Sequence[int]) -> None:
    """Samples the groups with the given indices, in order. Runs enough groups at once to keep all slots busy, and starts none after an
    interrupt."""
    rollouts, rollout = Rollouts.of(run), run.recipe.rollout
    await rollouts.prepare_block(0)
    waiting, began, done = iter(indices), time.monotonic(), 0
    every = math.ceil(len(indices) / _REPORTS)
    goal = f"{plural(len(indices), 'group')} of {rollout.group.size}"

    async def work() -> None:
        nonlocal done
        for index in waiting:
            if run.progress.interrupted:
                return
            await rollouts.group(index)
            done += 1
            if done % every == 0 and done < len(indices):
                left = (time.monotonic() - began) / done * (len(indices) - done)
                run.tracker.stage("sample", f"{done} of {goal}, about {format_duration(left)} left")
            run.tracker.evaluating(done * rollout.group.size, len(indices) * rollout.group.size)

    run.tracker.stage("sample", goal)
    async with asyncio.TaskGroup() as running:
        for _ in range(2 * math.ceil(rollout.concurrency / rollout.group.starts_together)):  # twice: groups about to end leave slots free
            running.create_task(work())


async def sample_result(run: Run, requested: int) -> SampleResult:
    """Computes the result from the stored groups among the first `requested`. Writes their transcripts to `episodes/train.jsonl`."""
    totals, kinds = SampleTotals(), defaultdict[str, SampleTotals](SampleTotals)
    path = run.folder / "episodes" / "train.jsonl"
    path.unlink(missing_ok=True)  # left by a killed process
    size, stored = run.recipe.rollout.group.min_size, 0
    async for group, task in _stored(run, requested):
        stored += 1
        for counted in (totals, kinds[task.kind if task is not None else ""]):
            counted.add_group(group, task, min_group_size=size)
        if task is not None:
            await asyncio.to_thread(_append_transcripts, path, task, group)
    return SampleResult(
        folder=run.folder, requested=requested, totals=totals, by_kind=dict(sorted(kinds.items())), unfinished=stored < requested
    )


def _append_transcripts(path: Path, task: Task, group: Group) -> None:
    append_transcripts(path, (transcript(task, episode, phase="train", step=0) for episode in group.episodes))


async def _stored(run: Run, requested: int) -> AsyncIterator[tuple[Group, Task | None]]:
    """Yields pairs of stored group and task. The task is None if it cannot be created."""
    for index in range(requested):
        if await run.store.has(index):
            try:
                task = run.group_tasks.task(index)
            except Exception:  # user-supplied code; the group contains the reason
                task = None
            yield (await run.store.groups([index]))[0], task
