"""The turn loop: act -> observe until the agent submits, gives up or reaches a limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from agentrl import usercode
from agentrl.errors import SandboxError, SandboxUnavailable, TaskError, UserError
from agentrl.fields import json_object
from agentrl.outputs import Collected, collect, select
from agentrl.protocols import Policy, Sandbox, SandboxBackend
from agentrl.records import (
    Blame,
    Completion,
    Episode,
    EpisodeState,
    Failure,
    SamplingParams,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from agentrl.rollout.chat import ChatFormat, ParsedCompletion
from agentrl.rollout.faults import fault, infrastructure_fault, let_go
from agentrl.rollout.invoke import call_tool
from agentrl.rollout.tools import Tool, ToolOutcome, clip, load_tools

log = logging.getLogger(__name__)

Capture = Callable[[], Awaitable[EpisodeState | None]]
"""The state of an episode that stands between two turns; None when its working directory is larger than a snapshot may be."""

OnTurn = Callable[[int, Capture], Awaitable[None]]
"""Told, at each boundary of two turns, how many turns there are, and how to capture the state; the episode waits meanwhile."""

MAX_TOOL_FAILURES = 16
"""Failures of tools that an episode's record holds: the first ones."""


@dataclass(slots=True)
class _State:
    """What one running episode has so far."""

    sandbox: Sandbox | None = None
    snapshot: bytes | None = None  # what the sandbox is opened from, when the episode began elsewhere
    turns: list[Turn] = field(default_factory=list)
    inherited: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] = ()  # what the next turn adds to the context before it samples
    context: list[int] = field(default_factory=list)  # every id so far: prompts and completions
    answer: str | None = None
    output_chars: int = 0  # shown by tools
    wall_s: float = 0.0  # spent elsewhere, before this run of the episode
    sandbox_s: float = 0.0  # opening, writing and executing
    program_s: float = 0.0  # what the agent called
    failures: list[Failure] = field(default_factory=list)  # of tools, at what the agent asked of them
    sandbox_lost: bool = False  # a tool was cut short in the midst of using it
    stage: str = "episode"  # what is going on, for a fault that does not tell by itself

    @classmethod
    def of(cls, start: EpisodeState, episode_id: str) -> _State:
        """`start` as `episode_id` goes on from it: as itself, or as a branch that inherits every turn."""
        sampled_by = (start.episode_id,) * (len(start.turns) - len(start.inherited))
        continued = episode_id == start.episode_id
        return cls(
            snapshot=start.snapshot,
            turns=list(start.turns),
            inherited=start.inherited if continued else (*start.inherited, *sampled_by),
            prompt_ids=start.prompt_ids,
            context=[token for turn in start.turns for token in (*turn.prompt_ids, *turn.completion_ids)],
            output_chars=start.output_chars,
            wall_s=start.wall_s,
            sandbox_s=start.sandbox_s,
            program_s=start.program_s,
            failures=list(start.failures) if continued else [],  # those of inherited turns are another's
        )


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

    async def run(
        self, task: Task, *, episode_id: str, attempt: int = 0, start: EpisodeState | None = None, on_turn: OnTurn | None = None
    ) -> Episode:
        """One attempt. Whatever is broken on the way ends as a `Failure` in the episode, never as an exception or a score.

        Args:
            start: where to go on from instead of beginning. Its turns are kept as they are: no token of them is sampled or tokenized
                again, no tool call made again, and the sandbox is opened from its snapshot. Under its own id an episode is
                continued; under another it is a branch, whose turns so far are inherited (see `agentrl.objective.branches`).
            on_turn: called after every turn that another may follow.

        Raises:
            SandboxUnavailable: no sandbox of this kind can be opened on this machine at all.
            ValueError: `start` is the state of another task.
        """
        if start is not None and start.task_key != task.key:
            raise ValueError(f"the state of episode {start.episode_id} belongs to another task than {task.id!r}")
        state = _State() if start is None else _State.of(start, episode_id)
        started = time.monotonic() - state.wall_s
        try:
            stop_reason, collected, failures = await self._attempt(task, state, episode_id, attempt, started, on_turn)
        finally:
            await _close(state)
        return Episode(
            id=episode_id,
            task_id=task.id,
            task_key=task.key,
            trajectories=(Trajectory(agent="main", turns=tuple(state.turns), stop_reason=stop_reason, inherited=state.inherited),),
            answer=state.answer,
            failures=(*state.failures, *failures),
            attempt=attempt,
            wall_s=time.monotonic() - started,
            sandbox_s=state.sandbox_s,
            outputs=collected.files,
            removed=collected.removed,
        )

    async def _attempt(
        self, task: Task, state: _State, episode_id: str, attempt: int, started: float, on_turn: OnTurn | None
    ) -> tuple[str, Collected, tuple[Failure, ...]]:
        """The turns and the outputs, within the episode's time: stop reason, outputs, and what was broken."""

        async def boundary() -> None:
            if on_turn is not None:
                state.stage = "turn"
                await on_turn(len(state.turns), lambda: _capture(task, state, episode_id, attempt, time.monotonic() - started))

        nothing, since = Collected(files={}), usercode.cancellations()
        wall = asyncio.timeout(max(0.0, task.limits.wall_s - state.wall_s))
        try:
            async with wall:
                stop_reason = await self._turns(task, state, episode_id=episode_id, boundary=boundary)
            if wall.expired():  # and what it cancelled did not mind
                raise TimeoutError
            if not task.outputs or state.sandbox_lost:  # an episode that runs out of time leaves none
                return stop_reason, nothing, ()
            state.stage = "collect"
            return stop_reason, *await self._collect(task, state)
        except BaseException as error:
            let_go(error, since)
            if not wall.expired():
                return "failed", nothing, (fault(error, stage=state.stage, turn=len(state.turns)),)
            if state.program_s >= task.limits.wall_s / 2:
                return "wall_limit", nothing, ()
            slow = f"no end after {task.limits.wall_s:g} s"  # we were slow, not what the agent called
            return "wall_limit", nothing, (infrastructure_fault("episode", "wall_limit", slow, turn=len(state.turns)),)

    async def _collect(self, task: Task, state: _State) -> tuple[Collected, tuple[Failure, ...]]:
        """The declared outputs, after the agent's last action; what it made impossible to take is its own failure, and scored."""
        if state.sandbox is None and state.snapshot is None:  # nothing ran, so the files are what they were
            return Collected(files=select(_contents(task), task.outputs)), ()
        started = time.monotonic()
        collected = await collect(await self._opened(task, state), task.outputs)
        state.sandbox_s += time.monotonic() - started
        refused = "; ".join(f"{path}: {reason}" for path, reason in collected.refused.items())
        if not refused:
            return collected, ()
        failure = Failure(stage="collect", blame=Blame.POLICY, kind="outputs_refused", message=refused[:2000], turn=len(state.turns))
        return collected, (failure,)

    async def _turns(self, task: Task, state: _State, *, episode_id: str, boundary: Callable[[], Awaitable[None]]) -> str:
        """The loop itself; returns the stop reason."""
        tools = load_tools(task.tools)
        state.stage = "chat"
        if not state.turns:
            state.prompt_ids = self.chat.opening(task.prompt, [tool.schema for tool in tools.values()])
        room = min(task.limits.episode_tokens, self.max_model_len)
        for number in range(len(state.turns), task.limits.turns):
            budget = min(task.limits.turn_tokens, room - len(state.context) - len(state.prompt_ids))
            if budget <= 0:
                if not state.turns:
                    raise TaskError(
                        f"task {task.id!r}: its prompt has {len(state.prompt_ids)} tokens, and with an answer no more than {room} fit",
                        fix="shorten the prompt, or raise limits.episode_tokens and policy.max_model_len",
                    )
                return "token_limit"
            params = SamplingParams(max_tokens=budget, temperature=self.temperature, stop_token_ids=self.chat.stop_token_ids)
            started = time.monotonic()
            state.context.extend(state.prompt_ids)
            state.stage = "generate"
            completion = await self.policy.generate(
                state.context, params, request_id=f"{episode_id}-{number}", timeout_s=self.request_timeout_s
            )
            state.context.extend(completion.token_ids)
            state.stage = "chat"
            parsed = self.chat.parse(completion.token_ids)
            turn = _turn(state.prompt_ids, completion, parsed, time.monotonic() - started)
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
            if state.sandbox_lost:
                return "tool_timeout"
            state.stage = "chat"
            state.prompt_ids = self.chat.tool_delta([result.output for result in results])
            await boundary()
        return "turn_limit"

    async def _act(self, task: Task, state: _State, tools: Mapping[str, Tool], parsed: ParsedCompletion) -> tuple[ToolResult, ...]:
        """Runs the calls of one turn in order, up to a submitted answer or a lost sandbox; malformed ones are answered with their error."""
        results: list[ToolResult] = []
        for call in parsed.message.tool_calls:
            started = time.monotonic()
            outcome = await self._call(task, state, tools, call)
            wall_s = time.monotonic() - started
            results.append(ToolResult(name=call.name[:64], output=_shown(task, state, outcome.output), ok=outcome.ok, wall_s=wall_s))
            if outcome.answer is not None or state.sandbox_lost:
                state.answer = outcome.answer
                return tuple(results)
        for error in parsed.errors:
            text = clip(f"error: {error}", task.limits.tool_output_chars)
            results.append(ToolResult(name="", output=_shown(task, state, text), ok=False))
        return tuple(results)

    async def _call(self, task: Task, state: _State, tools: Mapping[str, Tool], call: ToolCall) -> ToolOutcome:
        tool = tools.get(call.name)
        if tool is None:
            return ToolOutcome(output=f"error: no tool {call.name[:64]!r}; tools: {', '.join(tools)}", ok=False)
        arguments = json_object(call.arguments)  # the tool's own copy: what is recorded is what the agent wrote
        sandbox = None
        if tool.needs_sandbox:
            started = time.monotonic()
            sandbox = await self._opened(task, state)
            state.sandbox_s += time.monotonic() - started
        state.stage = "tool" if sandbox is None else "sandbox"
        started = time.monotonic()
        try:
            called = await call_tool(tool, arguments, sandbox, task.limits, turn=len(state.turns))
        finally:
            state.program_s += time.monotonic() - started
            if sandbox is not None:
                state.sandbox_s += time.monotonic() - started
        if called.failure is not None and len(state.failures) < MAX_TOOL_FAILURES:
            state.failures.append(called.failure)
        state.sandbox_lost = called.sandbox_lost
        return called.outcome

    async def _opened(self, task: Task, state: _State) -> Sandbox:
        """The episode's sandbox, opened at the first need: many episodes of a weak policy never have one.

        It holds the task's files, or what the working directory held when the state was captured that the episode began from.
        """
        if state.sandbox is not None:
            return state.sandbox
        state.stage = "sandbox"
        snapshot = state.snapshot
        files = _contents(task) if snapshot is None else None
        try:
            state.sandbox = await self.sandboxes.open(task.sandbox, files=files, snapshot=snapshot, timeout_s=self.open_timeout_s)
            return state.sandbox
        except (SandboxUnavailable, UnicodeError):  # the files' names and texts have been looked at
            raise
        except UserError as error:  # an image that cannot be made
            raise TaskError(f"task {task.id!r}: {error.message}", fix=error.fix) from error
        except ValueError as error:
            if snapshot is not None:
                raise SandboxError(f"the snapshot was refused: {error}") from error
            raise TaskError(f"task {task.id!r}: its files do not go into its sandbox: {error}", fix="raise sandbox.disk_mb") from error


async def _close(state: _State) -> None:
    """Ends the sandbox. What goes wrong here takes nothing from the episode, which is over."""
    if state.sandbox is None:
        return
    started, since = time.monotonic(), usercode.cancellations()
    try:
        await state.sandbox.close()
    except BaseException as error:
        let_go(error, since)
        usercode.report("closing a sandbox", error)
    state.sandbox_s += time.monotonic() - started


def _contents(task: Task) -> dict[str, bytes]:
    """The task's files. Raises `TaskError` for names and texts that cannot be written."""
    try:
        files = task.contents()
        for path in files:
            path.encode()
        return files
    except ValueError as error:
        raise TaskError(
            f"task {task.id!r}: one of its files cannot be written: {error}", fix="give it a name and content in UTF-8"
        ) from error


async def _capture(task: Task, state: _State, episode_id: str, attempt: int, wall_s: float) -> EpisodeState | None:
    started = time.monotonic()
    try:
        return EpisodeState(
            episode_id=episode_id,
            task_key=task.key,
            attempt=attempt,
            turns=tuple(state.turns),
            inherited=state.inherited,
            prompt_ids=state.prompt_ids,
            snapshot=state.snapshot if state.sandbox is None else await state.sandbox.snapshot(),
            output_chars=state.output_chars,
            wall_s=wall_s,
            sandbox_s=state.sandbox_s,
            program_s=state.program_s,
            failures=tuple(state.failures),
        )
    except ValueError as error:
        log.info("episode %s cannot be captured after turn %d: %s", episode_id, len(state.turns), error)
        return None
    finally:
        state.sandbox_s += time.monotonic() - started


def _shown(task: Task, state: _State, output: str) -> str:
    """What the agent is shown of a tool's output: what is left of the episode's allowance, head and tail, with the cut marked."""
    left = task.limits.all_output_chars - state.output_chars
    state.output_chars += min(len(output), left)
    if len(output) <= left:
        return output
    if left == 0:
        return f"... not shown, {len(output)} characters: this episode's output is used up ..."
    head, tail = output[: (left + 1) // 2], output[len(output) - left // 2 :]
    return f"{head}\n... {len(output) - left} characters cut: this episode's output is used up ...\n{tail}"


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
