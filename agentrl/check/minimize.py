"""A case made smaller while a policy still fails it, and while it can still be solved.

What is smaller may be unsolvable, which every policy fails. So each smaller task is first proven: its gold solution must score 1 as it
did, doing nothing and the cheats 0. Then the policy is asked, and the upper end of the interval of its share of passes must lie below
`FAILS_BELOW`. The smallest task is asked once more, with attempts that had no part in choosing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.base.estimates import wilson_interval
from agentrl.check.check import prove_tasks
from agentrl.errors import TaskError, UserError
from agentrl.evaluation.engine import utc_now
from agentrl.evaluation.open_policy import PreparedEvaluation, open_policy
from agentrl.failure.case import Baseline, Case
from agentrl.failure.minimize import RemovablePart, describe_size, line_parts, message_and_file_parts, removable_parts, remove_parts
from agentrl.gate.rule import attempt_passes
from agentrl.protocols import SandboxBackend, TaskFamily
from agentrl.records import Task

FAILS_BELOW = 0.5
"""A task still fails where the upper end of the 90% interval of its share of passes lies below this."""
REPEATS = 6
"""Attempts at each smaller task: with none that passes the interval ends at 0.31. Of 7 one may pass (0.45)."""
_LEVEL = 0.9
_PROOFS = 8  # smaller tasks proven for each that is asked of the policy, at most

AttemptTask = Callable[[Task, int], Awaitable[Sequence[float | None]]]
"""Scores of so many attempts at a task; None: unscored."""


@dataclass(slots=True, kw_only=True)
class MinimizeSearch:
    """What is spent on one case, and whether a smaller task will do."""

    case: Case
    family: TaskFamily
    sandboxes: SandboxBackend
    attempt: AttemptTask
    root: Path
    threshold: float
    repeats: int
    budget: int  # attempts of the policy
    attempts_used: int = 0
    proofs_used: int = 0
    _known: dict[str, bool] = field(default_factory=dict)

    async def still_fails(self, task: Task) -> bool | None:
        """Whether a task is solvable, and fails; None where the budget does not last for asking."""
        if task.key in self._known:
            return self._known[task.key]
        if self.attempts_used + 2 * self.repeats > self.budget or self.proofs_used >= _PROOFS * (1 + self.budget // self.repeats):
            return None  # the last attempts are for the smallest task
        self._known[task.key] = await self._proven(task) and fails_reliably(await self.scores(task), self.threshold)
        return self._known[task.key]

    async def scores(self, task: Task) -> Sequence[float | None]:
        self.attempts_used += self.repeats
        return await self.attempt(task, self.repeats)

    async def _proven(self, task: Task) -> bool:
        self.proofs_used += 1
        try:
            cases, proofs = await prove_tasks(self.family, [task], self.sandboxes, root=self.root)
        except TaskError:
            return False
        failed = any(finding.severity == "failure" for proof in proofs for finding in proof.findings)
        return bool(cases) and all(one.ok for one in cases) and not failed


def fails_reliably(scores: Sequence[float | None], threshold: float) -> bool:
    """Whether attempts show a failure: all scored, and few enough of them pass."""
    if not scores or None in scores:
        return False
    passed = sum(attempt_passes(score, threshold) for score in scores)
    return wilson_interval(passed / len(scores), len(scores), level=_LEVEL)[1] < FAILS_BELOW


async def search_smaller_case(search: MinimizeSearch, *, model: str, at: str) -> tuple[Case, str]:
    """The case with the smallest task that was found, and what was done, in words.

    Raises `UserError` where the case does not clearly fail, cannot be proven as it is, or begins in the middle; and where nothing
    smaller fails.
    """
    case = search.case
    if case.start is not None:
        raise UserError(
            f"case {case.id} begins in the middle, in a world that is as it is", fix="make a case smaller that begins with its task"
        )
    first = await search.still_fails(case.task)
    if not first:
        why = "the budget is too small" if first is None else "it has no proof as it is, or the policy passes it too often"
        raise UserError(
            f"case {case.id} cannot be made smaller: {why}",
            fix=f"choose one that is proven by agentrl check and fails nearly always; --budget allows {search.budget} attempts",
        )
    task = case.task
    for parts in (message_and_file_parts, line_parts):
        task = remove_parts(task, await _gone(search, task, parts(task)))
    if task == case.task:
        raise UserError(
            f"case {case.id}: nothing smaller was found that fails and can be solved", fix="raise --budget, or keep it as it is"
        )
    scores = await search.scores(task)
    if not fails_reliably(scores, search.threshold):
        raise UserError(f"case {case.id}: the smallest task passed when it was asked again", fix="raise --repeats: the policy is not sure")
    told = f"{describe_size(case.task)} -> {describe_size(task)}; {search.attempts_used} attempts, {search.proofs_used} proofs"
    origin = {**case.origin, "smaller": told}
    baseline = Baseline(model=model, scores=tuple(scores), at=at)
    return replace(case, task=task, original=case.original or case.task, origin=origin, baseline=baseline), told


async def _gone(search: MinimizeSearch, task: Task, parts: Sequence[RemovablePart]) -> tuple[RemovablePart, ...]:
    return await removable_parts(parts, lambda gone: search.still_fails(remove_parts(task, gone)))


async def minimize_case(given: PreparedEvaluation, case: Case, family: TaskFamily, *, repeats: int, budget: int) -> tuple[Case, str]:
    """`search_smaller_case`, with the policy and in the sandboxes of a prepared evaluation. Raises as that does.

    Args:
        repeats: attempts at each smaller task.
        budget: attempts in all.
    """
    if case.task.family != family.name:
        other = f"case {case.id} is of family {case.task.family!r}, the recipe's is {family.name!r}"
        raise UserError(other, fix="name a recipe of that family, whose gold solutions prove smaller tasks")
    async with open_policy(given, console=False) as there:
        number = 0

        async def ask(task: Task, count: int) -> Sequence[float | None]:
            nonlocal number
            number += 1
            async with asyncio.TaskGroup() as asking:
                jobs = [asking.create_task(there.groups.run_episode(task, name=f"smaller{number}-{case.id}-r{n}")) for n in range(count)]
            return [None if one.result().episode.left_out else one.result().score.value for one in jobs]

        search = MinimizeSearch(
            case=case,
            family=family,
            sandboxes=there.sandboxes,
            attempt=ask,
            root=given.root,
            threshold=given.threshold if case.threshold is None else case.threshold,
            repeats=repeats,
            budget=budget,
        )
        return await search_smaller_case(search, model=given.policy.name, at=utc_now())
