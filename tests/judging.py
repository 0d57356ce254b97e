"""Tasks and episodes for the tests of shipped verifiers."""

from __future__ import annotations

from typing import Any

from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.reward import TaskScorer


def task(*, outputs: tuple[str, ...] = (), verifiers: tuple[str, ...] = ("v",), id: str = "t", **data: Any) -> Task:
    return Task(
        id=id,
        family="demo",
        prompt=(Message(role="user", content="What is it?"),),
        tools=("submit",),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=verifiers,
        data=data,
        split=Split.TRAIN,
        outputs=outputs,
    )


def episode(answer: str | None = None, *, calls: str = "", failed: tuple[str, ...] = (), **files: bytes) -> Episode:
    """An episode with this answer; `calls`: names of tools, one turn each."""
    turns = tuple(
        Turn(
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            versions=(),
            message=Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments={}),)),
            finish_reason="stop",
            tool_results=(ToolResult(name=name, output="", ok=name not in failed),),
        )
        for name in calls.split()
    )
    trajectories = (Trajectory(agent="main", turns=turns),) if turns else ()
    return Episode(id="e", task_id="t", task_key="k", trajectories=trajectories, answer=answer, outputs=files)


async def judged(verifier: Any, judged_task: Task, attempt: Episode) -> Score:
    """Returns the score that a run gets, no matter what the verifier does."""
    return await TaskScorer(_verifiers={name: verifier for name in judged_task.verifiers}, max_retries=0)(judged_task, attempt)


async def value(verifier: Any, answer: str | None, /, **data: Any) -> float | None:
    return (await judged(verifier, task(**data), episode(answer))).value
