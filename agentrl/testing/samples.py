"""A small task for tests and fuzz targets that need any task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.records import Message, SandboxSpec, Split, Task

_TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="q"),),
    tools=("submit",),
    sandbox=SandboxSpec(image="i"),
    verifiers=(),
    data={"answer": "4"},
    split=Split.TRAIN,
)


def sample_task(**changes: Any) -> Task:
    """Returns a training task with the answer "4" and these changed fields."""
    return replace(_TASK, **changes)
