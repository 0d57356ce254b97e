"""Checks that verifiers score anything that an agent submits, and that they give the same score if the same work is scored twice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from agentrl.base.numbers import is_above, plural
from agentrl.check import cheats
from agentrl.check.report import Finding, Proof, join_examples, shorten
from agentrl.errors import SandboxError
from agentrl.records import Episode, Score, Task
from agentrl.reward import TaskScorer

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRIES = 2
NAME = "verifiers score any answer, and do so consistently"
TASKS = 3  # number of tasks per verifier for which malformed answers are scored


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldAttempt:
    """The episode of a gold solution, and its first score."""

    episode: Episode
    score: Score


async def prove_verifiers(tasks: Sequence[Task], golden: Mapping[str, GoldAttempt], scorer: TaskScorer, *, parallel: int) -> Proof:
    """Scores malformed answers for a few tasks of each verifier, or malformed files if the task has a gold episode with files. Scores every
    gold episode (`golden`, by task id) a second time."""
    scorer = replace(scorer, controls=False)  # every failure of a verifier counts, even one that the answer provokes
    chosen: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        tasks_of = chosen.setdefault(task.verifiers, [])
        if len(tasks_of) < TASKS:
            tasks_of.append(task)
    slots = asyncio.Semaphore(parallel)

    async def ask(task: Task, episode: Episode) -> Score:
        async with slots:
            return await scorer(task, episode)

    async with quiet_verifier_log(), asyncio.TaskGroup() as asking:
        again = [(task, asking.create_task(ask(task, golden[task.id].episode))) for task in reversed(tasks) if task.id in golden]
        malformed_jobs = [
            (f"{description} for {task.id}", asking.create_task(ask(task, episode)))
            for task in (chosen_task for tasks_of in chosen.values() for chosen_task in tasks_of)
            for description, episode in _malformed_episodes(task, golden.get(task.id))
        ]
    bad: dict[str, list[str]] = {}
    for case, job in malformed_jobs:
        if problem := _problem(job.result()):
            bad.setdefault(problem, []).append(case)
    findings = [Finding(severity="failure", what=f"{problem}; submitted: {join_examples(cases)}") for problem, cases in bad.items()]
    pairs = [(task.id, golden[task.id].score, job.result()) for task, job in again]
    verifiers = plural(len({name for task in tasks for name in task.verifiers}), "verifier")
    return Proof(
        name=NAME,
        looked_at=f"{verifiers}: {len(malformed_jobs)} malformed answers, {plural(len(pairs), 'gold episode')} twice",
        findings=(*findings, *_inconsistent(pairs)),
    )


async def retry_sandbox_errors(act: Callable[[], Awaitable[T]]) -> T:
    """Calls `act`, and retries the call up to `RETRIES` times if a sandbox fails. Raises `SandboxError` if the last retry also fails."""
    for attempt in range(RETRIES):
        try:
            return await act()
        except SandboxError as error:
            log.warning("retrying: %s", error)
            await asyncio.sleep(0.2 * 2**attempt)
    return await act()


@contextlib.asynccontextmanager
async def quiet_verifier_log() -> AsyncIterator[None]:
    """Suppresses the tracebacks of verifiers that raise exceptions, because the finding contains the error."""
    scoring_log = logging.getLogger("agentrl.reward")
    before = scoring_log.level
    scoring_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        scoring_log.setLevel(before)


def _malformed_episodes(task: Task, golden: GoldAttempt | None) -> list[tuple[str, Episode]]:
    nothing = Episode(id="check", task_id=task.id, task_key=task.key, trajectories=())
    if not task.outputs:
        return [(case, replace(nothing, answer=answer)) for case, answer in cheats.MALFORMED_ANSWERS.items()]
    paths = list(golden.episode.outputs) if golden is not None else []
    return (
        [(case, replace(nothing, outputs=dict.fromkeys(paths[:4], data))) for case, data in cheats.MALFORMED_FILES.items()] if paths else []
    )


def _problem(score: Score) -> str:
    """Returns the problem with the score of malformed work; empty if the score is finite and not above 0."""
    if score.value is None:
        return f"no score: {shorten(score.reason, 300)}"
    if not math.isfinite(score.value):
        return f"a score that is not finite: {score.value}"
    return f"a score of {score.value:g} for incorrect work" if is_above(score.value, 0.0) else ""


def _inconsistent(pairs: Sequence[tuple[str, Score, Score]]) -> list[Finding]:
    differing = [
        (name, first, second)
        for name, first, second in pairs
        if (first.value, first.parts, first.turn_rewards, first.branches, first.without)
        != (second.value, second.parts, second.turn_rewards, second.branches, second.without)
    ]
    if not differing:
        return []
    name, first, second = differing[0]
    parts = [part for part in {**first.parts, **second.parts} if first.parts.get(part) != second.parts.get(part)]
    where = (
        f"{_score_text(first)} and {_score_text(second)}"
        if first.value != second.value
        else f"different {join_examples(parts) or 'turns or branches'}"
    )
    text = f"{plural(len(differing), 'task')} of {len(pairs)} score differently the second time: {name} {where}"
    return [Finding(severity="failure", what=text, tasks=tuple(name for name, _, _ in differing))]


def _score_text(score: Score) -> str:
    return f"{score.value:g}" if score.value is not None else f"no score ({shorten(score.reason)})"
