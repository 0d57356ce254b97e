"""Evaluation: one episode on each of the first n held-out tasks, in the same sandboxes and with the same verifier as training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from agentrl import usercode
from agentrl.errors import RecipeError
from agentrl.observe.left_out import reasons
from agentrl.observe.stats import Rate
from agentrl.protocols import TaskFamily
from agentrl.records import Failure, ScoredEpisode, Split, Task
from agentrl.rollout import GroupRunner, left_out_group, task_fault
from agentrl.run.memory import HeldOutNotes
from agentrl.run.transcript import transcript
from agentrl.task import make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of one split, with a confidence interval; episodes without a finite score count in no figure but `left_out`."""

    rate: Rate | None  # None: not one episode was scored, so that no rate would mean anything
    by_kind: dict[str, Rate]
    episodes: int
    left_out: int
    left_out_reasons: dict[str, int]
    transcripts: tuple[dict[str, Any], ...]


async def evaluate(
    runner: GroupRunner,
    family: TaskFamily,
    split: Split,
    count: int,
    *,
    phase: str,
    step: int,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    on_scored: Callable[[Task, ScoredEpisode], None] = lambda task, scored: None,
    notes: HeldOutNotes | None = None,
) -> Evaluation:
    """Evaluates on tasks 0..count-1 of a split (fewer where it has fewer). Raises `RecipeError` when it has none.

    Args:
        on_done: told how many episodes of how many are done.
        on_scored: told each task's episode when it is scored.
        notes: what its episodes read and add to, part by part; None: all tasks are one part, and what `runner` has of memory is left.
    """
    size = family.size(split)
    tasks = [_made(family, split, index) for index in range(count if size is None else min(count, size))]
    if not tasks:
        raise RecipeError(f"task family {family.name!r} has no tasks in split {split}", fix=f"set evaluation.{split}=0")
    done = 0

    async def one(index: int, task: Task | Failure) -> ScoredEpisode:
        nonlocal done
        if isinstance(task, Failure):
            (scored,) = left_out_group(index, f"{split} {index}", "", task, size=1).episodes
        else:
            scored = await runner.episode(task, name=f"{phase}-{split}-{index:05d}")
            on_scored(task, scored)
        done += 1
        on_done(done, len(tasks))
        return scored

    runner = runner if notes is None else replace(runner, memory=notes.of)
    ended: list[ScoredEpisode] = []
    for part in [range(len(tasks))] if notes is None else notes.parts(len(tasks)):
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(one(index, tasks[index])) for index in part]
        ended += [job.result() for job in jobs]
        if notes is not None:
            notes.add(ended[part.start :])
    pairs = list(zip(tasks, ended, strict=True))
    scores = [(_kind(task), scored.score.value) for task, scored in pairs]
    counted = [(kind, value) for kind, value in scores if value is not None and math.isfinite(value)]
    kinds = sorted({kind for kind, _ in counted})
    return Evaluation(
        rate=Rate.from_scores([value for _, value in counted]) if counted else None,
        by_kind={kind: Rate.from_scores([value for k, value in counted if k == kind]) for kind in kinds},
        episodes=len(scores),
        left_out=len(scores) - len(counted),
        left_out_reasons=reasons(scored for _, scored in pairs),
        transcripts=tuple(transcript(task, scored, phase=phase, step=step) for task, scored in pairs if isinstance(task, Task)),
    )


def _made(family: TaskFamily, split: Split, index: int) -> Task | Failure:
    """The task, or what is wrong with it: the other tasks are evaluated all the same."""
    try:
        return make_task(family, split, index)
    except Exception as error:  # a family may raise anything
        usercode.report(f"{split} task {index}", error)
        return task_fault(error)


def _kind(task: Task | Failure) -> str:
    return "" if isinstance(task, Failure) else str(task.data.get("kind", task.family))
