"""A few episodes of each step, for trackers that show episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.base.user_code import printable
from agentrl.records import Group, Message, ScoredEpisode, Trajectory

MAX_TEXT = 8192
"""Maximum number of characters in one message of a sample."""
MAX_MESSAGES = 256
"""Maximum number of messages in a sample, including a note in place of the omitted ones. The first messages and the last are kept."""
Said = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An episode as text, for trackers that show episodes."""

    episode: str
    task: str
    kind: str
    score: float | None
    reason: str  # why the episode has no score
    stop_reason: str
    tokens: int  # number of sampled tokens
    seconds: float
    messages: tuple[Said, ...]  # as in the chat API: role, content, tool_calls, tool_call_id

    @property
    def facts(self) -> dict[str, Any]:
        """A mapping from field name to value, without the messages."""
        names = ("episode", "task", "kind", "score", "reason", "stop_reason", "tokens", "seconds")
        return {name: getattr(self, name) for name in names}

    def text(self) -> str:
        """Returns the messages as one text, in which each message follows its role."""
        lines = []
        for message in self.messages:
            calls = [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", ())]
            lines += [f"[{message['role']}]", *([message["content"]] if message["content"] else []), *calls]
        return "\n".join(lines)


class Samples:
    """Collects the first attempt of the first `most` groups that finish after each step, so that few are sent to a slow service."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._samples: list[Sample] = []

    def add(self, group: Group) -> None:
        """Adds the first attempt of a group if fewer than `most` samples are stored."""
        if len(self._samples) < self._most and group.episodes:
            self._samples.append(sample_of(group, group.episodes[0]))

    def take(self) -> list[Sample]:
        """Returns and removes the samples that were added since the last call."""
        taken, self._samples = self._samples, []
        return taken


def sample_of(group: Group, scored: ScoredEpisode) -> Sample:
    """Returns the first trajectory of an episode as text, without control characters and with long messages clipped."""
    episode = scored.episode
    messages = [message for trajectory in episode.trajectories[:1] for message in _messages(trajectory.prompt or group.prompt, trajectory)]
    if len(messages) > MAX_MESSAGES:
        gap = {"role": "system", "content": f"[{len(messages) - MAX_MESSAGES + 1} messages omitted]"}
        messages = [*messages[: MAX_MESSAGES - 2], gap, messages[-1]]
    return Sample(
        episode=_short(episode.id),
        task=_short(group.task_id),
        kind=_short(group.kind),
        score=scored.score.value,
        reason=_short(scored.score.reason),
        stop_reason=_short(episode.stop_reason),
        tokens=episode.completion_tokens,
        seconds=episode.wall_s,
        messages=tuple(messages),
    )


def _messages(prompt: tuple[Message, ...], line: Trajectory) -> list[Said]:
    rendered = [_said(message, "") for message in prompt]
    for number, turn in enumerate(line.turns):
        rendered.append(_said(turn.message, f"{number}-"))
        for call, result in enumerate(turn.tool_results):
            rendered.append(
                {"role": "tool", "tool_call_id": f"{number}-{call}", "name": _short(result.name), "content": _text(result.output)}
            )
    return rendered


def _said(message: Message, prefix: str) -> Said:
    rendered: Said = {"role": _short(message.role), "content": _text(message.content)}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": f"{prefix}{number}",
                "type": "function",
                "function": {"name": _short(call.name), "arguments": _arguments(call.arguments)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return rendered


def _arguments(arguments: Mapping[str, Any]) -> str:
    return _text(json.dumps(dict(arguments), ensure_ascii=False))


def _short(text: str) -> str:
    return printable(text, 200)


def _text(text: str) -> str:
    return printable(text[:MAX_TEXT].expandtabs(4), 2 * MAX_TEXT)
