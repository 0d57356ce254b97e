"""The turns of one agent in one context, and where it started."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.chat import Message
from agentrl.records.fields import Record
from agentrl.records.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent(Record):
    """The turn that a trajectory comes from, in another trajectory of its episode."""

    trajectory: int  # index in Episode.trajectories, smaller than its child's
    turn: int  # index of the turn
    call: int | None = None  # index of the tool call that started a sub-agent; None: the same agent goes on with a context of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Record):
    """One line of turns by one agent, in one context. Its place in `Episode.trajectories` is its id."""

    agent: str
    turns: tuple[Turn, ...]
    parent: Parent | None = None  # None: it began with the episode
    prompt: tuple[Message, ...] = ()  # what its agent was told at the start; empty: the task's prompt
    stop_reason: str = (
        "submitted"  # submitted | answered | turn_limit | token_limit | wall_limit | tool_timeout | failed | compacted, summarized,
        # rejected or restarted, around a restart of the context; empty: it goes on
    )
    inherited: tuple[str, ...] = ()  # ids of the episodes that sampled its first turns; the turns after them are its own

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if len(self.inherited) > len(self.turns):
            raise ValueError(f"Trajectory: {len(self.inherited)} turns inherited of {len(self.turns)}")

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that were sampled here, not in the episode that this one branched from."""
        return self.turns[len(self.inherited) :]


def check_tree(trajectories: tuple[Trajectory, ...]) -> None:
    """Raises `ValueError` unless every parent is a turn, and a call of it, of an earlier trajectory."""
    for index, child in enumerate(trajectories):
        parent = child.parent
        if parent is None:
            continue
        if not 0 <= parent.trajectory < index or not 0 <= parent.turn < len(trajectories[parent.trajectory].turns):
            raise ValueError(f"trajectory {index}: its parent, turn {parent.turn} of trajectory {parent.trajectory}, is not there")
        calls = trajectories[parent.trajectory].turns[parent.turn].message.tool_calls
        if parent.call is not None and not 0 <= parent.call < len(calls):
            raise ValueError(f"trajectory {index}: it comes from call {parent.call} of a turn with {len(calls)} calls")
