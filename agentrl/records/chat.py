"""Chat messages, tool calls and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.records.fields import JsonObject, Record, Text

USER = "user"
"""`ToolResult.name` of a message from an environment or a user after a turn without tool calls. At most one such result follows a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall(Record):
    """A tool call that the policy wrote, such as `ToolCall(name="python", arguments={"code": "print(1)"})`."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Record):
    """One chat message, such as `Message(role="user", content="How many rows?")`."""

    role: str
    content: Text
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult(Record):
    """The output that the agent was shown for one tool call. `ok` means that the program succeeded; it does not say whether the sandbox
    works.

    A result with the name `USER` responds to a turn without calls and is shown as a user message.
    """

    name: str
    output: Text
    ok: bool
    wall_s: float = 0.0
    reward: float | None = None  # reward for this action, if an environment returned one
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward


def user_message(message: Message, results: Sequence[ToolResult]) -> str | None:
    """Returns the user message in `results` that responds to the turn `message`; None if `results` is empty or belongs to tool calls."""
    if message.tool_calls or not results or results[0].name != USER:  # the policy can write a call with this name
        return None
    return results[0].output
