"""Episodes as plain text, for the report: one JSON object per line in `episodes/`. Those with a pending score are in `pending/`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.base.files import append_lines, json_line, write_atomically
from agentrl.observe.rundata import read_object
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, Message, ScoredEpisode, Task, Trajectory

_MAX_BYTES = 256 << 20  # of the transcripts of one group


def transcript(task: Task, scored: ScoredEpisode, *, phase: str, step: int) -> dict[str, Any]:
    """Returns one episode as JSON data: `messages` of its first trajectory, and the others in `trajectories`."""
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
    """Returns the prompt of a trajectory, then its turns and tool results."""
    messages = [_said(message) for message in prompt]
    for turn in trajectory.turns if trajectory is not None else ():
        messages.append(_said(turn.message))
        messages.extend({"role": "tool", "content": result.output, "tool_calls": []} for result in turn.tool_results)
    return messages


def _said(message: Message) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls}


def append_transcripts(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Appends transcripts to a file."""
    append_lines(path, map(json_line, lines))


class PendingTranscripts:
    """The transcripts of attempts whose scores are still to come, for the people who score them: `pending/000012.json` for group 12."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "pending"

    def write(self, task: Task, group: Group, *, step: int) -> None:
        """Writes the transcripts of a group with pending scores. Call it before the group is stored, so that none is missing."""
        attempts = {attempt: scored for attempt, scored, _ in group.pending}
        if attempts:
            shown = {str(attempt): transcript(task, scored, phase="train", step=step) for attempt, scored in attempts.items()}
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._path(group.index), json_line(shown))

    def read(self, group: int, attempt: int) -> dict[str, Any] | None:
        """Returns the transcript of an attempt; None if it is missing or damaged."""
        shown = read_object(self._path(group), [], most=_MAX_BYTES).get(str(attempt))
        return shown if isinstance(shown, dict) else None

    def remove_scored(self, store: ExperienceStore) -> None:
        """Removes the transcripts of stored groups that wait for no score."""
        written = {int(path.stem): path for path in self._folder.glob("*.json") if path.stem.isdecimal()}
        for index in written.keys() - store.parked() if written else ():
            if store.has(index):
                written[index].unlink(missing_ok=True)

    def _path(self, group: int) -> Path:
        return self._folder / f"{group:06d}.json"
