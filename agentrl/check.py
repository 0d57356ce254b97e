"""Proving content and backends for real: a family's gold solutions score 1, doing nothing and cheating 0; a sandbox backend holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentrl import cheats, codec
from agentrl.errors import SandboxError, SandboxTimeout, UserError
from agentrl.outputs import example, produce
from agentrl.protocols import SandboxBackend, TaskFamily
from agentrl.recipe import SandboxConfig
from agentrl.records import Episode, SandboxSpec, Split, Task
from agentrl.reward import TaskScorer
from agentrl.rollout.tools import load_tools, show
from agentrl.sandbox import conformance, open_sandboxes, select_backend
from agentrl.sandbox.attacks import ATTACK_SPEC, AttackResult, attack
from agentrl.sandbox.select import BackendName

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRIES = 2
GOLD, NOTHING, IMAGE = "gold solution", "doing nothing", "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What one case of one task came to: the score that was due, the one given (None: unscored), and why."""

    task: str
    case: str
    wanted: float
    value: float | None
    detail: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.value == self.wanted


async def check_family(
    family: TaskFamily, config: SandboxConfig, *, root: Path, count: int | None, parallel: int = 8, quiet: bool = False
) -> list[CaseResult]:
    """Every case of the first `count` tasks of every split (None: all of a folder), at most `parallel` at a time.

    Raises `InfrastructureError` when the sandboxes themselves fail; what is wrong with a task is among the results.
    """
    sandboxes = await open_sandboxes(config.model_copy(update={"warm": 0}), run_label="check", root=root)
    scorer = TaskScorer(sandboxes=sandboxes)
    results: list[CaseResult] = []
    try:
        tasks = list(_tasks(family, count))
        scorer.load(sorted({name for task in tasks for name in task.verifiers}))
        with Progress(console=Console(stderr=True), disable=quiet) as progress:
            bar = progress.add_task(f"images on {sandboxes.name}", total=None)
            broken = await _prepare(tasks, sandboxes)
            results += broken
            without = {result.task for result in broken}
            good = [task for task in tasks if task.id not in without]
            progress.update(bar, description=f"{len(tasks)} tasks on {sandboxes.name}", total=sum(len(_cases(task)) for task in good))
            prover = _Prover(family=family, sandboxes=sandboxes, scorer=scorer)
            slots = asyncio.Semaphore(parallel)

            async def one(task: Task, case: str) -> None:
                async with slots:
                    results.append(await prover.case(task, case))
                progress.advance(bar)

            for golden in (True, False):  # cheats go where gold went
                async with asyncio.TaskGroup() as running:
                    for task in good:
                        for case in _cases(task):
                            if (case == GOLD) == golden:
                                running.create_task(one(task, case))
    finally:
        await sandboxes.close()
    return sorted(results, key=lambda result: (result.task, result.wanted == 0, result.case))


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


def render(results: Sequence[CaseResult]) -> str:
    """What is wrong with which task, as a table; one line when nothing is."""
    wrong = [result for result in results if not result.ok]
    tasks, cheated = len({result.task for result in results}), sum(result.case not in (GOLD, NOTHING, IMAGE) for result in results)
    if not wrong:
        return f"every gold solution scores 1, and submitting nothing scores 0; so do {cheated} cheats on {tasks} tasks"
    table = Table("task", "case", "due", "scored", "why", title=f"{len({item.task for item in wrong})} of {tasks} tasks are wrong")
    for item in wrong:
        table.add_row(item.task, item.case, f"{item.wanted:g}", "-" if item.value is None else f"{item.value:g}", _printable(item.detail))
    console = Console(width=140, force_terminal=False)
    with console.capture() as captured:
        console.print(table, markup=False)
    return captured.get().rstrip()


def _printable(text: str) -> str:
    """Text for a terminal: what programs and tests print may hold control sequences."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _tasks(family: TaskFamily, count: int | None) -> Iterable[Task]:
    for split in Split:
        size = family.size(split)
        wanted = size if count is None else count
        if wanted is None:
            raise UserError(f"{family.name} makes tasks without end", fix="say how many of each split with --count")
        for index in range(wanted if size is None else min(wanted, size)):
            yield family.task(split, index)


async def _prepare(tasks: Sequence[Task], sandboxes: SandboxBackend) -> list[CaseResult]:
    """Makes every image ready; a task whose image cannot be made has failed by that."""
    failed: list[CaseResult] = []
    problems: dict[tuple[str, str], str] = {}
    for task in tasks:
        started = time.monotonic()
        limit = float(task.data.get("build_timeout_s", 1800.0))
        image = (task.sandbox.image, task.sandbox.runtime)
        if image not in problems:
            problems[image] = ""
            try:
                async with asyncio.timeout(limit):
                    await sandboxes.prepare(task.sandbox)
            except SandboxTimeout:
                raise
            except TimeoutError:
                problems[image] = f"{image[0]}: the image is not ready after {limit:g} s; raise environment.build_timeout_sec"
            except UserError as error:
                problems[image] = str(error)
        if problem := problems[image]:
            took = time.monotonic() - started
            failed.append(CaseResult(task=task.id, case=IMAGE, wanted=1.0, value=None, detail=problem, wall_s=took))
    return failed


def _cases(task: Task) -> list[str]:
    return [GOLD, NOTHING, *([*cheats.TEXTS, *cheats.PROGRAMS] if task.outputs else cheats.ANSWERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prover:
    """Runs single cases; remembers which files a task's gold solution left."""

    family: TaskFamily
    sandboxes: SandboxBackend
    scorer: TaskScorer
    left: dict[str, list[str]] = field(default_factory=dict)

    async def case(self, task: Task, case: str) -> CaseResult:
        started = time.monotonic()
        wanted = 1.0 if case == GOLD else 0.0
        try:
            episode, problem = await _retried(lambda: self._attempt(task, case))
        except UserError as error:
            episode, problem = None, str(error)
        value: float | None = None
        if episode is not None and not problem:
            score = await self.scorer(task, episode)
            value, problem = score.value, score.reason or score.evidence
        took = time.monotonic() - started
        return CaseResult(task=task.id, case=case, wanted=wanted, value=value, detail=problem[:1000], wall_s=took)

    async def _attempt(self, task: Task, case: str) -> tuple[Episode, str]:
        """The episode of a case, and what went wrong where gold did not even run."""
        episode = Episode(id="check", task_id=task.id, task_key=task.key, trajectories=())
        if not task.outputs and case != GOLD:
            return replace(episode, answer=None if case == NOTHING else cheats.ANSWERS[case]), ""
        if case == GOLD:
            return await self._gold(task, episode)
        paths = self.left.get(task.id) or [example(pattern) for pattern in task.outputs]
        if case in cheats.TEXTS:
            return replace(episode, outputs=cheats.handed_in(case, paths)), ""
        program = "" if case == NOTHING else cheats.program(case, paths)
        _, collected = await produce(task, program, self.sandboxes, timeout_s=task.limits.wall_s)
        return replace(episode, outputs=collected.files, removed=collected.removed), ""

    async def _gold(self, task: Task, episode: Episode) -> tuple[Episode, str]:
        load_tools(task.tools)
        limit = task.limits.wall_s if task.outputs else task.limits.tool_timeout_s
        result, collected = await produce(task, self.family.gold(task), self.sandboxes, timeout_s=limit)
        self.left[task.id] = sorted(collected.files)
        shown = show(result, task.limits)
        refused = "".join(f"; {path}: {reason}" for path, reason in collected.refused.items())
        problem = "" if result.ok else f"gold solution failed: {shown}{refused}"
        return replace(episode, answer=shown, outputs=collected.files, removed=collected.removed), problem


async def _retried(act: Callable[[], Awaitable[T]]) -> T:
    """A fault of the sandboxes is tried again; one that lasts ends the check."""
    for attempt in range(RETRIES):
        try:
            return await act()
        except SandboxError as error:
            log.warning("tried again: %s", error)
            await asyncio.sleep(0.2 * 2**attempt)
    return await act()
