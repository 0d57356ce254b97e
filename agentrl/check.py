"""Proving content and backends for real: a family's gold solutions score 1 and doing nothing 0; a sandbox backend holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.progress import Progress

from agentrl import codec
from agentrl.errors import UserError
from agentrl.protocols import SandboxBackend, TaskFamily
from agentrl.recipe import Recipe
from agentrl.records import Episode, SandboxSpec, Split, Task
from agentrl.reward import TaskScorer
from agentrl.rollout.tools import show
from agentrl.sandbox import conformance, open_sandboxes, select_backend
from agentrl.sandbox.attacks import ATTACK_SPEC, AttackResult, attack
from agentrl.sandbox.select import BackendName
from agentrl.task import open_family

_PARALLEL = 8


async def check_family(recipe: Recipe, *, root: Path, count: int) -> dict[str, str]:
    """Task id -> what is wrong with it, for the first `count` tasks of every split."""
    family = open_family(recipe.tasks, seed=recipe.seed)
    scorer = TaskScorer()
    sandboxes = await open_sandboxes(recipe.sandbox, run_label="check", root=root)
    problems: dict[str, str] = {}
    try:
        tasks = list(_tasks(family, count))
        await sandboxes.prepare(tasks[0].sandbox)
        slots = asyncio.Semaphore(_PARALLEL)
        with Progress() as progress:
            bar = progress.add_task(f"{len(tasks)} tasks on {sandboxes.name}", total=len(tasks))

            async def one(task: Task) -> None:
                async with slots:
                    problem = await _check(task, family, sandboxes, scorer)
                if problem:
                    problems[task.id] = problem
                progress.advance(bar)

            async with asyncio.TaskGroup() as running:
                for task in tasks:
                    running.create_task(one(task))
    finally:
        await sandboxes.close()
    return dict(sorted(problems.items()))


def backend_names(choice: str) -> list[BackendName]:
    """The backends that a `--backend` option means. Raises `UserError`."""
    if choice not in ("auto", "docker", "bubblewrap", "all"):
        raise UserError(f"no sandbox backend {choice!r}", fix="use docker, bubblewrap, auto or all")
    return ["docker", "bubblewrap"] if choice == "all" else [cast(BackendName, choice)]


async def check_backend(name: BackendName, image: str, *, root: Path, only: str = "", runtime: str = "") -> list[dict[str, Any]]:
    """Runs the conformance checks on one backend: dictionaries with backend, name, ok, detail and wall_s."""
    backend = select_backend(name, run_label="check", root=root)
    try:
        results = await conformance.check(backend, SandboxSpec(image=image, runtime=runtime), only=only)
    finally:
        await backend.close()
    return [{"backend": backend.name, **codec.to_data(result)} for result in results]


async def attack_backend(
    name: BackendName, image: str, *, root: Path, only: str = "", runtime: str = "", report: Callable[[str, AttackResult], None]
) -> list[dict[str, Any]]:
    """Runs the attack suite on one backend, telling `report` (backend, result) as it goes: dictionaries with backend and the result."""
    backend = select_backend(name, run_label="attack", root=root)
    spec = replace(ATTACK_SPEC, image=image, runtime=runtime)
    try:
        results = await attack(backend, spec, only=only, report=lambda result: report(backend.name, result))
    finally:
        await backend.close()
    return [{"backend": backend.name, **codec.to_data(result)} for result in results]


def render(problems: dict[str, str]) -> str:
    if not problems:
        return "every gold solution scores 1, and submitting nothing scores 0"
    return "\n".join(f"{task}: {problem}" for task, problem in problems.items())


def _tasks(family: TaskFamily, count: int) -> Iterable[Task]:
    for split in Split:
        size = family.size(split)
        for index in range(count if size is None else min(count, size)):
            yield family.task(split, index)


async def _check(task: Task, family: TaskFamily, sandboxes: SandboxBackend, scorer: TaskScorer) -> str:
    sandbox = await sandboxes.open(task.sandbox, files={path: text.encode() for path, text in task.files.items()})
    try:
        result = await sandbox.python(family.gold(task), timeout_s=task.limits.tool_timeout_s)
    finally:
        await sandbox.close()
    if not result.ok:
        return f"gold solution failed: {show(result, task.limits)}"
    for answer, wanted in ((show(result, task.limits), 1.0), (None, 0.0)):
        episode = Episode(id="check", task_id=task.id, task_key=task.key, trajectories=(), answer=answer)
        score = await scorer(task, episode)
        if score.value != wanted:
            what = "gold solution" if wanted else "submitting nothing"
            return f"{what} scores {score.value}, not {wanted:g}: {score.reason or score.evidence}"
    return ""
