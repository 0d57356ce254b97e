"""Extends an agent's context with the results of a turn: by a delta, or in a new context if the template rewrites the old one.

A restart is recorded: the trajectory ends as `restarted`, and another trajectory with it as parent continues. Every sampled token stays in
the trajectory where it was sampled, and is trained there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.errors import UserError
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Message, Parent

RESTARTED = "restarted"
"""The stop reason of a trajectory whose conversation continues in another."""


def current_trajectory(episode: LiveEpisode) -> LiveTrajectory:
    """Returns the trajectory in which the main agent continues, also in a resumed episode: no sub-agent is running there."""
    return next(trajectory for trajectory in reversed(episode.trajectories) if not trajectory.stop_reason)


def continue_context(
    chat: ChatFormat,
    episode: LiveEpisode,
    trajectory: LiveTrajectory,
    after: ParsedCompletion,
    outputs: Sequence[str],
    *,
    prompt: Sequence[Message],
    schemas: Sequence[Mapping[str, Any]],
    agent: str = "main",
) -> LiveTrajectory:
    """Adds tool outputs to the agent's context, and returns the trajectory of its next turn.

    Args:
        after: the last turn of `trajectory`, whose results are recorded.
        prompt: the agent's first prompt.
    """
    if chat.exact:
        trajectory.add_prompt(chat.tool_delta(outputs, after))
        return trajectory
    if trajectory.limit() == "turn_limit":  # no turn follows
        return trajectory
    said = _since_prompt(episode, trajectory)
    try:
        full = chat.render_conversation(prompt, said, schemas)
    except UserError:  # some templates reject a result without a call, such as that of a malformed call
        full = chat.render_conversation(prompt, _with_user_results(said), schemas)
    context = [token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
    if list(full[: len(context)]) == context:  # this time the template only appends
        trajectory.add_prompt(full[len(context) :])
        return trajectory
    trajectory.end(RESTARTED)
    restarted = episode.open(agent, parent=Parent(trajectory=trajectory.index, turn=len(trajectory.turns) - 1))
    restarted.add_prompt(full)
    return restarted


def _since_prompt(episode: LiveEpisode, trajectory: LiveTrajectory) -> list[Message]:
    """The messages of the agent and its tools since the prompt, in this trajectory and those that it was restarted from."""
    chain = [trajectory]
    while (parent := chain[-1].parent) is not None and episode.trajectories[parent.trajectory].stop_reason == RESTARTED:
        chain.append(episode.trajectories[parent.trajectory])
    messages: list[Message] = []
    for turn in (turn for part in reversed(chain) for turn in part.turns):
        messages += (turn.message, *(Message(role="tool", content=result.output) for result in turn.tool_results))
    return messages


def _with_user_results(messages: Sequence[Message]) -> list[Message]:
    """The messages, with results that belong to no call as user messages."""
    calls, changed = 0, []
    for message in messages:
        is_result = message.role == "tool"
        changed.append(replace(message, role="user") if is_result and calls <= 0 else message)
        calls = calls - 1 if is_result else len(message.tool_calls)
    return changed
