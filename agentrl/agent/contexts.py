"""Where a turn's results go: into the agent's context as a delta, or into a context of its own where the template writes the old one anew.

A restart is on record: the line of turns ends as `restarted`, and a trajectory with it as parent goes on. Every token that was sampled
stays in the line where it was sampled, and is trained there.
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
"""The stop reason of a line of turns whose conversation goes on in another."""


def current_trajectory(episode: LiveEpisode) -> LiveTrajectory:
    """The line of turns that the main agent goes on with, of a state too: no sub-agent is at work there."""
    return next(line for line in reversed(episode.trajectories) if not line.stop_reason)


def continue_context(
    chat: ChatFormat,
    episode: LiveEpisode,
    line: LiveTrajectory,
    after: ParsedCompletion,
    outputs: Sequence[str],
    *,
    prompt: Sequence[Message],
    schemas: Sequence[Mapping[str, Any]],
    agent: str = "main",
) -> LiveTrajectory:
    """Shows the agent what its last turn's calls gave, and returns the line that its next turn belongs to.

    Args:
        after: the last turn of `line`, whose results are recorded.
        outputs: what is shown of them.
        prompt: what the agent was told at the start.
    """
    if chat.exact:
        line.add_prompt(chat.tool_delta(outputs, after))
        return line
    if line.limit() == "turn_limit":  # no turn follows, and none should wait in a line of its own
        return line
    said = _said(episode, line)
    try:
        whole = chat.render_conversation(prompt, said, schemas)
    except UserError:  # some templates take no result without a call, and a malformed call is none
        whole = chat.render_conversation(prompt, _answered(said), schemas)
    context = [token for turn in line.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
    if list(whole[: len(context)]) == context:  # this time the template only adds
        line.add_prompt(whole[len(context) :])
        return line
    line.end(RESTARTED)
    new = episode.open(agent, parent=Parent(trajectory=line.index, turn=len(line.turns) - 1))
    new.add_prompt(whole)
    return new


def _said(episode: LiveEpisode, line: LiveTrajectory) -> list[Message]:
    """What the agent and its tools said since the prompt, in this line and in those that it was restarted from."""
    lines = [line]
    while (parent := lines[-1].parent) is not None and episode.trajectories[parent.trajectory].stop_reason == RESTARTED:
        lines.append(episode.trajectories[parent.trajectory])
    said: list[Message] = []
    for one in reversed(lines):
        for turn in one.turns:
            said += (turn.message, *(Message(role="tool", content=result.output) for result in turn.tool_results))
    return said


def _answered(said: Sequence[Message]) -> list[Message]:
    """The same, where the user says what no call was made for."""
    calls, told = 0, []
    for message in said:
        if message.role == "tool":
            told.append(message if calls > 0 else replace(message, role="user"))
            calls -= 1
        else:
            calls = len(message.tool_calls)
            told.append(message)
    return told
