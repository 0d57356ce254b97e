"""The turns of one agent in one context, and the turn at which the trajectory started."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.records.chat import Message
from agentrl.records.fields import Record
from agentrl.records.turn import Turn


class HasTurns(Protocol):
    """A trajectory, finished or in progress."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns of the trajectory so far."""
        ...


CONTINUED = "continued"
"""The stop reason of a trajectory whose episode continues in a new context that starts with the environment's last observation."""
TRUNCATED = "truncated"
"""The stop reason of an episode that its environment cut off. This is not a failure, and a critic estimates the value of further steps."""

TurnKey = tuple[str, int, int, bytes, bytes]
"""Identifies a sampled turn within a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent(Record):
    """The turn, in another trajectory of the same episode, at which a trajectory started."""

    trajectory: int  # index in Episode.trajectories, smaller than the index of the child
    turn: int  # index of the turn
    call: int | None = None  # index of the tool call that started a sub-agent; None if the same agent continues in a new context


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Record):
    """The turns of one agent in one context. The index in `Episode.trajectories` identifies a trajectory."""

    agent: str
    turns: tuple[Turn, ...]
    parent: Parent | None = None  # None for the first trajectory of an episode
    prompt: tuple[Message, ...] = ()  # the agent's prompt; empty means the task's prompt
    stop_reason: str = (
        "submitted"  # submitted | answered | turn_limit | token_limit | wall_limit | tool_timeout | failed | compacted, summarized,
        # rejected, restarted or continued, around a new context; terminated or truncated by the environment; empty while it continues
    )
    last_state: tuple[int, ...] = ()  # with `TRUNCATED`: tokens from which the next turn would have been sampled
    policy: str = ""  # the player of the turns if they are not trained: "version 3", "mine:bluff"; such turns have no completion tokens
    inherited: tuple[str, ...] = ()  # ids of the episodes that sampled the first turns, one id per turn

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if len(self.inherited) > len(self.turns):
            raise ValueError(f"Trajectory: {len(self.inherited)} inherited turns, but only {len(self.turns)} turns")

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that this episode sampled, excluding turns that it inherited from the episode that it branched from."""
        return self.turns[len(self.inherited) :]


def turn_key(episode_id: str, index: int, trajectory: Trajectory, number: int) -> TurnKey:
    """Returns the key of turn `number` in an episode's trajectory `index`: the episode that sampled the turn, and the turn's tokens.

    The tokens are needed because an episode with the same id may be started twice. The tokens alone do not suffice, because two attempts by
    a confident policy may sample the same tokens. Tokens and logprobs are compared as bytes, because a third party could choose numbers
    with equal hashes, and because NaN does not equal itself.
    """
    inherited, turn = trajectory.inherited, trajectory.turns[number]
    sampled_by = inherited[number] if number < len(inherited) else episode_id
    return sampled_by, index, number, array("q", turn.completion_ids).tobytes(), array("d", turn.logprobs).tobytes()


def check_tree(trajectories: tuple[Trajectory, ...]) -> None:
    """Raises `ValueError` unless every parent is an existing turn (and call) of an earlier trajectory."""
    for index, child in enumerate(trajectories):
        check_parent(index, child.parent, trajectories)


def check_parent(index: int, parent: Parent | None, trajectories: Sequence[HasTurns]) -> None:
    """Raises `ValueError` unless the parent of trajectory `index` is an existing turn (and call) of an earlier trajectory."""
    if parent is None:
        return
    if not 0 <= parent.trajectory < index or not 0 <= parent.turn < len(trajectories[parent.trajectory].turns):
        raise ValueError(f"trajectory {index}: its parent, turn {parent.turn} of trajectory {parent.trajectory}, does not exist")
    calls = trajectories[parent.trajectory].turns[parent.turn].message.tool_calls
    if parent.call is not None and not 0 <= parent.call < len(calls):
        raise ValueError(f"trajectory {index}: its parent, call {parent.call} of a turn with {len(calls)} calls, does not exist")
