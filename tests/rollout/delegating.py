"""An agent with a sub-agent, made with the public protocol alone: its tool `ask` opens a trajectory with a context of its own."""

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
    """Answers in the main trajectory; each `ask` is answered by a helper, which may ask further. Can go on in the midst of a helper."""

    chat: ChatFormat

    async def act(self, episode: LiveEpisode) -> str:
        main = episode.trajectories[0]
        if not main.turns:
            main.add_prompt(self.chat.opening(episode.task.prompt, [ASK]))
        stop_reason, episode.answer = await self._converse(episode, main)
        return stop_reason

    async def _converse(self, episode: LiveEpisode, line: LiveTrajectory) -> tuple[str, str | None]:
        """Turns until a message without a call: the stop reason, and that message."""
        while True:
            unanswered = line.turns and line.turns[-1].message.tool_calls and not line.turns[-1].tool_results
            if not unanswered:  # an episode that goes on from a helper's turn is in the midst of one
                if limit := line.limit():
                    return limit, None
                completion = await line.sample(stop_token_ids=self.chat.stop_token_ids)
                line.add_turn(completion, self.chat.parse(completion.token_ids).message)
            message = line.turns[-1].message
            if not message.tool_calls:
                return "answered", message.content
            results = [await self._helped(episode, line, number, call) for number, call in enumerate(message.tool_calls)]
            line.add_results(results, wall_s=0.0)
            line.add_prompt(self.chat.tool_delta([result.output for result in results]))
            await episode.boundary(self._nothing)

    async def _helped(self, episode: LiveEpisode, line: LiveTrajectory, number: int, call: ToolCall) -> ToolResult:
        parent = Parent(trajectory=line.index, turn=len(line.turns) - 1, call=number)
        asked = (Message(role="user", content=str(call.arguments.get("question"))),)
        begun = [one for one in episode.trajectories if one.parent == parent]
        helper = begun[0] if begun else episode.open("helper", parent=parent, prompt=asked)
        if not begun:
            helper.add_prompt(self.chat.opening(asked, [ASK]))
        if helper.stop_reason:  # it had ended when the state was captured
            return ToolResult(name=call.name, output=helper.turns[-1].message.content, ok=True)
        stop_reason, answer = await self._converse(episode, helper)
        helper.end(stop_reason)
        return ToolResult(name=call.name, output=episode.clip_output(answer or stop_reason), ok=answer is not None)

    async def _nothing(self) -> Mapping[str, Any]:
        return {}
