"""Helpers for tests of scoring: a task, an episode, simple verifiers, and a virtual clock."""

from __future__ import annotations

import asyncio

from agentrl.protocols import SandboxBackend
from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task
from agentrl.reward import TaskScorer
from agentrl.testing.clock import run_virtually


async def full(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


async def broken(task: Task, episode: Episode) -> Score:
    raise KeyError("answer")


class InSandboxes:
    """A verifier that needs sandboxes and raises `error` in its first `faults` calls."""

    needs_sandboxes = True

    def __init__(self, faults: int, error: Exception) -> None:
        self.faults, self.error = faults, error
        self.seen: list[SandboxBackend] = []

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        self.seen.append(sandboxes)
        if len(self.seen) <= self.faults:
            raise self.error
        return Score(value=1.0)


def task_of(file: str, *names: str) -> Task:
    """Returns a task whose verifiers are functions in a file."""
    verifiers = tuple(f"{file}:{name}" for name in names)
    message = Message(role="user", content="q")
    spec = SandboxSpec(image="none")
    return Task(id="t", family="f", prompt=(message,), tools=(), sandbox=spec, verifiers=verifiers, data={}, split=Split.TRAIN)


EPISODE = Episode(id="e", task_id="t", task_key="k", trajectories=())


def scored(scorer: TaskScorer, judged: Task, episode: Episode = EPISODE) -> tuple[Score, float]:
    """Returns the score and the seconds that it took on a virtual clock."""

    async def score() -> tuple[Score, float]:
        return await scorer(judged, episode), asyncio.get_running_loop().time()

    return run_virtually(score())
