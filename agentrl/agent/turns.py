"""The turn loop: sample, call the tools it asks for, show what they gave, until the agent submits, answers or reaches a limit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.agent.contexts import current, go_on
from agentrl.agent.toolbox import Toolbox, load_tools
from agentrl.agent.tools import clip
from agentrl.agent.turncalls import call_all
from agentrl.protocols import LiveEpisode
from agentrl.records import ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoop:
    """An `agentrl.protocols.Agent`: one trajectory, the task's prompt and the task's tools."""

    chat: ChatFormat

    async def act(self, episode: LiveEpisode) -> str:
        task = episode.task
        tools = load_tools(task.tools, episode.agent_state.get("tools"), episode.tools)
        try:
            return await self._turns(episode, tools)
        finally:
            await tools.close(timeout_s=task.limits.tool_timeout_s)

    async def _turns(self, episode: LiveEpisode, tools: Toolbox) -> str:
        """The loop itself; returns the stop reason."""

        async def state() -> Mapping[str, Any]:
            kept = await tools.state(timeout_s=episode.task.limits.tool_timeout_s)
            return {"tools": kept} if kept else {}

        episode.stage = "chat"
        main, prompt, schemas = current(episode), episode.task.prompt, [tool.schema for tool in tools.values()]
        if not episode.turn_count:
            main.add_prompt(self.chat.opening(prompt, schemas))
        while not (limit := main.limit()):
            completion = await main.sample(stop_token_ids=self.chat.stop_token_ids)
            episode.stage = "chat"
            parsed = self.chat.parse(completion.token_ids, schemas)
            main.add_turn(completion, parsed.message)
            if completion.finish_reason != "stop":
                return "token_limit"
            if not parsed.message.tool_calls and not parsed.errors:
                episode.answer = None if "submit" in tools else parsed.answer
                return "answered"
            started = time.monotonic()
            results = await self._results(episode, tools, parsed)
            main.add_results(results, wall_s=time.monotonic() - started)
            if episode.answer is not None:
                return "submitted"
            if episode.sandbox_lost:
                return "tool_timeout"
            episode.stage = "chat"
            outputs = [result.output for result in results]
            main = go_on(self.chat, episode, main, parsed, outputs, prompt=prompt, schemas=schemas)
            await episode.boundary(state)
        return limit

    async def _results(self, episode: LiveEpisode, tools: Toolbox, parsed: ParsedCompletion) -> tuple[ToolResult, ...]:
        """What the calls of one turn gave; malformed ones, which come last, are answered with their error."""
        results = [*await call_all(episode, tools, parsed.message.tool_calls)]
        if episode.answer is not None or episode.sandbox_lost:
            return tuple(results)
        for error in parsed.errors:
            text = clip(f"error: {error}", episode.task.limits.tool_output_chars)
            results.append(ToolResult(name="", output=episode.shown(text), ok=False))
        return tuple(results)
