"""The turn loop: sample, run the tool calls, show their results, until the agent submits, answers or reaches a limit.

Sub-agents use the same loop, each in its own trajectory (`agentrl.agent.delegation`). An agent whose context is nearly full continues in a
new context (`agentrl.agent.contexts`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from agentrl.agent import delegation
from agentrl.agent.agent_environment import AgentEnvironment
from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.agent.contexts import (
    SUMMARY_ATTEMPTS,
    Compactor,
    continue_context,
    current_trajectory,
    main_prompt,
    read_turn,
    reading_policy_text,
    refer_prompt,
)
from agentrl.agent.invoke import SUBMIT, budget_error, count_calls, run_calls
from agentrl.agent.toolbox import Toolbox, load_tools
from agentrl.agent.tools import ToolOutcome
from agentrl.base.user_code import clip
from agentrl.config.rollout import DelegationConfig
from agentrl.errors import PolicyFault
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import CUT, Blame, Failure, Message, Parent, ToolCall, ToolResult
from agentrl.records.failure import NO_ACTION
from agentrl.records.trajectory import CONTINUED, TRUNCATED

_SHOWN = "rendered again with its tool results"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoop:
    """An `agentrl.protocols.Agent` that uses the task's prompt and tools.

    `delegation` adds a tool that starts sub-agents; `compaction` summarizes a context that is nearly full.
    """

    chat: ChatFormat
    delegation: DelegationConfig | None = None
    compaction: float | None = None
    instructions: str | None = None  # replaces the system messages of tasks

    async def act(self, episode: LiveEpisode) -> str:
        """Runs the main agent, stores its answer in the episode, and returns why it stopped."""
        task, trajectory = episode.task, current_trajectory(episode)
        environment = None if task.environment is None else await AgentEnvironment.open(episode, self.chat, self.instructions)
        actions = () if environment is None else environment.tools()
        memory = None if environment is not None and environment.choices else episode.memory  # answers are then actions, not calls
        tools = load_tools(task.tools, episode.agent_state.get("tools"), episode.tools, memory, task, actions)
        try:
            tools.refer = self.chat.refer
            prompt = main_prompt(trajectory, task, self.instructions) if environment is None else environment.start_of(trajectory)
            prompt = await refer_prompt(self.chat, trajectory, prompt, trusted=environment is None)
            run = AgentRun(self, episode, trajectory, prompt=prompt, tools=tools, spent=count_calls(episode), environment=environment)
            ended = await run.run()
            episode.answer = ended.answer
            return ended.reason
        finally:
            await tools.close(timeout_s=task.limits.tool_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Why an agent stopped, and its answer."""

    reason: str
    answer: str | None = None


class AgentRun:
    """One agent in an episode: the main agent, or a sub-agent `depth` levels below it.

    Args:
        trajectory: where its turns are recorded.
        prompt: its first messages.
        spent: number of calls so far per tool name; shared by all agents of the episode.
        environment: the environment in which the main agent acts.

    Raises:
        TaskError: a tool of the task has the same name as the tool that starts sub-agents.
    """

    def __init__(
        self,
        loop: TurnLoop,
        episode: LiveEpisode,
        trajectory: LiveTrajectory,
        *,
        prompt: Sequence[Message],
        tools: Toolbox,
        spent: Counter[str],
        depth: int = 0,
        environment: AgentEnvironment | None = None,
    ) -> None:
        self._loop = loop
        self._episode = episode
        self.trajectory = trajectory
        self._prompt = prompt
        self._tools = tools
        self._spent = spent
        self._depth = depth
        self._environment = environment
        self._turns = 0  # counted for the turn limit of sub-agents, which are never resumed
        self._compactor = None if loop.compaction is None else Compactor(chat=loop.chat, share=loop.compaction)
        config = loop.delegation
        self._delegates = config is not None and depth < config.depth
        delegate = [delegation.delegate_schema(config)] if config is not None and self._delegates else []
        self._schemas: list[Mapping[str, Any]] = [*(tool.schema for tool in tools.values()), *delegate]
        if config is not None:
            delegation.check_name(episode.task, tools)

    async def run(self) -> Ended:
        """Runs turns until the agent stops. Raises `PolicyFault` if the policy's text cannot be read or rendered."""
        episode, chat = self._episode, self._loop.chat
        episode.stage = "chat"
        constraint = "" if self._environment is None else self._environment.constraint(chat)
        if not self.trajectory.tokens:
            self._start(self._prompt)
        while not (limit := self._limit()):
            completion = await self.trajectory.sample(stop_token_ids=chat.stop_token_ids, thinking=chat.thinking, constraint=constraint)
            episode.stage = "chat"
            parsed = read_turn(chat, self.trajectory, completion, self._schemas)
            self._turns += 1
            if completion.finish_reason not in ("stop", CUT):
                self._add_no_action("it ran out of tokens")
            if completion.finish_reason != "stop":
                return Ended(reason="wall_limit" if completion.finish_reason == CUT else "token_limit")
            started = time.monotonic()
            if parsed.message.tool_calls or parsed.errors:
                results, answer = await self._results(parsed)
                results = results if self._environment is None else self._environment.charge(results)
            elif self._environment is not None and self._environment.takes_text:
                results, answer = (await self._environment.say(parsed.answer),), None
            else:
                self._add_no_action("it has no call")
                return Ended(reason="answered", answer=None if SUBMIT in self._tools else parsed.answer)
            wall_s = time.monotonic() - started
            ended = "" if self._environment is None else self._environment.ended
            if answer is not None or episode.sandbox_lost or ended:
                self.trajectory.add_results(results, wall_s=wall_s)
                if ended == TRUNCATED and self._environment is not None:
                    self._record_last_state(self._environment, parsed, results)
                lost = "tool_timeout" if episode.sandbox_lost else ended
                return Ended(reason=lost if answer is None else "submitted", answer=answer)
            episode.stage = "chat"
            if limit := await self._show(parsed, results, wall_s=wall_s):
                return self._cut(limit)
            if self._depth == 0:  # no sub-agent is running here
                await episode.boundary(self._state)
        return self._cut(limit)

    async def _show(self, parsed: ParsedCompletion, results: Sequence[ToolResult], *, wall_s: float) -> str:
        """Adds results to the context, or continues from a summary. Returns the limit that stops the agent; empty if it may continue."""
        trajectory, room, chat = self.trajectory, self._episode.room, self._loop.chat
        if self._environment is not None and self._environment.context_is_full(trajectory):
            trajectory.add_results(results, wall_s=wall_s)
            return self._continue(self._environment)
        if chat.answer_rewrite_reason(results, parsed):
            trajectory.add_results(results, wall_s=wall_s)
            with reading_policy_text(_SHOWN):
                self.trajectory = continue_context(chat, self._episode, trajectory, parsed, prompt=self._prompt, schemas=self._schemas)
            return ""
        try:
            with reading_policy_text(_SHOWN):
                delta = chat.answer_delta(results, parsed)
        except PolicyFault:
            trajectory.add_results(results, wall_s=wall_s)
            raise
        if self._compactor is None or not self._compactor.due(trajectory.tokens + len(delta), room):
            trajectory.add_results(results, wall_s=wall_s)
            trajectory.add_prompt(delta)
            return ""
        with reading_policy_text(_SHOWN):
            results, delta = self._compactor.with_summary_request(parsed, results, used=trajectory.tokens, room=room)
        trajectory.add_results(results, wall_s=wall_s)
        if trajectory.tokens + len(delta) >= room:
            return "token_limit"
        return await self._compacted(self._compactor, delta, room)

    def _record_last_state(self, environment: AgentEnvironment, parsed: ParsedCompletion, results: Sequence[ToolResult]) -> None:
        """Records the context from which the next turn would have been sampled, if it fits."""
        chat, trajectory = self._loop.chat, self.trajectory
        with reading_policy_text(_SHOWN):
            if environment.context_is_full(trajectory):
                prompt = environment.prompt(environment.now)
                state = chat.render_conversation(prompt[:-1], prompt[-1:], self._schemas)
            elif not chat.answer_rewrite_reason(results, parsed):
                turns = [(*turn.prompt_ids, *turn.completion_ids) for turn in trajectory.turns]
                state = (*chain.from_iterable(turns), *chat.answer_delta(results, parsed))
            else:
                return
        if len(state) < self._episode.room:
            trajectory.add_last_state(state)

    def _cut(self, limit: str) -> Ended:
        """Returns the `Ended` record of an agent that reached a limit. If the episode had no allowed action, none of its turns has been
        charged yet, so the failure is recorded here."""
        if self._environment is not None and self._environment.unpaid:
            self._add_no_action("the rules forbid it or it has no working call, as in all earlier turns")
        return Ended(reason=limit)

    def _add_no_action(self, why: str) -> None:
        """Records a failure if a turn without an action ends the episode before its environment does, because ending the episode this way
        must not score better than acting."""
        if self._environment is not None:
            message, turn = f"a turn is not an action: {why}", self._episode.turn_count
            self._episode.add_failure(Failure(stage="environment", blame=Blame.POLICY, kind=NO_ACTION, message=message, turn=turn))

    def _start(self, prompt: Sequence[Message]) -> None:
        """Adds the prompt to a new context. The observation at the end of an environment's prompt is untrusted."""
        chat = self._loop.chat
        if self._environment is None:
            self.trajectory.add_prompt(chat.opening(prompt, self._schemas))
        else:
            self.trajectory.add_prompt(chat.render_conversation(prompt[:-1], prompt[-1:], self._schemas))

    def _continue(self, environment: AgentEnvironment) -> str:
        """Continues from the last observation in a new trajectory. Returns the limit that stops the agent; empty if it may continue."""
        if (limit := self._limit()) and limit != "token_limit":
            return limit
        self.trajectory.end(CONTINUED)
        parent = Parent(trajectory=self.trajectory.index, turn=len(self.trajectory.turns) - 1)
        self._prompt = environment.prompt(environment.now)
        self.trajectory = self._episode.open(self.trajectory.agent, parent=parent, prompt=self._prompt)
        self._start(self._prompt)
        return ""

    async def _compacted(self, compactor: Compactor, delta: Sequence[int], room: int) -> str:
        """Continues from a summary in a new trajectory. Returns the limit that stops the agent; empty if it may continue."""
        for _ in range(SUMMARY_ATTEMPTS):
            if limit := self._limit():
                return limit
            attempt = await compactor.attempt(self._episode, self.trajectory, delta, room=room)
            if attempt.limit:
                return attempt.limit
            self._turns += 1
            if attempt.summary is not None:
                prompt = compactor.prompt(self._prompt, attempt.summary)
                self.trajectory.end("compacted")
                parent = Parent(trajectory=attempt.trajectory.index, turn=0)
                self.trajectory = self._episode.open(self.trajectory.agent, parent=parent, prompt=prompt)
                self._start(prompt)
                return ""
        return "token_limit"

    async def _state(self) -> Mapping[str, Any]:
        tools = await self._tools.state(timeout_s=self._episode.task.limits.tool_timeout_s)
        environment = {} if self._environment is None else await self._environment.state()
        return ({"tools": tools} if tools else {}) | environment

    def _limit(self) -> str:
        """Returns the limit of the episode or of this sub-agent that was reached; empty if no limit was reached."""
        config = self._loop.delegation
        if self._episode.sandbox_lost:  # by a call of another agent
            return "tool_timeout"
        if limit := self.trajectory.limit():
            return limit
        if self._depth == 0 or config is None:
            return ""
        return "turn_limit" if self._turns >= config.turns else ""

    async def _results(self, parsed: ParsedCompletion) -> tuple[tuple[ToolResult, ...], str | None]:
        """Runs the calls of one turn until an answer is submitted or the sandbox is lost. Returns the results and the answer, which is None
        if none was submitted.

        Calls run in order, except that consecutive sub-agents run concurrently, and so do consecutive calls of tools that allow
        concurrency. The result of a malformed call is its error.
        """
        results: list[ToolResult] = []
        calls = parsed.message.tool_calls
        also = (delegation.NAME,) if self._delegates else ()
        for delegates, group in groupby(enumerate(calls), key=lambda pair: self._delegates and pair[1].name == delegation.NAME):
            answer = None
            if delegates:
                results += await self._delegated(calls, [number for number, _ in group])
            else:
                run, answer = await run_calls(self._episode, self._tools, [call for _, call in group], spent=self._spent, also=also)
                results += run
            if answer is not None or self._episode.sandbox_lost:
                return tuple(results), answer
        for error in parsed.errors:
            self._spent[""] += 1
            results.append(ToolResult(name="", output=self._output(f"error: {error}"), ok=False))
        return tuple(results), None

    def _output(self, text: str) -> str:
        return self._episode.clip_output(clip(text, self._episode.task.limits.tool_output_chars))

    async def _delegated(self, calls: Sequence[ToolCall], numbers: Sequence[int]) -> list[ToolResult]:
        """Runs the sub-agents of these calls concurrently. Returns the results in the order of the calls."""
        config = self._loop.delegation
        assert config is not None, "delegation is not configured"
        started, turn = time.monotonic(), len(self.trajectory.turns) - 1
        sub_agents = delegation.SubAgents(self._episode, config, escape_text=self._loop.chat.escape_text)
        refused: list[str] = []
        for _ in numbers:
            self._spent[delegation.NAME] += 1
            over = budget_error(self._episode, self._spent, delegation.NAME)
            refused.append(over.output if over is not None else "")
        allowed = [calls[number] for number, refusal in zip(numbers, refused, strict=True) if not refusal]
        copy, copy_error = None, ""
        if config.sandbox != "shared" and not all(map(sub_agents.call_error, allowed)):
            try:
                copy = await self._episode.working_copy()
            except ValueError as error:  # too large, because of what the agents wrote
                copy_error = f"error: no helper was started, because your files cannot be copied: {error}"
        opened = [
            refused[position] or copy_error or sub_agents.open(calls[number], number, trajectory=self.trajectory, turn=turn)
            for position, number in enumerate(numbers)
        ]
        async with asyncio.TaskGroup() as running:
            jobs = [None if isinstance(worker, str) else running.create_task(self._run_worker(worker, copy)) for worker in opened]
        results = []
        for worker, job in zip(opened, jobs, strict=True):
            outcome = job.result() if job is not None else ToolOutcome(output=str(worker), ok=False)
            wall_s = time.monotonic() - started
            results.append(ToolResult(name=delegation.NAME, output=self._output(outcome.output), ok=outcome.ok, wall_s=wall_s))
        return results

    async def _run_worker(self, worker: delegation.Opened, copy: bytes | None) -> ToolOutcome:
        """Runs one sub-agent, in this agent's sandbox or in a sandbox that starts with a copy of this agent's files."""
        config = self._loop.delegation
        assert config is not None, "delegation is not configured"
        if config.sandbox == "shared":
            ended = await self._run_sub_agent(worker, self._episode)
            return delegation.sub_agent_outcome(ended.answer, ended.reason)
        async with self._episode.sub_episode(copy) as own:
            ended = await self._run_sub_agent(worker, own)
            files = await delegation.hand_back(config.returns, number=worker.trajectory.index, worker=own, caller=self._episode)
        return delegation.sub_agent_outcome(ended.answer, ended.reason, files)

    async def _run_sub_agent(self, worker: delegation.Opened, episode: LiveEpisode) -> Ended:
        """Runs a sub-agent with its view of the episode, and closes its tools."""
        config = self._loop.delegation
        names = episode.task.tools if config is None or config.tools is None else config.tools
        tools = load_tools(names, None, episode.tools, episode.memory, episode.task)
        depth = self._depth + 1
        try:
            agent = AgentRun(self._loop, episode, worker.trajectory, prompt=worker.prompt, tools=tools, spent=self._spent, depth=depth)
            ended = await agent.run()
        finally:
            await tools.close(timeout_s=episode.task.limits.tool_timeout_s)
        agent.trajectory.end(ended.reason)
        return ended
