"""The limits of an episode, and the fields of a task that are part of its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agentrl.records.fields import Record

OUTPUT_CALLS = 20
"""Number of tool calls with maximum output that fit into an episode if `Limits.episode_output_chars` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """The limits of one episode, such as `Limits(turns=4, tool_timeout_s=5.0)`."""

    turns: int = 4  # in all trajectories
    turn_tokens: int = 256  # completion tokens in one turn
    episode_tokens: int = 1024  # prompt and completion tokens in one trajectory
    tool_timeout_s: float = 10.0
    tool_output_chars: int = 2000  # per call; longer output is shortened in the middle
    wall_s: float = 120.0  # duration of the episode in seconds, including waiting
    episode_output_chars: int | None = None  # total output of all calls; None means OUTPUT_CALLS * tool_output_chars
    tool_calls: int | None = None  # in all trajectories, excluding `submit`; None means no limit
    all_tokens: int | None = None  # prompt and completion tokens in all trajectories; None means no limit
    thinking_tokens: int | None = None  # per turn; at the limit, the thinking block is closed; None means no limit

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Limits.{name} must be positive, got {value}")
        if self.thinking_tokens is not None and self.thinking_tokens >= self.turn_tokens:
            raise ValueError(
                f"Limits.thinking_tokens={self.thinking_tokens} leaves no tokens for an answer: it must be less than"
                f" turn_tokens={self.turn_tokens}"
            )

    @property
    def all_output_chars(self) -> int:
        """Maximum total output of an episode's tool calls, in characters."""
        return OUTPUT_CALLS * self.tool_output_chars if self.episode_output_chars is None else self.episode_output_chars


OPTIONAL_FIELDS = ("tool_calls", "all_tokens", "thinking_tokens", "environment")
"""Fields of a task and its limits that are part of the task's key only if they are set."""


def key_fields(record: Any) -> dict[str, object]:
    """Returns the fields of a task, or of a record in a task, that determine the task's key. Raises `TypeError` for any other value.

    `dataclasses.asdict` would copy all fields first and take several times as long.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    ignored = {name for name in OPTIONAL_FIELDS if values.get(name) is None} | {"pass_threshold"}  # the threshold does not affect attempts
    return {name: value for name, value in values.items() if name not in ignored}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How to recognize and close the thinking block of a model, in token ids. `Limits.thinking_tokens` needs it."""

    end: tuple[int, ...]  # token ids that close the block
    unfinished: Callable[[Sequence[int]], bool]  # whether the given completion ids end inside the block
