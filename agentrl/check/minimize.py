"""Minimizes a case: removes parts of its task as long as the policy still fails the task and the task can be solved.

A smaller task may be unsolvable, and every policy fails an unsolvable task. Each smaller task is therefore proven first: its gold solution
must score 1, and doing nothing and the cheats must score 0. Then the policy attempts the task, and the upper bound of the confidence
interval for its pass rate must be below `FAILS_BELOW`. The smallest task is then attempted again, and only the new attempts are recorded,
because they did not influence the choice of the task.

The search is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002): it tries to remove large chunks of
the parts first, then smaller chunks, until it has tried single parts or the budget is spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.base.numbers import plural, wilson_interval
from agentrl.check.check import prove_tasks
from agentrl.errors import TaskError, UserError
from agentrl.evaluation.engine import utc_now
from agentrl.evaluation.open_policy import PreparedEvaluation, open_policy
from agentrl.evaluation.results import attempt_passes
from agentrl.failure.case import Baseline, Case
from agentrl.protocols import SandboxBackend, TaskFamily
from agentrl.records import Task

FAILS_BELOW = 0.5
"""The policy fails a task if the upper bound of the 90% confidence interval for its pass rate is below this value."""
_LEVEL = 0.9
_MAX_PROOFS = 8  # maximum number of proofs for each task that the policy attempts

AttemptTask = Callable[[Task, int], Awaitable[Sequence[float | None]]]
"""Attempts a task the given number of times and returns the scores; None means unscored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovablePart:
    """A part of a task: a message other than the last, a file, or a line of a file."""

    message: int | None = None
    file: str = ""
    line: int | None = None  # counted from 0; None means the whole file


@dataclass(slots=True, kw_only=True)
class MinimizeSearch:
    """Tests smaller tasks of one case within a budget of attempts."""

    case: Case
    family: TaskFamily
    sandboxes: SandboxBackend
    attempt: AttemptTask
    root: Path
    threshold: float
    repeats: int
    budget: int  # maximum number of attempts by the policy
    attempts_used: int = 0
    proofs_used: int = 0
    _known: dict[str, bool] = field(default_factory=dict)

    async def still_fails(self, task: Task) -> bool | None:
        """Whether a task can be solved and the policy fails it; None if the budget does not cover this and one more round of attempts, or
        if too many tasks were proven."""
        if task.key in self._known:
            return self._known[task.key]
        reserved = 2 * self.repeats  # includes the additional attempts at the smallest task
        if self.attempts_used + reserved > self.budget or self.proofs_used >= _MAX_PROOFS * (1 + self.budget // self.repeats):
            return None
        self._known[task.key] = await self._prove(task) and fails_reliably(await self.scores(task), self.threshold)
        return self._known[task.key]

    async def scores(self, task: Task) -> Sequence[float | None]:
        """Returns the scores of new attempts at a task."""
        self.attempts_used += self.repeats
        return await self.attempt(task, self.repeats)

    async def _prove(self, task: Task) -> bool:
        self.proofs_used += 1
        try:
            cases, proofs = await prove_tasks(self.family, [task], self.sandboxes, root=self.root)
        except TaskError:
            return False
        failed = any(finding.severity == "failure" for proof in proofs for finding in proof.findings)
        return bool(cases) and all(result.ok for result in cases) and not failed


def fails_reliably(scores: Sequence[float | None], threshold: float) -> bool:
    """Whether all attempts are scored and the upper bound of the interval for their pass rate is below `FAILS_BELOW`."""
    if not scores or None in scores:
        return False
    passed = sum(attempt_passes(score, threshold) for score in scores)
    return wilson_interval(passed / len(scores), len(scores), level=_LEVEL)[1] < FAILS_BELOW


async def search_smaller_case(search: MinimizeSearch, *, model: str, at: str) -> tuple[Case, str]:
    """Returns the case with the smallest task that the policy still fails, and a summary.

    Raises `UserError` if the case starts at a later turn or cannot be proven, if the policy does not clearly fail it, if no smaller task
    fails, if new attempts at the smallest task pass, or if the budget is too small.
    """
    case = search.case
    if case.start is not None:
        raise UserError(f"case {case.id} starts in the middle of an episode", fix="choose a case that starts with its task")
    fails = await search.still_fails(case.task)
    if not fails:
        why = "the budget is too small" if fails is None else "its proof fails, or the policy passes it too often"
        raise UserError(
            f"case {case.id} cannot be minimized: {why}",
            fix=f"choose a case that agentrl check proves and the policy nearly always fails; --budget allows {search.budget} attempts",
        )
    task = case.task
    for parts in (message_and_file_parts, line_parts):
        task = await _without_removable(search, task, parts(task))
    if task == case.task:
        raise UserError(f"case {case.id}: no smaller task fails and can be solved", fix="raise --budget, or keep the case unchanged")
    scores = await search.scores(task)
    if not fails_reliably(scores, search.threshold):
        raise UserError(f"case {case.id}: new attempts at the smallest task passed", fix="raise --repeats: the policy's results vary")
    sizes = f"{describe_size(case.task)} -> {describe_size(task)}"
    summary = f"{sizes}; {plural(search.attempts_used, 'attempt')}, {plural(search.proofs_used, 'proof')}"
    origin = {**case.origin, "smaller": summary}
    baseline = Baseline(model=model, scores=tuple(scores), at=at)
    return replace(case, task=task, original=case.original or case.task, origin=origin, baseline=baseline), summary


async def _without_removable(search: MinimizeSearch, task: Task, parts: Sequence[RemovablePart]) -> Task:
    return remove_parts(task, await removable_parts(parts, lambda removed: search.still_fails(remove_parts(task, removed))))


async def minimize_case(prepared: PreparedEvaluation, case: Case, family: TaskFamily, *, repeats: int, budget: int) -> tuple[Case, str]:
    """Runs `search_smaller_case` with the policy and sandboxes of a prepared evaluation. Raises its errors, and `UserError` if the case
    belongs to a different family.

    Args:
        repeats: number of attempts at each smaller task.
        budget: maximum total number of attempts.
    """
    if case.task.family != family.name:
        problem = f"case {case.id} belongs to family {case.task.family!r}, but the recipe's family is {family.name!r}"
        raise UserError(problem, fix="give a recipe of the case's family, whose gold solutions prove smaller tasks")
    async with open_policy(prepared, console=False) as opened:
        number = 0

        async def attempt(task: Task, count: int) -> Sequence[float | None]:
            nonlocal number
            number += 1
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(opened.groups.run_episode(task, name=f"smaller{number}-{case.id}-r{n}")) for n in range(count)]
            return [None if job.result().episode.left_out else job.result().score.value for job in jobs]

        search = MinimizeSearch(
            case=case,
            family=family,
            sandboxes=opened.sandboxes,
            attempt=attempt,
            root=prepared.root,
            threshold=prepared.threshold if case.threshold is None else case.threshold,
            repeats=repeats,
            budget=budget,
        )
        return await search_smaller_case(search, model=prepared.policy.name, at=utc_now())


def message_and_file_parts(task: Task) -> tuple[RemovablePart, ...]:
    """Returns all messages except the last, which is the question, and all files."""
    messages = (RemovablePart(message=number) for number in range(len(task.prompt) - 1))
    return (*messages, *(RemovablePart(file=path) for path in sorted({*task.files, *task.binary_files})))


def line_parts(task: Task) -> tuple[RemovablePart, ...]:
    """Returns the lines of all text files that have more than one line."""
    counts = {path: len(text.splitlines()) for path, text in sorted(task.files.items())}
    return tuple(RemovablePart(file=path, line=number) for path, lines in counts.items() if lines > 1 for number in range(lines))


def remove_parts(task: Task, removed: Sequence[RemovablePart]) -> Task:
    """Returns the task without these parts."""
    messages = {part.message for part in removed if part.message is not None}
    files = {part.file for part in removed if part.file and part.line is None}
    lines = {(part.file, part.line) for part in removed if part.line is not None}
    shortened = {path for path, _ in lines}

    def remaining(path: str, text: str) -> str:
        if path not in shortened:
            return text
        return "".join(line for number, line in enumerate(text.splitlines(keepends=True)) if (path, number) not in lines)

    return replace(
        task,
        prompt=tuple(message for number, message in enumerate(task.prompt) if number not in messages),
        files={path: remaining(path, text) for path, text in task.files.items() if path not in files},
        binary_files={path: text for path, text in task.binary_files.items() if path not in files},
    )


async def removable_parts(
    parts: Sequence[RemovablePart], fails: Callable[[tuple[RemovablePart, ...]], Awaitable[bool | None]]
) -> tuple[RemovablePart, ...]:
    """Returns parts that can be removed together, found with ddmin; empty if there are none.

    Args:
        fails: returns whether the policy still fails the task without these parts, or None if the budget is spent. None ends the search.
    """
    removed: tuple[RemovablePart, ...] = ()
    remaining, chunks = list(parts), 1
    while remaining:
        size = -(-len(remaining) // chunks)
        for first in range(0, len(remaining), size):
            chunk = remaining[first : first + size]
            still_fails = await fails((*removed, *chunk))
            if still_fails is None:
                return removed
            if still_fails:
                removed, remaining, chunks = (*removed, *chunk), [part for part in remaining if part not in chunk], max(chunks - 1, 1)
                break
        else:
            if chunks >= len(remaining):
                return removed
            chunks = min(2 * chunks, len(remaining))
    return removed


def describe_size(task: Task) -> str:
    """Describes the size of a task: `1 message, 2 files, 40 lines`."""
    lines = sum(len(text.splitlines()) for text in task.files.values())
    counts = ((len(task.prompt), "message"), (len(task.files) + len(task.binary_files), "file"), (lines, "line"))
    return ", ".join(plural(number, name) for number, name in counts)
