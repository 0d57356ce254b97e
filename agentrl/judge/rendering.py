"""Renders a task and an episode as bounded plain text for a judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from agentrl.judge.untrusted import truncate_middle
from agentrl.records import Episode, Message, Task, Trajectory

PromptField = Literal["question", "reference", "transcript", "outputs", "answer"]

MAX_ANSWER = 20_000  # maximum length of an answer, a question or a reference, in characters; longer text is shortened in the middle
MAX_TRANSCRIPT = 40_000
_MAX_MESSAGE = 4000
_MAX_FILE = 8000
_MAX_FILES = 16


def render_field(name: PromptField, task: Task, episode: Episode, *, reference: str) -> str:
    """Returns the text of one field of a judge's prompt.

    Args:
        reference: key of `Task.data` that holds the reference answer.
    """
    if name == "question":
        return question_text(task)
    if name == "reference":
        return truncate_middle(reference_text(task, reference) or "(there is none)", MAX_ANSWER)
    if name == "transcript":
        return transcript_text(episode)
    if name == "outputs":
        return outputs_text(episode)
    return answer_text(episode)


def question_text(task: Task) -> str:
    """Returns the text of the task's prompt. If the prompt has several messages, each starts with its role."""
    if len(task.prompt) == 1:
        return truncate_middle(task.prompt[0].content, MAX_ANSWER)
    return truncate_middle("\n\n".join(f"{message.role}: {message.content}" for message in task.prompt), MAX_ANSWER)


def user_text(task: Task) -> str:
    """Returns the text of the user messages in the task's prompt."""
    return "\n".join(message.content for message in task.prompt if message.role == "user") or task.question


def answer_text(episode: Episode) -> str:
    """Returns the answer submitted in an episode; empty if no answer was submitted."""
    return truncate_middle(episode.answer or "", MAX_ANSWER)


def reference_text(task: Task, key: str) -> str | None:
    """Returns `task.data[key]` as text; None if the key is missing or its value is null."""
    if key not in task.data or task.data[key] is None:
        return None
    value = task.data[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def transcript_text(episode: Episode) -> str:
    """Returns the agent's messages, tool calls and tool results, in order.

    The main agent's messages come before those of its sub-agents.
    """
    lines = (line for number, trajectory in enumerate(episode.trajectories) for line in _trajectory_lines(trajectory, number))
    return truncate_middle("\n".join(lines) or "(the agent did nothing)", MAX_TRANSCRIPT)


def outputs_text(episode: Episode) -> str:
    """Returns one string with the path, size and text of the first `_MAX_FILES` output files of an episode, and the number of other files.

    The text of a file is decoded from its first `4 * _MAX_FILE` bytes, and shortened in the middle to about `_MAX_FILE` characters. The
    returned string is shortened in the middle to about `MAX_TRANSCRIPT` characters.
    """
    files = list(episode.outputs.items())[:_MAX_FILES]
    parts = [
        f"file {path}, {len(data)} bytes:\n{truncate_middle(data[: 4 * _MAX_FILE].decode(errors='replace'), _MAX_FILE)}"
        for path, data in files
    ]
    if len(episode.outputs) > len(files):
        parts.append(f"and {len(episode.outputs) - len(files)} more files")
    return truncate_middle("\n\n".join(parts) or "(the agent left no files)", MAX_TRANSCRIPT)


def _trajectory_lines(trajectory: Trajectory, number: int) -> Iterator[str]:
    if number:
        yield f"--- {trajectory.agent} ---"
        yield from (_render_message(message) for message in trajectory.prompt)
    for turn in trajectory.turns:
        yield _render_message(turn.message)
        for result in turn.tool_results:
            yield f"tool {result.name}{'' if result.ok else ' (failed)'}: {truncate_middle(result.output, _MAX_MESSAGE)}"


def _render_message(message: Message) -> str:
    calls = "".join(
        f"\n  calls {call.name}({truncate_middle(json.dumps(call.arguments, ensure_ascii=False), _MAX_MESSAGE)})"
        for call in message.tool_calls
    )
    return f"{message.role}: {truncate_middle(message.content, _MAX_MESSAGE)}{calls}"
