"""What one episode may spend. Part of a `Task` (`agentrl.records`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agentrl.records.fields import Record

OUTPUT_CALLS = 20
"""How many tool calls an episode may show in full when `Limits.episode_output_chars` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """What one episode may spend: `Limits(turns=4, tool_timeout_s=5.0)`."""

    turns: int = 4  # of all trajectories together
    turn_tokens: int = 256  # completion tokens in one turn
    episode_tokens: int = 1024  # prompt + completion tokens of one trajectory
    tool_timeout_s: float = 10.0
    tool_output_chars: int = 2000  # of one call; head and tail are kept, the cut is marked
    wall_s: float = 120.0  # whole episode, waiting included
    episode_output_chars: int | None = None  # of all calls together; None: OUTPUT_CALLS times tool_output_chars
    tool_calls: int | None = None  # of all trajectories together, but for `submit`; None: as many as the turns make
    all_tokens: int | None = None  # prompt + completion tokens of all trajectories together: what the episode costs; None: no bound
    thinking_tokens: int | None = None  # of turn_tokens, after which thinking is ended; None: a turn may be thought alone

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Limits.{name} must be positive, got {value}")
        if self.thinking_tokens is not None and self.thinking_tokens >= self.turn_tokens:
            raise ValueError(
                f"Limits.thinking_tokens={self.thinking_tokens} leaves no room for an answer: it must be less than"
                f" turn_tokens={self.turn_tokens}"
            )

    @property
    def all_output_chars(self) -> int:
        """Characters that the calls of one episode may show together."""
        return OUTPUT_CALLS * self.tool_output_chars if self.episode_output_chars is None else self.episode_output_chars


OPTIONAL_LIMITS = ("tool_calls", "all_tokens", "thinking_tokens")
"""Limits that are no part of a task's key where they are not set, so that keys stay what they were before there were such limits."""


def key_fields(record: Any) -> dict[str, object]:
    """The fields of a task, or of a record within it, that its key is hashed from, for JSON.

    `dataclasses.asdict` copies all of them first, which takes several times as long. Raises `TypeError` where it is no record.
    """
    named = {one.name: getattr(record, one.name) for one in fields(record)}
    if isinstance(record, Limits):
        return {name: value for name, value in named.items() if value is not None or name not in OPTIONAL_LIMITS}
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How the thinking of a model is told and ended, in the tokens of its chat: what `Limits.thinking_tokens` needs."""

    end: tuple[int, ...]  # ids that end it
    unfinished: Callable[[Sequence[int]], bool]  # whether a completion that is cut after these ids is cut in its thinking
