"""Verifiers give a score for anything an agent hands in, and the same score again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.base.scores import is_above
from agentrl.check import malformed
from agentrl.check.findings import Finding, Proof, join_examples, plural, shorten
from agentrl.records import Episode, Score, Task
from agentrl.reward import TaskScorer

NAME = "verifiers score anything, and twice alike"
TASKS = 3
"""Tasks of each verifier that get odd answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldAttempt:
    """The episode of a gold solution, and its first score."""

    episode: Episode
    score: Score


async def prove_verifiers(tasks: Sequence[Task], golden: Mapping[str, GoldAttempt], scorer: TaskScorer, *, parallel: int) -> Proof:
    """Scores odd answers for a few tasks of each verifier, and every gold episode (`golden`, by task id) a second time."""
    scorer = replace(scorer, controls=False)  # a verifier that fails is told, whatever made it fail
    chosen: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        some = chosen.setdefault(task.verifiers, [])
        if len(some) < TASKS:
            some.append(task)
    slots = asyncio.Semaphore(parallel)

    async def ask(task: Task, episode: Episode) -> Score:
        async with slots:
            return await scorer(task, episode)

    async with quiet_verifier_log(), asyncio.TaskGroup() as asking:
        again = [(task, asking.create_task(ask(task, golden[task.id].episode))) for task in reversed(tasks) if task.id in golden]
        odd_ones = [
            (f"{what} for {task.id}", asking.create_task(ask(task, episode)))
            for task in (one for some in chosen.values() for one in some)
            for what, episode in _odd_episodes(task, golden.get(task.id))
        ]
    bad: dict[str, list[str]] = {}
    for case, job in odd_ones:
        if problem := _problem(job.result()):
            bad.setdefault(problem, []).append(case)
    findings = [Finding(severity="failure", what=f"{problem}; handed in: {join_examples(cases)}") for problem, cases in bad.items()]
    pairs = [(task.id, golden[task.id].score, job.result()) for task, job in again]
    verifiers = {name for task in tasks for name in task.verifiers}
    return Proof(
        name=NAME,
        looked_at=f"{plural(len(verifiers), 'verifier')}: {len(odd_ones)} odd answers, {plural(len(pairs), 'gold episode')} twice",
        findings=(*findings, *_unlike(pairs)),
    )


@contextlib.asynccontextmanager
async def quiet_verifier_log() -> AsyncIterator[None]:
    """Suppresses the tracebacks of verifiers that raise, since the finding has the text."""
    log = logging.getLogger("agentrl.reward")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _odd_episodes(task: Task, golden: GoldAttempt | None) -> list[tuple[str, Episode]]:
    nothing = Episode(id="check", task_id=task.id, task_key=task.key, trajectories=())
    if not task.outputs:
        return [(what, replace(nothing, answer=answer)) for what, answer in malformed.ANSWERS.items()]
    paths = list(golden.episode.outputs) if golden is not None else []
    return [(what, replace(nothing, outputs=dict.fromkeys(paths[:4], data))) for what, data in malformed.FILES.items()] if paths else []


def _problem(score: Score) -> str:
    """What is wrong with the score of odd work; empty when it is 0."""
    if score.value is None:
        return f"no score: {shorten(score.reason, 300)}"
    if not math.isfinite(score.value):
        return f"a score that is not finite: {score.value}"
    return f"a score of {score.value:g} for work that is wrong" if is_above(score.value, 0.0) else ""


def _unlike(pairs: Sequence[tuple[str, Score, Score]]) -> list[Finding]:
    differing = [
        (name, one, other)
        for name, one, other in pairs
        if (one.value, one.parts, one.turn_rewards, one.branches, one.without)
        != (other.value, other.parts, other.turn_rewards, other.branches, other.without)
    ]
    if not differing:
        return []
    name, one, other = differing[0]
    parts = [part for part in {**one.parts, **other.parts} if one.parts.get(part) != other.parts.get(part)]
    where = f"{_shown(one)} and {_shown(other)}" if one.value != other.value else f"other {join_examples(parts) or 'turns or branches'}"
    what = f"{plural(len(differing), 'task')} of {len(pairs)} score differently the second time: {name} {where}"
    return [Finding(severity="failure", what=what, tasks=tuple(name for name, _, _ in differing))]


def _shown(score: Score) -> str:
    return f"{score.value:g}" if score.value is not None else f"no score ({shorten(score.reason)})"
