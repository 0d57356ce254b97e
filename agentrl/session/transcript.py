"""Episodes as plain text for people: one JSON object a line in `episodes/`, read by the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.base.files import append_lines, json_line
from agentrl.records import Message, ScoredEpisode, Task, Trajectory


def transcript(task: Task, scored: ScoredEpisode, *, phase: str, step: int) -> dict[str, Any]:
    """What was asked, said, run, shown and judged in one episode: `messages` of its first trajectory, and `trajectories`, the others."""
    episode = scored.episode
    main, *others = episode.trajectories or (None,)
    return {
        "phase": phase,
        "step": step,
        "task_id": task.id,
        "split": str(task.split),
        "kind": task.kind,
        "question": task.prompt[-1].content,
        "answer": episode.answer,
        "truth": task.data.get("answer"),
        "score": scored.score.value,
        "reason": scored.score.reason,
        "stop_reason": episode.stop_reason or None,
        "versions": sorted({s.version for t in episode.trajectories for u in t.turns for s in u.versions}),
        "left_out": episode.left_out,
        "memory": None if episode.memory is None else {"notes": list(episode.memory.notes), "read": list(episode.memory.read)},
        "messages": _messages((main.prompt if main is not None else ()) or task.prompt, main),
        "trajectories": [
            {
                "agent": one.agent,
                "parent": None if one.parent is None else asdict(one.parent),
                "stop_reason": one.stop_reason,
                "messages": _messages(one.prompt or task.prompt, one),
            }
            for one in others
            if one is not None
        ],
    }


def _messages(prompt: Sequence[Message], trajectory: Trajectory | None) -> list[dict[str, Any]]:
    """What a trajectory began with, then what was said and shown in it."""
    messages = [_said(message) for message in prompt]
    for turn in trajectory.turns if trajectory is not None else ():
        messages.append(_said(turn.message))
        messages.extend({"role": "tool", "content": result.output, "tool_calls": []} for result in turn.tool_results)
    return messages


def _said(message: Message) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls}


def append_transcripts(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    append_lines(path, map(json_line, lines))
