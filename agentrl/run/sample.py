"""Samples without a learner: attempts of one policy at training tasks, scored and stored like those of a run."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.compare.compute import Attempt, against_compute, pass_at
from agentrl.errors import UserError
from agentrl.experience import StepGroups
from agentrl.experience.steps import has_preference
from agentrl.failure.digest import write_digest
from agentrl.files import append_lines, json_line, write
from agentrl.observe.formats import duration
from agentrl.observe.left_out import add, reasons
from agentrl.observe.stats import Rate
from agentrl.recipe import Recipe, RolloutConfig
from agentrl.records import Group, Split, Task
from agentrl.run import measure
from agentrl.run.ending import kept_going
from agentrl.run.evaluate import PASSED, Evaluation
from agentrl.run.folder import Start
from agentrl.run.opening import Run, opened
from agentrl.run.preflight import Checked
from agentrl.run.rollouts import make_group
from agentrl.run.supervise import watch_daemon
from agentrl.run.transcript import transcript
from agentrl.scores import reaches

FILE = "sample.json"
"""File in a run folder: the requested number of groups, and the result."""
DEFAULT = 32
"""Default number of groups."""
_TOLD = 10  # progress reports


@dataclass(slots=True)
class Came:
    """Totals of the attempts at some tasks. Attempts without a finite score only count as excluded."""

    scores: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by task key
    tries: defaultdict[str, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    left_out: int = 0
    left_out_reasons: dict[str, int] = field(default_factory=dict)
    differ: int = 0  # groups with different scores, which a learner could use

    def add(self, group: Group, *, min_group_size: int) -> None:
        """Counts a group."""
        for one in group.episodes:
            value = one.score.value
            if value is None or not math.isfinite(value):
                self.left_out += 1
                continue
            self.scores[group.task_key].append(value)
            self.tries[group.task_key].append(Attempt(passed=reaches(value, PASSED), tokens=one.episode.completion_tokens))
        self.left_out_reasons = add(self.left_out_reasons, reasons(group.episodes))
        self.differ += has_preference(group, min_group_size=min_group_size)

    @property
    def tasks(self) -> int:
        """Tasks with a scored attempt."""
        return len(self.scores)

    @property
    def attempts(self) -> int:
        """Scored attempts."""
        return sum(map(len, self.scores.values()))

    @property
    def solved(self) -> int:
        """Tasks that at least one attempt solved."""
        return sum(any(one.passed for one in tries) for tries in self.tries.values())

    @property
    def rate(self) -> Rate | None:
        """Mean over tasks of the mean score of each; None without scores."""
        return Rate.from_scores([statistics.fmean(values) for values in self.scores.values()]) if self.scores else None

    def as_json(self) -> dict[str, Any]:
        """Returns the totals as JSON data."""
        counts = {name: getattr(self, name) for name in ("tasks", "attempts", "left_out", "solved", "differ")}
        return counts | {"rate": None if self.rate is None else asdict(self.rate)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The content of a run folder after sampling."""

    folder: Path
    asked: int  # requested groups
    whole: Came
    by_kind: dict[str, Came]
    unfinished: bool  # interrupted before all groups were sampled

    def as_json(self) -> dict[str, Any]:
        """Returns the result as JSON data."""
        kinds = {kind: came.as_json() for kind, came in self.by_kind.items()}
        rest = {"groups": self.asked, "unfinished": self.unfinished, "left_out_reasons": self.whole.left_out_reasons}
        return {"folder": str(self.folder), **rest, "all": self.whole.as_json(), "by_kind": kinds}

    def evaluation(self) -> Evaluation:
        """Returns the result as an evaluation of the training tasks."""
        tries = list(self.whole.tries.values())
        tokens = [one.tokens for some in tries for one in some]
        kinds = {kind: rate for kind, came in self.by_kind.items() if (rate := came.rate) is not None}
        return Evaluation(
            rate=self.whole.rate,
            by_kind=kinds,
            attempts=max(map(len, tries), default=0),
            episodes=len(tokens) + self.whole.left_out,
            left_out=self.whole.left_out,
            left_out_reasons=self.whole.left_out_reasons,
            tokens_mean=statistics.fmean(tokens) if tokens else None,
            pass_at=pass_at(tries),
            compute=against_compute(tries),
            transcripts=(),
        )


async def sample(recipe: Recipe, start: Start, checked: Checked, *, groups: int | None, root: Path, console: bool = True) -> Sampled:
    """Serves the recipe's model and samples the first `groups` groups of its tasks that the run folder does not contain yet.

    Each group has the next task; the recipe's steps, extra groups and task weights do not apply. The caller prepares as for
    `agentrl.run.loop.train`, and the same errors are raised; finished groups are kept.

    Args:
        groups: None means as many as before, or `DEFAULT_GROUPS`. Raises `UserError` for fewer than before.
    """
    asked = _asked(start.folder, groups)
    async with opened(recipe, start, checked, root=root, console=console, steps=StepGroups.single(recipe.rollout)) as run:
        write(start.folder / FILE, json.dumps({"groups": asked}) + "\n")
        with measure.interrupts(run.stop_after_step, in_hand="the groups"):
            if missing := [index for index in range(asked) if not run.store.has(index)]:
                await _served(run, missing)
            found = sampled(run, asked)
    write(start.folder / FILE, json.dumps(found.as_json(), indent=2) + "\n")
    measure.save_evaluation(start.folder, "sample", {Split.TRAIN: found.evaluation()})
    with kept_going(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return found


def _asked(folder: Path, groups: int | None) -> int:
    path = folder / FILE
    before = int(json.loads(path.read_text(encoding="utf-8"))["groups"]) if path.exists() else 0
    wanted = groups or before or DEFAULT
    if wanted < before:
        raise UserError(
            f"{folder}: an earlier command requested {before} groups", fix=f"use --groups {before} or more, or another --run-dir"
        )
    return wanted


async def _served(run: Run, indices: Sequence[int]) -> None:
    run.tracker.stage("start", "server and sandbox image")
    base = run.registry.get(0)
    assert base is not None, "version 0 was registered"
    await run.start_serving(base)
    async with asyncio.TaskGroup() as parts:
        watching = [run.served.watch(on_loss=run.learner.kill), run.faults.watch()]
        if run.sandboxes.name == "docker":
            watching.append(watch_daemon(run.tracker.alert))
        watchers = [parts.create_task(one) for one in watching]
        await make_groups(run, indices)
        for watcher in watchers:
            watcher.cancel()


async def make_groups(run: Run, indices: Sequence[int]) -> None:
    """Samples these groups in order, as many at once as keep all slots busy, and starts none after an interrupt."""
    if run.memory is not None:
        await run.memory.reach(0)
    await run.taught.reach(0)
    rollout = run.recipe.rollout
    waiting, began, made = iter(indices), time.monotonic(), 0
    every = math.ceil(len(indices) / _TOLD)
    told = f"{len(indices)} groups of {rollout.group_size}"

    async def some() -> None:
        nonlocal made
        for index in waiting:
            if run.interrupted:
                return
            await make_group(run, index)
            made += 1
            if made % every == 0 and made < len(indices):
                left = (time.monotonic() - began) / made * (len(indices) - made)
                run.tracker.stage("sample", f"{made} of {told}, about {duration(left)} left")
            run.tracker.evaluating(made * rollout.group_size, len(indices) * rollout.group_size)

    run.tracker.stage("sample", told)
    async with asyncio.TaskGroup() as running:
        for _ in range(2 * math.ceil(rollout.concurrency / _at_once(rollout))):  # twice, because ending groups leave slots free
            running.create_task(some())


def _at_once(rollout: RolloutConfig) -> int:
    """Attempts of a group that start together."""
    if rollout.branching is not None:
        return max(1, rollout.group_size // rollout.branching.branches)
    return rollout.stop_equal_after or rollout.group_size


def sampled(run: Run, asked: int) -> Sampled:
    """Returns the result of the first `asked` groups. Writes their transcripts to `episodes/train.jsonl`."""
    whole, kinds = Came(), defaultdict[str, Came](Came)
    path = run.folder / "episodes" / "train.jsonl"
    path.unlink(missing_ok=True)  # from a killed process
    size, stored = run.recipe.rollout.min_group_size, 0
    for group, task in _stored(run, asked):
        stored += 1
        for came in (whole, kinds[task.kind if task is not None else ""]):
            came.add(group, min_group_size=size)
        if task is not None:
            append_lines(path, (json_line(transcript(task, one, phase="train", step=0)) for one in group.episodes))
    return Sampled(folder=run.folder, asked=asked, whole=whole, by_kind=dict(sorted(kinds.items())), unfinished=stored < asked)


def _stored(run: Run, asked: int) -> Iterator[tuple[Group, Task | None]]:
    """The stored groups with their tasks; None for a task that cannot be created."""
    for index in range(asked):
        if run.store.has(index):
            try:
                task = run.taught.task(index)
            except Exception:  # user-supplied; the group contains the reason
                task = None
            yield run.store.groups([index])[0], task
