"""Practice for the cases of a suite: made by the family, or by mutation, proven as `agentrl check` proves tasks, and only then kept."""

from __future__ import annotations

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
from agentrl.check.check import GOLD, CaseResult, prove_tasks
from agentrl.check.findings import Proof
from agentrl.errors import InfrastructureError, TaskError, UserError
from agentrl.failure.case import Case, Suite
from agentrl.failure.overlap import WithheldTasks
from agentrl.failure.practice import PracticeTask, practice_task
from agentrl.failure.practice_mutants import MUTATED, gold_without_answer, mutate_task
from agentrl.protocols import SandboxBackend, TaskFamily, VariedFamily
from agentrl.records import Split, Task
from agentrl.task.outputs import run_and_collect

DRAWS = 8
"""Variants drawn for one that is wanted, before a case has as many as it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticeReport:
    """The practice that was proven, and what was not taken: the case, and why, for each."""

    tasks: tuple[PracticeTask, ...]
    rejected: tuple[tuple[str, str], ...]

    def by_case(self) -> dict[str, Counter[str]]:
        """Case -> how -> tasks."""
        found: dict[str, Counter[str]] = {}
        for one in self.tasks:
            found.setdefault(one.case, Counter())[one.how] += 1
        return found


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
    """At most `count` proven tasks for each case of a suite.

    Args:
        withheld: the tasks that are measured with, those of the suite among them.

    Raises `InfrastructureError` when the sandboxes themselves fail. What goes wrong with a case or a task is in the result.
    """
    refused: list[tuple[str, str]] = []
    drawn: list[PracticeTask] = []
    seen: set[str] = set()
    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        bar = progress.add_task("variants", total=len(suite.cases))
        for case in suite.cases:
            try:
                drawn += await _drawn(case, family, sandboxes, withheld, seen, count=count, seed=seed, root=root)
            except InfrastructureError:
                raise
            except Exception as error:  # a family is user code, and a case's task may be none of its own
                refused.append((case.id, user_code.describe_error(error, 500)))
            progress.advance(bar)
        progress.update(bar, total=None)
        cases, proofs = await prove_tasks(
            family,
            [one.task for one in drawn],
            sandboxes,
            root=root,
            parallel=parallel,
            telling=lambda **told: progress.update(bar, **told),
        )
    wrong = _wrong(drawn, cases, proofs)
    refused += [(one.case, f"{one.how} {one.task.id}: {wrong[one.task.id]}") for one in drawn if one.task.id in wrong]
    return PracticeReport(tasks=tuple(one for one in drawn if one.task.id not in wrong), rejected=tuple(refused))


def _wrong(drawn: Sequence[PracticeTask], cases: Sequence[CaseResult], proofs: Sequence[Proof]) -> dict[str, str]:
    """Task -> what is wrong with it, for those that are not proven."""
    wrong: dict[str, str] = {}
    for result in cases:
        if not result.ok:
            scored = "nothing" if result.value is None else f"{result.value:g}"
            wrong.setdefault(result.task, f"{result.case} scored {scored}, not {result.wanted:g}: {result.detail}"[:500])
    for finding in (finding for proof in proofs for finding in proof.findings if finding.severity == "failure"):
        for name in finding.tasks or [one.task.id for one in drawn]:  # one that names no task is about all of them
            wrong.setdefault(name, finding.what[:500])
    return wrong


async def _drawn(
    case: Case, family: TaskFamily, sandboxes: SandboxBackend, withheld: WithheldTasks, seen: set[str], *, count: int, seed: int, root: Path
) -> list[PracticeTask]:
    """Up to `count` tasks for a case, all different, none of them withheld; not proven yet. Raises `TaskError` where there is none."""
    if case.task.family != family.name:
        other = f"case {case.id} is of family {case.task.family!r}, the recipe's is {family.name!r}"
        raise TaskError(other, fix="name a recipe of that family")
    if callable(getattr(family, "variants", None)):
        source = list(islice(cast(VariedFamily, family).variants(case.task, seed=seed), DRAWS * count))
    else:
        source = await _mutated(case.task, family, sandboxes, withheld, count=count, seed=seed, root=root)
    found: list[PracticeTask] = []
    for how, task in source:
        if task.split is not Split.TRAIN:
            raise TaskError(f"{family.name}: variant {task.id!r} is of split {task.split}", fix="make variants of split train")
        if len(found) < count and task.key not in seen and task not in withheld:
            seen.add(task.key)
            found.append(practice_task(case, how, task))
    if not found:
        raise TaskError(f"no task could be made that is neither case {case.id} nor a near twin of one")
    return found


async def _mutated(
    task: Task, family: TaskFamily, sandboxes: SandboxBackend, withheld: WithheldTasks, *, count: int, seed: int, root: Path
) -> list[tuple[str, Task]]:
    """Mutants with the truth that the gold program finds; it must be right about the task itself, and say another truth of the mutant."""
    gold_without_answer(family, task)
    cases, _ = await prove_tasks(family, [task], sandboxes, root=root)
    if (wrong := next((one for one in cases if one.case == GOLD and not one.ok), None)) is not None or not cases:
        raise TaskError(f"the gold solution of the case is not right about it: {wrong.detail if wrong else 'it did not run'}")
    found: list[tuple[str, Task]] = []
    for mutant in islice(mutate_task(task, seed=seed), DRAWS * count):
        if len(found) == count:
            break
        truth = await _truth(family, mutant, sandboxes)
        if truth.strip() and truth.strip() != str(task.data["answer"]).strip():
            solved = replace(mutant, data={**mutant.data, "answer": truth})
            if solved not in withheld:
                found.append((MUTATED, solved))
    if not found:
        raise TaskError("no other numbers in its files give another answer", fix="give its family a method variants")
    return found


async def _truth(family: TaskFamily, mutant: Task, sandboxes: SandboxBackend) -> str:
    """What the gold program prints beside the mutant's files; empty where it fails on them."""
    result, _ = await run_and_collect(mutant, family.gold(mutant), sandboxes, timeout_s=mutant.limits.tool_timeout_s)
    return render_result(result, mutant.limits) if result.ok else ""


def check_count(count: int, suite: Suite) -> None:
    """Raises `UserError` for more tasks than one file should hold."""
    if count * len(suite.cases) > 100_000:
        raise UserError(f"{count} tasks for each of {len(suite.cases)} cases are more than 100,000", fix="give a smaller --count")
