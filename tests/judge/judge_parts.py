"""A task, an episode, an endpoint and verdicts for tests of judges."""

from __future__ import annotations

import json
from typing import Any

from agentrl.judge import Endpoint
from agentrl.records import Episode, Message, SandboxSpec, Split, Task
from agentrl.testing import JumpingClock


def task(question: str = "What is the capital of France?", **data: Any) -> Task:
    return Task(
        id="t",
        family="demo",
        prompt=(Message(role="user", content=question),),
        tools=(),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("judge",),
        data={"answer": "Paris", **data},
        split=Split.TRAIN,
    )


TASK = task()


def episode(answer: str | None = "It is Paris.", **more: Any) -> Episode:
    return Episode(id="e", task_id=TASK.id, task_key=TASK.key, trajectories=(), answer=answer, **more)


def endpoint(url: str, **more: Any) -> Endpoint:
    return Endpoint(**{"url": url, "model": "scripted", "clock": JumpingClock(), **more})


def scores(abstain: bool = False, **numbers: Any) -> str:
    return json.dumps({"reasoning": "because", "scores": numbers, "abstain": abstain})


RIGHT, WRONG = scores(correct=1), scores(correct=0)
