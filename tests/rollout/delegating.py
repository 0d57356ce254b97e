"""An agent with sub-agents, built on the public protocol: its tool `ask` opens a trajectory with its own context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Message, Parent, ToolCall, ToolResult

ASK = {
    "type": "function",
    "function": {
        "name": "ask",
        "description": "Ask a helper.",
        "parameters": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class Delegating:
    """Answers in the main trajectory; a sub-agent answers each `ask` and may ask others. Can continue within a sub-agent."""

    chat: ChatFormat

    async def act(self, episode: LiveEpisode) -> str:
        main = episode.trajectories[0]
        if not main.turns:
            main.add_prompt(self.chat.opening(episode.task.prompt, [ASK]))
        stop_reason, episode.answer = await self._converse(episode, main)
        return stop_reason

    async def _converse(self, episode: LiveEpisode, trajectory: LiveTrajectory) -> tuple[str, str | None]:
        """Runs turns until a message without a call. Returns the stop reason and that message."""
        while True:
            unanswered = trajectory.turns and trajectory.turns[-1].message.tool_calls and not trajectory.turns[-1].tool_results
            if not unanswered:  # the episode continues within a sub-agent
                if limit := trajectory.limit():
                    return limit, None
                completion = await trajectory.sample(stop_token_ids=self.chat.stop_token_ids)
                trajectory.add_turn(completion, self.chat.parse(completion.token_ids).message)
            message = trajectory.turns[-1].message
            if not message.tool_calls:
                return "answered", message.content
            results = [await self._helped(episode, trajectory, number, call) for number, call in enumerate(message.tool_calls)]
            trajectory.add_results(results, wall_s=0.0)
            trajectory.add_prompt(self.chat.tool_delta([result.output for result in results]))
            await episode.boundary(self._nothing)

    async def _helped(self, episode: LiveEpisode, trajectory: LiveTrajectory, number: int, call: ToolCall) -> ToolResult:
        parent = Parent(trajectory=trajectory.index, turn=len(trajectory.turns) - 1, call=number)
        prompt = (Message(role="user", content=str(call.arguments.get("question"))),)
        opened = [other for other in episode.trajectories if other.parent == parent]
        helper = opened[0] if opened else episode.open("helper", parent=parent, prompt=prompt)
        if not opened:
            helper.add_prompt(self.chat.opening(prompt, [ASK]))
        if helper.stop_reason:  # it ended before the state was captured
            return ToolResult(name=call.name, output=helper.turns[-1].message.content, ok=True)
        stop_reason, answer = await self._converse(episode, helper)
        helper.end(stop_reason)
        return ToolResult(name=call.name, output=episode.clip_output(answer or stop_reason), ok=answer is not None)

    async def _nothing(self) -> Mapping[str, Any]:
        return {}
