"""Traces for tests: from this project's episodes, built turn by turn, and from third-party agents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.failure.trace import CaptureReason, ImportedMessage, Trace
from agentrl.records import (
    Blame,
    Episode,
    Failure,
    Limits,
    Message,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    VersionSpan,
)

Call = tuple[str, dict[str, Any], str, bool]  # tool, arguments, output, ok


def task(question: str = "What is the total of `amount`?", truth: Any = "412", **changes: Any) -> Task:
    default = Task(
        id="t-1",
        family="tables",
        prompt=(Message(role="system", content="Use the tools, then submit."), Message(role="user", content=question)),
        tools=("python", "submit"),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("rewards.tables:exact_answer",),
        data={"kind": "sum", "answer": truth, "tolerance": 0.0},
        split=Split.TRAIN,
        files={"a.csv": "amount\n400\n12\n"},
        limits=Limits(turns=6),
    )
    return replace(default, **changes)


def turn(*calls: Call, said: str = "", malformed: tuple[str, ...] = (), cut: bool = False, version: int = 3) -> Turn:
    results = [ToolResult(name=name[:64], output=output, ok=ok) for name, _, output, ok in calls]
    results += [ToolResult(name="", output=error, ok=False) for error in malformed]
    tool_calls = tuple(ToolCall(name=name, arguments=arguments) for name, arguments, _, _ in calls)
    return Turn(
        prompt_ids=(1, 2),
        completion_ids=(3, 4, 5),
        logprobs=(-0.5, -0.25, -1.0),
        versions=(VersionSpan(version=version, start=0, end=3),),
        message=Message(role="assistant", content=said, tool_calls=tool_calls),
        finish_reason="length" if cut else "stop",
        tool_results=tuple(results),
    )


def python(code: str, output: str, ok: bool = True) -> Call:
    return ("python", {"code": code}, output, ok)


def submit(answer: str) -> Call:
    return ("submit", {"answer": answer}, "submitted", True)


def scored(
    *turns: Turn,
    answer: str | None = None,
    ended: str = "submitted",
    value: float | None = 0.0,
    of: Task | None = None,
    name: str = "g000000-0-a0",
    failures: tuple[Failure, ...] = (),
    trajectories: tuple[Trajectory, ...] | None = None,
) -> ScoredEpisode:
    of_task = of or task()
    lines = trajectories if trajectories is not None else (Trajectory(agent="main", turns=turns, stop_reason=ended),)
    episode = Episode(id=name, task_id=of_task.id, task_key=of_task.key, trajectories=lines, answer=answer, failures=failures)
    score = Score(value=value, evidence=f"answer {answer!r}") if value is not None else Score(value=None, reason="the verifier raised")
    return ScoredEpisode(episode=episode, score=score)


def trace(
    *turns: Turn, of: Task | None = None, why: CaptureReason = CaptureReason.FAILED, origin: dict[str, str] | None = None, **episode: Any
) -> Trace:
    base = of or task()
    own = scored(*turns, of=base, **episode)
    return Trace(
        id=own.episode.id, why=why, task=base, episode=own.episode, score=own.score, phase="train", step=2, origin=origin or {"run": "r"}
    )


def fault(blame: Blame, kind: str = "SandboxError") -> Failure:
    return Failure(stage="sandbox", blame=blame, kind=kind, message="it died", turn=0)


def imported_trace(*messages: ImportedMessage, tools: tuple[dict[str, Any], ...] = ()) -> Trace:
    opening = (utterance("system", "You are an agent."), utterance("user", "How many rows has a.csv?"))
    return Trace(id="x-1", why=CaptureReason.IMPORTED, source="openai", spoken=(*opening, *messages), tools=tools)


def utterance(role: str, content: str = "", *calls: ToolCall, **more: Any) -> ImportedMessage:
    return ImportedMessage(message=Message(role=role, content=content, tool_calls=calls), **more)
