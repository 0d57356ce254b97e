"""Generates practice tasks for the cases in a suite, from the family's variants or by mutation, and proves them as `agentrl check` does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import Progress

from agentrl.agent.tools import render_result
from agentrl.base import user_code
from agentrl.check.check import prove_tasks
from agentrl.check.report import GOLD, CaseResult, Proof
from agentrl.errors import InfrastructureError, SandboxUnavailable, TaskError, UserError
from agentrl.failure.case import Case, Suite
from agentrl.failure.overlap import WithheldTasks
from agentrl.failure.practice import MUTATED, PracticeTask, gold_without_answer, mutate_task, practice_task
from agentrl.protocols import SandboxBackend, TaskFamily, VariedFamily
from agentrl.records import Split, Task
from agentrl.task import gold_of
from agentrl.task.outputs import run_and_collect

DRAWS = 8
"""Maximum number of variants that are drawn for each requested task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticeReport:
    """The proven practice tasks, and the rejected tasks as pairs (case, reason)."""

    tasks: tuple[PracticeTask, ...]
    rejected: tuple[tuple[str, str], ...]

    def by_case(self) -> dict[str, Counter[str]]:
        """Returns, for each case, the number of tasks of each origin. The origin is `PracticeTask.how`."""
        counts: dict[str, Counter[str]] = {}
        for task in self.tasks:
            counts.setdefault(task.case, Counter())[task.how] += 1
        return counts


async def generate_practice(
    suite: Suite,
    family: TaskFamily,
    sandboxes: SandboxBackend,
    *,
    withheld: WithheldTasks,
    count: int,
    seed: int,
    root: Path,
    parallel: int = 8,
    quiet: bool = False,
) -> PracticeReport:
    """Generates at most `count` proven tasks for each case in a suite.

    Args:
        withheld: the tasks that must not be trained on, including those in the suite.

    Raises `InfrastructureError` if the sandboxes fail, and `SandboxUnavailable` if they cannot be used on this machine. The report includes
    all other errors of a case.
    """
    rejected: list[tuple[str, str]] = []
    drawn: list[PracticeTask] = []
    seen: set[str] = set()
    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        bar = progress.add_task("variants", total=len(suite.cases))
        for case in suite.cases:
            try:
                drawn += await _draw(case, family, sandboxes, withheld, seen, count=count, seed=seed, root=root)
            except Exception as error:  # a family is user code, and a case's task may belong to another family
                if user_code.first_cause(error, InfrastructureError, SandboxUnavailable) is not None:
                    raise
                rejected.append((case.id, user_code.describe_error(error, 500)))
            progress.advance(bar)
        progress.update(bar, total=None)
        tasks = [drawn_task.task for drawn_task in drawn]
        cases, proofs = await prove_tasks(
            family, tasks, sandboxes, root=root, parallel=parallel, on_progress=lambda **update: progress.update(bar, **update)
        )
    problems = _problems(drawn, cases, proofs)
    rejected += [
        (drawn_task.case, f"{drawn_task.how} {drawn_task.task.id}: {problems[drawn_task.task.id]}")
        for drawn_task in drawn
        if drawn_task.task.id in problems
    ]
    return PracticeReport(tasks=tuple(drawn_task for drawn_task in drawn if drawn_task.task.id not in problems), rejected=tuple(rejected))


def check_count(count: int, suite: Suite) -> None:
    """Raises `UserError` if there would be more than 100,000 tasks."""
    if count * len(suite.cases) > 100_000:
        raise UserError(f"{count} tasks for each of {len(suite.cases)} cases exceed the maximum of 100,000", fix="give a smaller --count")


def _problems(drawn: Sequence[PracticeTask], cases: Sequence[CaseResult], proofs: Sequence[Proof]) -> dict[str, str]:
    """Returns task id -> problem for the tasks that are not proven."""
    problems: dict[str, str] = {}
    for result in cases:
        if not result.ok:
            score = "nothing" if result.value is None else f"{result.value:g}"
            problems.setdefault(result.task, f"{result.case} scored {score}, not {result.wanted:g}: {result.detail}"[:500])
    for finding in (finding for proof in proofs for finding in proof.findings if finding.severity == "failure"):
        for name in finding.tasks or [drawn_task.task.id for drawn_task in drawn]:  # a finding without tasks applies to all of them
            problems.setdefault(name, finding.what[:500])
    return problems


async def _draw(
    case: Case, family: TaskFamily, sandboxes: SandboxBackend, withheld: WithheldTasks, seen: set[str], *, count: int, seed: int, root: Path
) -> list[PracticeTask]:
    """Draws up to `count` different tasks for a case. Excludes withheld tasks and tasks that were already drawn. Raises `TaskError` if no
    task remains, if the case belongs to another family, or if a variant is not a training task."""
    if case.task.family != family.name:
        problem = f"case {case.id} belongs to family {case.task.family!r}, but the recipe's family is {family.name!r}"
        raise TaskError(problem, fix="give a recipe of the case's family")
    if callable(getattr(family, "variants", None)):
        variants = []
        for variant in islice(cast(VariedFamily, family).variants(case.task, seed=seed), DRAWS * count):
            variants.append(variant)
            # Not in a different thread, because a family may, for example, use a database connection only in the thread that opened it.
            await asyncio.sleep(0)
    else:
        variants = await _mutants(case.task, family, sandboxes, withheld, count=count, seed=seed, root=root)
    drawn: list[PracticeTask] = []
    for how, task in variants:
        if task.split is not Split.TRAIN:
            raise TaskError(f"{family.name}: variant {task.id!r} has split {task.split}", fix="create variants in split train")
        if len(drawn) < count and task.key not in seen and not await asyncio.to_thread(withheld.match, task):
            seen.add(task.key)
            drawn.append(practice_task(case, how, task))
    if not drawn:
        raise TaskError(f"every variant is case {case.id} or a near duplicate of a case")
    return drawn


async def _mutants(
    task: Task, family: TaskFamily, sandboxes: SandboxBackend, withheld: WithheldTasks, *, count: int, seed: int, root: Path
) -> list[tuple[str, Task]]:
    """Returns pairs (origin, mutant). The gold program computes the answer to each mutant, which must differ from that to the original
    task. Raises `TaskError` if the gold program does not solve the original task, or if no mutant remains."""
    gold_without_answer(family, task)
    cases, _ = await prove_tasks(family, [task], sandboxes, root=root)
    wrong = next((result for result in cases if result.case == GOLD and not result.ok), None)
    if wrong is not None or not cases:
        raise TaskError(f"the gold solution does not solve the case: {wrong.detail if wrong else 'it did not run'}")
    mutants: list[tuple[str, Task]] = []
    drawn = islice(mutate_task(task, seed=seed), DRAWS * count)
    # In a different thread, because creating a mutant of a task with many numbers takes seconds.
    while len(mutants) < count and (mutant := await asyncio.to_thread(next, drawn, None)) is not None:
        result, _ = await run_and_collect(mutant, gold_of(family, mutant), sandboxes, timeout_s=mutant.limits.tool_timeout_s)
        answer = render_result(result, mutant.limits) if result.ok else ""
        if answer.strip() and answer.strip() != str(task.data["answer"]).strip():
            solved = replace(mutant, data={**mutant.data, "answer": answer})
            if not await asyncio.to_thread(withheld.match, solved):
                mutants.append((MUTATED, solved))
    if not mutants:
        raise TaskError(
            "changing the numbers in the case's files gives no new task with a different answer",
            fix="add a method `variants` to the family",
        )
    return mutants
