"""Episodes as plain text for the report, stored as JSON lines in `episodes/`. Episodes with a pending score are stored in `pending/`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.base.files import append_lines, json_line, write_atomically
from agentrl.experience.episode_rows import outcome
from agentrl.observe.rundata import read_object
from agentrl.records import Group, Message, ScoredEpisode, Task, Trajectory, codec, sampled_index

_MAX_BYTES = 256 << 20  # maximum size in bytes of the transcripts of one group


def transcript(task: Task, scored: ScoredEpisode, *, phase: str, step: int) -> dict[str, Any]:
    """Returns one episode as JSON data: `messages` contains the first trajectory, and `trajectories` the others."""
    episode = scored.episode
    main, *others = episode.trajectories or (None,)
    return {
        "phase": phase,
        "step": step,
        "task_id": task.id,
        "split": str(task.split),
        "kind": task.kind,
        "question": task.question,
        "answer": episode.answer,
        "truth": task.data.get("answer"),
        "score": scored.score.value,
        "outcome": outcome(scored, task.pass_threshold),
        "reason": scored.score.reason,
        "stop_reason": episode.stop_reason or None,
        "versions": sorted({s.version for t in episode.trajectories for u in t.turns for s in u.versions}),
        "left_out": episode.left_out,
        "memory": None if episode.memory is None else {"notes": list(episode.memory.notes), "read": list(episode.memory.read)},
        "messages": _messages((main.prompt if main is not None else ()) or task.prompt, main),
        "trajectories": [
            {
                "agent": trajectory.agent,
                "parent": None if trajectory.parent is None else asdict(trajectory.parent),
                "stop_reason": trajectory.stop_reason,
                "messages": _messages(trajectory.prompt or task.prompt, trajectory),
            }
            for trajectory in others
            if trajectory is not None
        ],
    }


def _messages(prompt: Sequence[Message], trajectory: Trajectory | None) -> list[dict[str, Any]]:
    """Returns the messages of a trajectory: the prompt, then the turns and the tool results."""
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
    """The tasks and transcripts of attempts whose scores have not arrived yet, in files such as `pending/000012.json` for group 12 or its
    residual.

    People read the transcripts to score the attempts. The file of a group is written before the group is stored and removed after the
    driver has recorded the outcome. A later driver can therefore record the outcomes that an earlier driver did not record.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "pending"

    def write(self, task: Task, group: Group, *, step: int) -> None:
        """Writes the file of a group with pending scores."""
        attempts = {attempt: scored for attempt, scored, _ in group.pending}
        shown = {str(attempt): transcript(task, scored, phase="train", step=step) for attempt, scored in attempts.items()}
        self._folder.mkdir(exist_ok=True)
        write_atomically(self._path(group.index), json_line({"task": codec.to_json(task).decode(), **shown}))

    def read(self, group: int, attempt: int) -> dict[str, Any] | None:
        """Returns the transcript of an attempt; None if the transcript is missing or damaged."""
        shown = self._read(group).get(str(attempt))
        return shown if isinstance(shown, dict) else None

    def task(self, group: int) -> Task | None:
        """Returns the task of a group; None if the task is missing or damaged."""
        try:
            return codec.from_json(Task, str(self._read(group).get("task", "")).encode())
        except ValueError:
            return None

    def groups(self) -> set[int]:
        """Returns the indices of the groups whose outcomes are not recorded. If a driver was killed, some of these groups may not be in the
        store."""
        return {int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()}

    def remove(self, group: int) -> None:
        """Removes the file of a group if it exists."""
        self._path(group).unlink(missing_ok=True)

    def _read(self, group: int) -> dict[str, Any]:
        return read_object(self._path(group), [], most=_MAX_BYTES)

    def _path(self, group: int) -> Path:
        return self._folder / f"{sampled_index(group):06d}.json"
