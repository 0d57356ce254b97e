"""Checks, after the faults, that a run's ledger is consistent, that no group was lost or used twice, and that no score comes from a
fault."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from agentrl.chaos.subject import Subject
from agentrl.config import recipe as recipes
from agentrl.config.recipe import Recipe
from agentrl.errors import StoreError
from agentrl.experience.audit import count, verify
from agentrl.observe import Summary
from agentrl.plugins.references import add_project_root
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, Task
from agentrl.reward import TaskScorer
from agentrl.sandbox import list_open
from agentrl.task.schedule import GroupSchedule, open_family

_GONE_S = 60.0
_GROUPS = 16  # number of groups that are scored again at once
_SHOWN = 8


def problems(run: Subject, *, orphans: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the problems in a finished run. `orphans`: the result of `orphaned_sandboxes` before the run started."""
    if run.exit_code != 0:
        yield f"the run ended with exit code {run.exit_code}: {run.last_output()}"
        return
    recipe = recipes.load(run.run_dir / "recipe.json")
    try:
        yield from verify(run.run_dir, run.store)
        yield from _ledger_problems(run, recipe)
        add_project_root(run.root)
        yield from asyncio.run(_group_problems(run.store, recipe, run.root))
    except StoreError as error:
        yield str(error)
    yield from _step_problems(run, run.steps)
    yield from _left(run, orphans)


def orphaned_sandboxes() -> frozenset[str]:
    """Returns the sandboxes of dead drivers on this machine."""
    return frozenset(sandbox.name for sandbox in list_open() if sandbox.driver_alive is False)


def _ledger_problems(run: Subject, recipe: Recipe) -> Iterator[str]:
    entries, per_step = run.entries(), recipe.rollout.groups_per_step
    used, late = sum(1 for entry in entries if entry.use is not None), sum(1 for entry in entries if entry.late_parts)
    if used != run.steps * per_step or len(entries) > used + late:  # each parked group was replaced by another group
        yield f"{used} of {len(entries)} groups were used, not {run.steps * per_step}; {late} of them waited for late scores"
    if [entry.index for entry in entries] != list(range(len(entries))):
        yield f"the indices of the {len(entries)} groups are not consecutive from 0"
    uses = Counter(entry.step for entry in entries if entry.use is not None)
    yield from (f"step {step + 1} used {uses[step]} groups, not {per_step}" for step in range(run.steps) if uses[step] != per_step)
    tokens = count(entries).tokens
    if (tokens["open"] and not late) or not 0 < tokens["sampled"] == tokens["trained"] + tokens["excluded"] + tokens["open"]:
        yield f"the tokens do not add up: {tokens}"
    if (reported := Summary.read(run.run_dir).tokens) != tokens:
        yield f"the tokens in summary.json and in the ledger differ: {reported}, {tokens}"


async def _group_problems(store: ExperienceStore, recipe: Recipe, root: Path) -> list[str]:
    """Compares each group with the task that the seed assigns to it, and each score with a second score from the same verifiers."""
    schedule, scorer = GroupSchedule(open_family(recipe.tasks, seed=recipe.seed, root=root), recipe.seed), TaskScorer(root=root)
    indices, wrong = [entry.index for entry in store.entries()], list[str]()
    for start in range(0, len(indices), _GROUPS):
        for group in store.groups(indices[start : start + _GROUPS]):
            task = schedule.task(group.index)
            if (group.task_id, group.task_key) != (task.id, task.key):
                wrong.append(f"group {group.index} has task {group.task_id}, not {task.id}")
            wrong += await _score_problems(group, task, scorer)
    return wrong[:_SHOWN]


async def _score_problems(group: Group, task: Task, scorer: TaskScorer) -> list[str]:
    wrong = []
    for scored in group.episodes:
        episode, value = scored.episode, scored.score.value
        if episode.left_out:
            if value is not None:
                wrong.append(f"episode {episode.id} failed but has the score {value}")
        elif value is not None and value != (again := (await scorer(task, episode)).value):
            wrong.append(f"episode {episode.id} has the score {value}, but {again} when scored again")
    return wrong


def _step_problems(run: Subject, steps: int) -> Iterator[str]:
    numbers = list(dict.fromkeys(line["step"] for line in run.metrics()))  # a repeated step has two lines
    if numbers != list(range(1, steps + 1)):
        yield f"metrics.jsonl has the steps {numbers}, not 1 to {steps}"


def _left(run: Subject, orphans: frozenset[str]) -> Iterator[str]:
    """Yields the processes and sandboxes that outlive the run by more than a minute."""
    deadline = time.monotonic() + _GONE_S
    while ((left := run.left()) or orphaned_sandboxes() - orphans) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield from (f"process {pid} is still running: {line}" for pid, line in left.items() if pid != os.getpid())
    yield from (f"sandbox {name} still exists" for name in sorted(orphaned_sandboxes() - orphans))
