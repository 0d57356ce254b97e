"""The turn loop: sample, call the tools it asks for, show what they gave, until the agent submits, answers or reaches a limit.

Sub-agents go through the same loop, each in a trajectory of its own (`agentrl.agent.delegation`), and an agent whose context is nearly
full goes on in a new one (`agentrl.agent.compaction`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agentrl.agent import delegation
from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.agent.compaction import Compactor
from agentrl.agent.contexts import continue_context, current_trajectory
from agentrl.agent.handing import hand_back
from agentrl.agent.policytext import read_turn, reading_policy_text
from agentrl.agent.toolbox import Toolbox, load_tools
from agentrl.agent.tools import ToolOutcome, clip
from agentrl.agent.turncalls import budget_error, count_calls, run_calls
from agentrl.agent.wording import main_prompt
from agentrl.config.rollout import CompactionConfig, DelegationConfig
from agentrl.errors import PolicyFault
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import CUT, Message, Parent, ToolCall, ToolResult

_SHOWN = "shown to it again with its tool results"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoop:
    """An `agentrl.protocols.Agent`: the task's prompt and the task's tools.

    With `delegation` there is also a tool that starts sub-agents; with `compaction` a context that is nearly full is summed up.
    """

    chat: ChatFormat
    delegation: DelegationConfig | None = None
    compaction: CompactionConfig | None = None
    instructions: str | None = None  # in place of the system messages of tasks

    async def act(self, episode: LiveEpisode) -> str:
        task = episode.task
        tools = load_tools(task.tools, episode.agent_state.get("tools"), episode.tools, episode.memory, task)
        try:
            line = current_trajectory(episode)
            prompt = main_prompt(line, task, self.instructions)
            main = AgentRun(self, episode, line, prompt=prompt, tools=tools, spent=count_calls(episode))
            ended = await main.run()
            episode.answer = ended.answer
            return ended.reason
        finally:
            await tools.close(timeout_s=task.limits.tool_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Why an agent stopped, and what it handed in."""

    reason: str
    answer: str | None = None


class AgentRun:
    """One agent at work in an episode: the main one, or a sub-agent, which is `depth` steps below it.

    Args:
        line: the trajectory that it speaks in.
        prompt: what it is told.
        spent: calls so far of all agents of the episode, by the tool's name: they count in the same one.

    Raises `TaskError` where a tool of the task has the name of the one that starts sub-agents.
    """

    def __init__(
        self,
        loop: TurnLoop,
        episode: LiveEpisode,
        line: LiveTrajectory,
        *,
        prompt: Sequence[Message],
        tools: Toolbox,
        spent: Counter[str],
        depth: int = 0,
    ) -> None:
        self._loop = loop
        self._episode = episode
        self.line = line
        self._prompt = prompt
        self._tools = tools
        self._spent = spent
        self._depth = depth
        self._turns, self._sampled = 0, 0  # in this run of the episode; only sub-agents are held to them, and none is resumed
        self._compactor = None if loop.compaction is None else Compactor(chat=loop.chat, config=loop.compaction)
        self._offers = (
            [delegation.delegate_schema(loop.delegation)] if loop.delegation is not None and depth < loop.delegation.depth else []
        )
        self._delegates = bool(self._offers)
        if loop.delegation is not None:
            delegation.check_name(episode.task, tools)

    async def run(self) -> Ended:
        """Turns until it is done."""
        episode, chat = self._episode, self._loop.chat
        episode.stage = "chat"
        schemas = self._schemas()
        if not self.line.tokens:
            self.line.add_prompt(chat.opening(self._prompt, schemas))
        while not (limit := self._limit()):
            completion = await self.line.sample(stop_token_ids=chat.stop_token_ids, max_tokens=self._allowance(), thinking=chat.thinking)
            episode.stage = "chat"
            parsed = read_turn(chat, self.line, completion, schemas)
            self._turns, self._sampled = self._turns + 1, self._sampled + len(completion.token_ids)
            if completion.finish_reason != "stop":
                return Ended(reason="wall_limit" if completion.finish_reason == CUT else "token_limit")
            if not parsed.message.tool_calls and not parsed.errors:
                return Ended(reason="answered", answer=None if "submit" in self._tools else parsed.answer)
            started = time.monotonic()
            results, answer = await self._results(parsed)
            wall_s = time.monotonic() - started
            if answer is not None or episode.sandbox_lost:
                self.line.add_results(results, wall_s=wall_s)
                return Ended(reason="tool_timeout" if answer is None else "submitted", answer=answer)
            episode.stage = "chat"
            if limit := await self._show(parsed, results, wall_s=wall_s):
                return Ended(reason=limit)
            if self._depth == 0:  # and no sub-agent runs: those of this turn have ended
                await episode.boundary(self._state)
        return Ended(reason=limit)

    async def _show(self, parsed: ParsedCompletion, results: Sequence[ToolResult], *, wall_s: float) -> str:
        """Brings what the calls gave into the context, or into a summary that the agent goes on from; the limit that forbids it, if any."""
        line, room, chat = self.line, self._episode.room, self._loop.chat
        outputs = [result.output for result in results]
        if not chat.exact:
            line.add_results(results, wall_s=wall_s)
            with reading_policy_text(_SHOWN):
                self.line = continue_context(chat, self._episode, line, parsed, outputs, prompt=self._prompt, schemas=self._schemas())
            return ""
        try:
            with reading_policy_text(_SHOWN):
                delta = chat.tool_delta(outputs, parsed)
        except PolicyFault:
            line.add_results(results, wall_s=wall_s)
            raise
        if self._compactor is None or not self._compactor.due(line.tokens + len(delta), room):
            line.add_results(results, wall_s=wall_s)
            line.add_prompt(delta)
            return ""
        with reading_policy_text(_SHOWN):
            results, delta = self._compactor.asking(parsed, results, used=line.tokens, room=room)
        line.add_results(results, wall_s=wall_s)
        if line.tokens + len(delta) >= room:
            return "token_limit"
        return await self._compacted(self._compactor, delta)

    async def _compacted(self, compactor: Compactor, delta: Sequence[int]) -> str:
        """Goes on from a summary in a new trajectory; the limit that was reached before one was accepted, if any."""
        for _ in range(compactor.config.attempts):
            if limit := self._limit():
                return limit
            tried = await compactor.attempt(self._episode, self.line, delta, self._allowance())
            if tried.limit:
                return tried.limit
            self._turns, self._sampled = self._turns + 1, self._sampled + tried.tokens
            if tried.summary is not None:
                prompt = compactor.prompt(self._prompt, tried.summary)
                self.line.end("compacted")
                self.line = self._episode.open(self.line.agent, parent=Parent(trajectory=tried.line.index, turn=0), prompt=prompt)
                self.line.add_prompt(self._loop.chat.opening(prompt, self._schemas()))
                return ""
        return "token_limit"

    async def _state(self) -> Mapping[str, Any]:
        kept = await self._tools.state(timeout_s=self._episode.task.limits.tool_timeout_s)
        return {"tools": kept} if kept else {}

    def _schemas(self) -> list[Mapping[str, Any]]:
        return [*(tool.schema for tool in self._tools.values()), *self._offers]

    def _limit(self) -> str:
        """The limit that is reached, of the episode or of this sub-agent."""
        config = self._loop.delegation
        if self._episode.sandbox_lost:  # by another agent, meanwhile
            return "tool_timeout"
        if limit := self.line.limit():
            return limit
        if self._depth == 0 or config is None:
            return ""
        if self._turns >= config.turns:
            return "turn_limit"
        return "token_limit" if self._allowance() == 0 else ""

    def _allowance(self) -> int | None:
        """Tokens that a sub-agent may still sample; None: as many as fit."""
        config = self._loop.delegation
        if self._depth == 0 or config is None or config.tokens is None:
            return None
        return max(0, config.tokens - self._sampled)

    async def _results(self, parsed: ParsedCompletion) -> tuple[tuple[ToolResult, ...], str | None]:
        """Makes the calls of one turn, up to a submitted answer or a lost sandbox: what they gave, and the answer.

        They are made in order, but sub-agents that are called one after the other run at the same time, as do tools that say they may.
        Malformed calls are answered with their error.
        """
        results: list[ToolResult] = []
        calls = parsed.message.tool_calls
        also = (delegation.NAME,) if self._delegates else ()
        for starts, numbers in self._stretches(calls):
            if starts:
                results += await self._delegated(calls, numbers)
                answer = None
            else:
                some = [calls[number] for number in numbers]
                made, answer = await run_calls(self._episode, self._tools, some, spent=self._spent, also=also)
                results += made
            if answer is not None or self._episode.sandbox_lost:
                return tuple(results), answer
        for error in parsed.errors:
            self._spent[""] += 1
            text = clip(f"error: {error}", self._episode.task.limits.tool_output_chars)
            results.append(ToolResult(name="", output=self._episode.clip_output(text), ok=False))
        return tuple(results), None

    def _stretches(self, calls: Sequence[ToolCall]) -> Iterator[tuple[bool, list[int]]]:
        """The numbers of neighbouring calls that all start sub-agents, or all do not."""
        for starts, found in groupby(enumerate(calls), key=lambda one: self._delegates and one[1].name == delegation.NAME):
            yield starts, [number for number, _ in found]

    async def _delegated(self, calls: Sequence[ToolCall], numbers: Sequence[int]) -> list[ToolResult]:
        """What sub-agents answer that run at the same time, in the order of their calls."""
        assert self._loop.delegation is not None, "only then calls start sub-agents"
        began, turn = time.monotonic(), len(self.line.turns) - 1
        desk = delegation.SubAgents(self._episode, self._loop.delegation, defang=self._loop.chat.escape_text)
        refused: list[str] = []
        for _ in numbers:
            self._spent[delegation.NAME] += 1
            over = budget_error(self._episode, self._spent, delegation.NAME)
            refused.append(over.output if over is not None else "")
        begun = [calls[number] for number, why in zip(numbers, refused, strict=True) if not why]
        copy, uncopied = await self._copied(desk, begun)
        asked = [
            refused[place] or uncopied or desk.open(calls[number], number, line=self.line, turn=turn, place=place)
            for place, number in enumerate(numbers)
        ]
        async with asyncio.TaskGroup() as running:
            jobs = [None if isinstance(one, str) else running.create_task(self._worked(one, copy)) for one in asked]
        results = []
        for one, job in zip(asked, jobs, strict=True):
            outcome = job.result() if job is not None else ToolOutcome(output=str(one), ok=False)
            output = self._episode.clip_output(clip(outcome.output, self._episode.task.limits.tool_output_chars))
            results.append(ToolResult(name=delegation.NAME, output=output, ok=outcome.ok, wall_s=time.monotonic() - began))
        return results

    async def _worked(self, opened: delegation.Opened, copy: bytes | None) -> ToolOutcome:
        """Runs one sub-agent to its end, in this agent's sandbox or in one that begins with a copy of its files."""
        episode, config = self._episode, self._loop.delegation
        assert config is not None, "it has been started"
        if config.sandbox == "shared":
            ended = await self._spoken(opened, episode)
            return delegation.reported(ended.answer, ended.reason)
        async with episode.sub_episode(copy) as own:
            ended = await self._spoken(opened, own)
            files = await hand_back(config.returns, number=opened.line.index, worker=own, caller=episode)
        return delegation.reported(ended.answer, ended.reason, files)

    async def _spoken(self, opened: delegation.Opened, episode: LiveEpisode) -> Ended:
        """Why a sub-agent ended in the episode as it has it; its tools are closed."""
        config = self._loop.delegation
        names = episode.task.tools if config is None or config.tools is None else config.tools
        tools = load_tools(names, None, episode.tools, episode.memory, episode.task)
        try:
            worker = AgentRun(self._loop, episode, opened.line, prompt=opened.prompt, tools=tools, spent=self._spent, depth=self._depth + 1)
            ended = await worker.run()
        finally:
            await tools.close(timeout_s=episode.task.limits.tool_timeout_s)
        worker.line.end(ended.reason)
        return ended

    async def _copied(self, desk: delegation.SubAgents, calls: Sequence[ToolCall]) -> tuple[bytes | None, str]:
        """What the sandboxes of sub-agents begin with, where they have their own and one is started; or why none can be."""
        config = self._loop.delegation
        if config is None or config.sandbox == "shared" or all(desk.refused(call, place) for place, call in enumerate(calls)):
            return None, ""
        try:
            return await self._episode.working_copy(), ""
        except ValueError as error:  # too large, and that is the agents' doing
            return None, f"error: no helper was started, since your files cannot be copied: {error}"
