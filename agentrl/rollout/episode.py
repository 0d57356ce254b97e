"""The turn loop: act -> observe until the agent submits, gives up or reaches a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.errors import InfrastructureError, SandboxError, SandboxTimeout, ServingError
from agentrl.outputs import collect, select
from agentrl.protocols import Policy, Sandbox, SandboxBackend
from agentrl.records import (
    Blame,
    Completion,
    Episode,
    Failure,
    SamplingParams,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from agentrl.rollout.chat import ChatFormat, ParsedCompletion
from agentrl.rollout.tools import Tool, ToolOutcome, clip, load_tools


@dataclass(slots=True)
class _State:
    """What one running episode has so far."""

    sandbox: Sandbox | None = None
    turns: list[Turn] = field(default_factory=list)
    context: list[int] = field(default_factory=list)  # every id so far: prompts and completions
    answer: str | None = None
    sandbox_s: float = 0.0  # opening, writing and executing
    program_s: float = 0.0  # the agent's own programs


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of any task with one policy. Holds no state of an episode; safe to run many at once."""

    policy: Policy
    sandboxes: SandboxBackend
    chat: ChatFormat
    temperature: float
    max_model_len: int
    request_timeout_s: float
    open_timeout_s: float = 60.0

    async def run(self, task: Task, *, episode_id: str, attempt: int = 0) -> Episode:
        """One attempt. Infrastructure faults end as a `Failure` in the episode, never as an exception or a score.

        Task faults (an unknown tool, a prompt that does not fit) raise `TaskError`/`UserError`.
        """
        state, started = _State(), time.monotonic()
        failures: tuple[Failure, ...] = ()
        outputs: Mapping[str, bytes] = {}
        try:
            async with asyncio.timeout(task.limits.wall_s):
                stop_reason = await self._turns(task, state, episode_id=episode_id)
            if task.outputs:  # an episode that runs out of time leaves none
                outputs, failures = await self._collect(task, state)
        except TimeoutError as error:
            stop_reason = "failed" if isinstance(error, SandboxTimeout) else "wall_limit"
            if isinstance(error, SandboxTimeout):
                failures = (_infrastructure(error, turn=len(state.turns)),)
            elif state.program_s < task.limits.wall_s / 2:  # we were slow, not the agent's programs
                failures = (_failure("episode", "wall_limit", f"no end after {task.limits.wall_s:g} s", turn=len(state.turns)),)
        except InfrastructureError as error:
            stop_reason, failures = "failed", (_infrastructure(error, turn=len(state.turns)),)
        finally:
            if state.sandbox is not None:
                closing = time.monotonic()
                await state.sandbox.close()
                state.sandbox_s += time.monotonic() - closing
        return Episode(
            id=episode_id,
            task_id=task.id,
            task_key=task.key,
            trajectories=(Trajectory(agent="main", turns=tuple(state.turns), stop_reason=stop_reason),),
            answer=state.answer,
            failures=failures,
            attempt=attempt,
            wall_s=time.monotonic() - started,
            sandbox_s=state.sandbox_s,
            outputs=outputs,
        )

    async def _collect(self, task: Task, state: _State) -> tuple[Mapping[str, bytes], tuple[Failure, ...]]:
        """The declared outputs, after the agent's last action; what it made impossible to take is its own failure, and scored."""
        if state.sandbox is None:  # nothing ran, so the files are what they were
            return select(task.contents(), task.outputs), ()
        started = time.monotonic()
        collected = await collect(state.sandbox, task.outputs)
        state.sandbox_s += time.monotonic() - started
        refused = "; ".join(f"{path}: {reason}" for path, reason in collected.refused.items())
        if not refused:
            return collected.files, ()
        failure = Failure(stage="collect", blame=Blame.POLICY, kind="outputs_refused", message=refused[:2000], turn=len(state.turns))
        return collected.files, (failure,)

    async def _turns(self, task: Task, state: _State, *, episode_id: str) -> str:
        """The loop itself; returns the stop reason."""
        tools = load_tools(task.tools)
        prompt_ids = self.chat.opening(task.prompt, [tool.schema for tool in tools.values()])
        room = min(task.limits.episode_tokens, self.max_model_len)
        for number in range(task.limits.turns):
            budget = min(task.limits.turn_tokens, room - len(state.context) - len(prompt_ids))
            if budget <= 0:
                return "token_limit"
            params = SamplingParams(
                max_tokens=budget,
                temperature=self.temperature,
                stop_token_ids=self.chat.stop_token_ids,
            )
            started = time.monotonic()
            state.context.extend(prompt_ids)
            completion = await self.policy.generate(
                state.context, params, request_id=f"{episode_id}-{number}", timeout_s=self.request_timeout_s
            )
            state.context.extend(completion.token_ids)
            parsed = self.chat.parse(completion.token_ids)
            turn = _turn(prompt_ids, completion, parsed, time.monotonic() - started)
            state.turns.append(turn)
            if completion.finish_reason != "stop":
                return "token_limit"
            if not parsed.message.tool_calls and not parsed.errors:
                state.answer = None if "submit" in tools else parsed.message.content
                return "answered"
            started = time.monotonic()
            results = await self._act(task, state, tools, parsed)
            state.turns[-1] = replace(turn, tool_results=results, tool_s=time.monotonic() - started)
            if state.answer is not None:
                return "submitted"
            prompt_ids = self.chat.tool_delta([result.output for result in results])
        return "turn_limit"

    async def _act(self, task: Task, state: _State, tools: Mapping[str, Tool], parsed: ParsedCompletion) -> tuple[ToolResult, ...]:
        """Runs the calls of one turn in order, up to a submitted answer; malformed calls are answered with their error."""
        results: list[ToolResult] = []
        for call in parsed.message.tool_calls:
            started = time.monotonic()
            outcome = await self._call(task, state, tools, call)
            wall_s = time.monotonic() - started
            results.append(ToolResult(name=call.name[:64], output=outcome.output, ok=outcome.ok, wall_s=wall_s))
            if outcome.answer is not None:
                state.answer = outcome.answer
                return tuple(results)
        for error in parsed.errors:
            results.append(ToolResult(name="", output=clip(f"error: {error}", task.limits.tool_output_chars), ok=False))
        return tuple(results)

    async def _call(self, task: Task, state: _State, tools: Mapping[str, Tool], call: ToolCall) -> ToolOutcome:
        tool = tools.get(call.name)
        if tool is None:
            return ToolOutcome(output=f"error: no tool {call.name[:64]!r}; tools: {', '.join(tools)}", ok=False)
        if not tool.needs_sandbox:
            return await tool(call.arguments, None, task.limits)
        started = time.monotonic()
        if state.sandbox is None:  # opened at the first call that needs it: many episodes of a weak policy never do
            state.sandbox = await self.sandboxes.open(task.sandbox, files=task.contents(), timeout_s=self.open_timeout_s)
        state.sandbox_s += time.monotonic() - started
        started = time.monotonic()
        try:
            return await tool(call.arguments, state.sandbox, task.limits)
        finally:
            state.program_s += time.monotonic() - started
            state.sandbox_s += time.monotonic() - started


def _turn(prompt_ids: tuple[int, ...], completion: Completion, parsed: ParsedCompletion, generate_s: float) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        message=parsed.message,
        finish_reason=completion.finish_reason,
        generate_s=generate_s,
    )


def _infrastructure(error: BaseException, *, turn: int) -> Failure:
    stage = "sandbox" if isinstance(error, SandboxError) else "generate" if isinstance(error, ServingError) else "episode"
    return _failure(stage, type(error).__name__, str(error), turn=turn)


def _failure(stage: str, kind: str, message: str, *, turn: int) -> Failure:
    return Failure(stage=stage, blame=Blame.INFRASTRUCTURE, kind=kind, message=message[:2000], turn=turn, retryable=True)
