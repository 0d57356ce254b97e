"""Episodes as plain text for people: one JSON object a line in `episodes/`, read by the report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.records import Message, ScoredEpisode, Task


def transcript(task: Task, scored: ScoredEpisode, *, phase: str, step: int) -> dict[str, Any]:
    """What was asked, said, run, shown and judged in one episode."""
    episode = scored.episode
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    messages = [_said(message) for message in task.prompt]
    for turn in turns:
        messages.append(_said(turn.message))
        messages.extend({"role": "tool", "content": result.output, "tool_calls": []} for result in turn.tool_results)
    return {
        "phase": phase,
        "step": step,
        "task_id": task.id,
        "split": str(task.split),
        "kind": str(task.data.get("kind", task.family)),
        "question": task.prompt[-1].content,
        "answer": episode.answer,
        "truth": task.data.get("answer"),
        "score": scored.score.value,
        "reason": scored.score.reason,
        "stop_reason": episode.trajectories[-1].stop_reason if episode.trajectories else None,
        "versions": sorted({span.version for turn in turns for span in turn.versions}),
        "left_out": episode.left_out,
        "messages": messages,
    }


def _said(message: Message) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls}


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
