"""What one episode may spend. Part of a `Task` (`agentrl.records`)."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.fields import Record

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

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        for name in ("turns", "turn_tokens", "episode_tokens", "tool_timeout_s", "tool_output_chars", "wall_s", "episode_output_chars"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Limits.{name} must be positive, got {value}")

    @property
    def all_output_chars(self) -> int:
        """Characters that the calls of one episode may show together."""
        return OUTPUT_CALLS * self.tool_output_chars if self.episode_output_chars is None else self.episode_output_chars
