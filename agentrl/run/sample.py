"""Sampling without a learner: attempts of one policy at training tasks, scored and stored as those of a run's first step are."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.digest import write_digest
from agentrl.files import append_lines, json_line
from agentrl.observe.left_out import add, reasons
from agentrl.observe.stats import Rate
from agentrl.recipe import Recipe
from agentrl.records import Group, Task
from agentrl.run import measure
from agentrl.run.ending import kept_going
from agentrl.run.evaluate import PASSED
from agentrl.run.folder import Start
from agentrl.run.opening import Run, opened
from agentrl.run.preflight import Checked
from agentrl.run.rollouts import make_group
from agentrl.run.transcript import transcript

DEFAULT = 32
"""Groups, where nobody says how many."""
_TOLD = 10  # how often progress is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What the attempts at some tasks came to. Attempts without a finite score count in `left_out` alone."""

    tasks: int
    attempts: int  # that have a score
    left_out: int
    rate: Rate | None  # over tasks, of the mean score of each; None: nothing was scored
    solved: int  # tasks that at least one attempt solved
    differ: int  # tasks whose attempts were scored differently, so that they would teach

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What is stored in a run folder after sampling."""

    folder: Path
    asked: int  # groups
    whole: Came
    by_kind: dict[str, Came]
    left_out_reasons: dict[str, int]
    interrupted: bool

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        kinds = {kind: came.as_json() for kind, came in self.by_kind.items()}
        rest = {"groups": self.asked, "left_out_reasons": self.left_out_reasons, "interrupted": self.interrupted}
        return {"folder": str(self.folder), **rest, "all": self.whole.as_json(), "by_kind": kinds}


def overrides(recipe: Recipe, groups: int) -> tuple[str, ...]:
    """What makes a recipe one of a single step of so many groups, in which every task is given as often as any other."""
    changes = ["steps=1", f"rollout.groups_per_step={groups}", "rollout.extra_groups=0", "tasks.weighting=null"]
    updates = [("learner.minibatches", 1)] if recipe.learner.minibatches > 1 else []
    updates += [("critic.minibatches", 1)] if recipe.critic is not None and recipe.critic.minibatches > 1 else []
    return (*changes, *(f"{key}={value}" for key, value in updates))


async def sample(recipe: Recipe, start: Start, checked: Checked, *, root: Path, console: bool = True) -> Sampled:
    """Serves the recipe's model and makes the groups of its one step (`overrides`) that the run folder does not hold yet.

    Goes on where sampling in `start.folder` ended. For callers: see `agentrl.run.loop.train`. Raises what that raises, and
    `InfrastructureError` when a part fails for good; groups that were finished are kept.
    """
    if recipe.steps != 1 or recipe.rollout.extra_groups or recipe.tasks.weighting is not None:
        raise UserError("what is sampled is one step of groups", fix="lay agentrl.run.sample.overrides over the recipe")
    async with opened(recipe, start, checked, root=root, console=console) as run:
        if missing := [index for index in run.step_groups.indices(0) if not run.store.has(index)]:
            run.tracker.stage("start", "server and sandbox image")
            base = run.registry.get(0)
            assert base is not None, "version 0 was registered"
            await run.start_serving(base)
            async with asyncio.TaskGroup() as parts:
                watchers = [parts.create_task(one) for one in (run.served.watch(on_loss=run.learner.kill), run.faults.watch())]
                with measure.interrupts(run.stop_after_step, in_hand="the groups"):
                    await make_groups(run, missing)
                for watcher in watchers:
                    watcher.cancel()
        found = sampled(run)
    with kept_going(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return found


async def make_groups(run: Run, indices: Sequence[int]) -> None:
    """Makes these groups of step 0, in their order, as many at once as keep all slots busy; no new ones once the run is interrupted."""
    if run.memory is not None:
        await run.memory.reach(0)
    await run.taught.reach(0)
    rollout = run.recipe.rollout
    waiting, began, made = iter(indices), time.monotonic(), 0
    told = max(1, len(indices) // _TOLD)

    async def some() -> None:
        nonlocal made
        for index in waiting:
            if run.interrupted:
                return
            await make_group(run, index)
            made += 1
            run.tracker.evaluating(made, len(indices))
            if made % told == 0 and made < len(indices):
                left = (time.monotonic() - began) / made * (len(indices) - made)
                run.tracker.stage("sample", f"{made} of {len(indices)} groups, about {math.ceil(left / 60)} min left")

    run.tracker.stage("sample", f"{len(indices)} groups of {rollout.group_size}")
    run.tracker.evaluating(0, len(indices))
    async with asyncio.TaskGroup() as running:
        for _ in range(2 * math.ceil(rollout.concurrency / rollout.group_size)):  # others' last attempts leave slots free
            running.create_task(some())


def sampled(run: Run) -> Sampled:
    """What the stored groups of step 0 came to. Writes their transcripts, as `episodes/train.jsonl`."""
    kinds: defaultdict[str, list[Group]] = defaultdict(list)
    path = run.folder / "episodes" / "train.jsonl"
    path.unlink(missing_ok=True)  # a killed process may have left some
    for group, task in _stored(run):
        kinds[task.kind if task is not None else ""].append(group)
        if task is not None:
            append_lines(path, (json_line(transcript(task, one, phase="train", step=0)) for one in group.episodes))
    groups = [group for some in kinds.values() for group in some]
    return Sampled(
        folder=run.folder,
        asked=len(run.step_groups.indices(0)),
        whole=came_to(groups),
        by_kind={kind: came_to(some) for kind, some in sorted(kinds.items())},
        left_out_reasons=add(*(reasons(group.episodes) for group in groups)),
        interrupted=run.interrupted,
    )


def _stored(run: Run) -> Iterator[tuple[Group, Task | None]]:
    """The groups of step 0 that are stored, each with its task; None for one that cannot be made."""
    for index in run.step_groups.indices(0):
        if run.store.has(index):
            try:
                task = run.taught.task(index)
            except Exception:  # a family may raise anything; make_group has told it, and the group says why
                task = None
            yield run.store.groups([index])[0], task


def came_to(groups: Iterable[Group]) -> Came:
    """The figures of some groups. Attempts at one task are alike, so the rate is over tasks; two groups of one task are one."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    count = Counter[str]()
    for group in groups:
        found = [value for one in group.episodes if (value := one.score.value) is not None and math.isfinite(value)]
        scores[group.task_key] += found
        count["attempts"] += len(found)
        count["left out"] += len(group.episodes) - len(found)
    means = [statistics.fmean(values) for values in scores.values() if values]
    return Came(
        tasks=len(scores),
        attempts=count["attempts"],
        left_out=count["left out"],
        rate=Rate.from_scores(means) if means else None,
        solved=sum(any(value >= PASSED for value in values) for values in scores.values()),
        differ=sum(len(set(values)) > 1 for values in scores.values()),
    )
