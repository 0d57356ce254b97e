"""Runs one tool call. Either the agent receives a result in time and the episode is scored, or the attempt ends with an infrastructure
fault.

If a tool raises an exception because of its arguments or returns no valid outcome, the agent receives an error. If something that the tool
depends on has an outage (`agentrl.base.outages`), or a tool that does not use the sandbox does not return in time, this is an
infrastructure fault: the attempt ends and is retried. An outage that the arguments provoked (`agentrl.agent.outage_blame`) is the policy's
fault, because otherwise an agent could end attempts on purpose and so choose which of them count. To decide whether the arguments provoked
the outage, the call is repeated for `PATIENCE_S` if other calls can change the decision. An outage that ends while the call is repeated has
no effect. Sandbox faults are infrastructure faults, even if a tool hides them.

This module also runs the calls of one turn: it decides which run concurrently, enforces the tools' budgets, and returns the results in the
order of the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from agentrl.agent.outage_blame import Caller, CallRecord, OutageCase
from agentrl.agent.toolbox import Toolbox
from agentrl.agent.tools import MAX_TEXT, OUTAGE, InvalidOutcome, Tool, ToolFault, ToolOutcome, bounds_of, runs_together
from agentrl.base import loop_lag, user_code
from agentrl.base.outages import Outage, outage_of
from agentrl.base.secrets import redact
from agentrl.base.user_code import clip
from agentrl.errors import InfrastructureError, PluginError, TaskError, ToolUnavailable
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.protocols.sandbox import ForwardingSandbox
from agentrl.records import Blame, Failure, Limits, ToolCall, ToolResult
from agentrl.records.chat import user_message
from agentrl.records.fields import json_object

T = TypeVar("T")
Refer = Callable[[str], Awaitable[str]]

SANDBOX_MARGIN_S = 60.0
"""Additional seconds for a call that uses the sandbox, so that the sandbox's own limits are reached first."""
PATIENCE_S = 7.5
"""Seconds for which a call that reports an outage is repeated, limited to `Limits.tool_timeout_s`. Meanwhile, other episodes' calls show
whether the tool is up. A call that uses the sandbox or an object of the episode is not repeated; only the decision is delayed."""
_PAUSES = (1 / 15, 4 / 15, 10 / 15)  # pauses before each repetition, as fractions of this time
MAX_ANSWER = MAX_TEXT
"""Maximum characters in an answer that a tool submits."""
ARGUMENT_FAULTS = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, FileNotFoundError)
"""Exceptions that a sandbox raises for invalid arguments, which may come from the agent. Any other exception is a sandbox fault."""
_CUT_MARK = 64  # maximum characters that `clip` adds


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of a call: the outcome that the agent sees, the failure to record, and whether the sandbox was lost."""

    outcome: ToolOutcome
    failure: Failure | None = None
    sandbox_lost: bool = False


async def call_tool(
    tool: Tool,
    arguments: Mapping[str, Any],
    sandbox: Sandbox | None,
    limits: Limits,
    *,
    turn: int,
    caller: Caller | None = None,
    record: CallRecord | None = None,
    on_lost: Callable[[], None] = lambda: None,
    refer: Refer | None = None,
) -> CallResult:
    """Calls a tool with a deadline: `limits.tool_timeout_s`, plus `SANDBOX_MARGIN_S` if it uses the sandbox, plus the time to start a
    server (`opening_s`). The tool's bounds take precedence over `limits`.

    Args:
        caller: the attempt that makes the call, as stored in `record`.
        record: the recent calls of the run's tools. If `record` is None, every outage is an infrastructure fault, and a late result is the
            policy's fault.
        on_lost: called as soon as the call makes the sandbox unusable, before other calls that wait for the sandbox fail.
        refer: stores the images in an output (`ChatFormat.refer`).

    Raises:
        InfrastructureError: the sandbox failed, or the tool raised it.
        ToolUnavailable: there is an outage that the arguments did not provoke.
        TaskError, PluginError: the tool raised it.
        BaseException: the sandbox raised an unexpected exception, which is a bug in the sandbox layer.
    """
    watched = None if sandbox is None else _WatchedSandbox(sandbox, on_lost)
    call = _Call(tool, watched, bounds_of(tool).apply_to(limits), turn, caller or Caller(attempt="", task=""), record, refer)
    result = await call.run(arguments)
    if watched is not None and watched.error is not None:
        raise watched.error
    if watched is None or not watched.lost:
        return result
    message = f"{call.what} abandoned a call to the sandbox, so the sandbox is unusable"
    failure = result.failure or Failure(stage="tool", blame=Blame.POLICY, kind="sandbox_abandoned", message=message, turn=turn)
    return CallResult(outcome=result.outcome, failure=failure, sandbox_lost=True)


@dataclass(frozen=True, slots=True)
class _Down:
    """One execution of a call that ended with an outage."""

    outage: Outage
    error: BaseException


@dataclass(slots=True)
class _Call:
    """One call, which is repeated after an outage."""

    tool: Tool
    watched: _WatchedSandbox | None
    limits: Limits
    turn: int
    caller: Caller
    record: CallRecord | None
    refer: Refer | None
    case: OutageCase | None = None  # opened by the first outage; later outages of the call belong to the same case

    @property
    def what(self) -> str:
        return f"tool {self.tool.name}"

    @property
    def timeout_s(self) -> float:
        margin_s = float(getattr(self.tool, "opening_s", 0.0)) + (0.0 if self.watched is None else SANDBOX_MARGIN_S)
        return self.limits.tool_timeout_s + margin_s

    async def run(self, arguments: Mapping[str, Any]) -> CallResult:
        result, repeated = await self._attempt(arguments), False
        for share in _PAUSES:
            if isinstance(result, CallResult) or result.outage.late or self.case is None or not self.case.contested:
                break
            await asyncio.sleep(share * min(PATIENCE_S, self.limits.tool_timeout_s))
            own_fault = isinstance(result.error, ToolFault) and result.error.kind != OUTAGE
            if self.watched is None and getattr(self.tool, "repeats", True) and not own_fault:
                result, repeated = await self._attempt(json_object(arguments)), True
        if isinstance(result, CallResult):
            if self.case is not None:
                self.case.withdraw()
            return result
        if self.case is None or not self.case.provoked(sure=result.outage.late or repeated):
            raise self._unavailable(result) from result.error
        return self._policy_failure(result.error)

    async def _attempt(self, arguments: Mapping[str, Any]) -> CallResult | _Down:
        """Runs the call once. Raises the errors of `call_tool`, except `ToolUnavailable`."""
        watched, record = self.watched, self.record
        stalls, made_at = loop_lag.count_stalls()[0], 0 if record is None else record.ended
        with user_code.fault_boundary() as fault:
            outcome = await user_code.call_user_code(
                lambda: self.tool(arguments, watched, self.limits), what=self.what, timeout_s=self.timeout_s, within=stalls
            )
            if self.refer is not None and isinstance(outcome, ToolOutcome):
                outcome = replace(outcome, output=await self.refer(outcome.output))
            result = CallResult(outcome=checked_outcome(outcome, self.limits))
            if record is not None and result.outcome.ok:
                record.answered(self.tool.name, self.caller)
            return result
        error = fault.error
        assert error is not None
        if isinstance(error, user_code.DriverStalled):  # even if the sandbox is lost
            raise error
        if isinstance(error, ToolFault) and error.outage is not None and error.outage.late and stalls.excuse(self.limits.tool_timeout_s):
            raise user_code.DriverStalled(f"{self.what}: {error.outage.text}: {stalls.text}") from error
        known = user_code.first_cause(error, InfrastructureError, TaskError, PluginError)
        if known is not None and not (watched and watched.lost):
            raise known from None
        sandbox_fault = watched is not None and (watched.lost or watched.error is not None)  # handled in `call_tool`
        down = None if sandbox_fault else _outage(error, arguments, alone=watched is None and record is not None)
        if down is None:
            return self._policy_failure(error)
        if record is not None and self.case is None:
            self.case = record.failed(self.tool.name, self.caller, since=made_at if down.late else None)
        return _Down(down, error)

    def _unavailable(self, down: _Down) -> ToolUnavailable:
        server = isinstance(down.error, ToolFault)
        cause = (
            "the server, or the service that it calls"
            if server
            else "the service that the tool calls; for wrong arguments, raise ValueError"
        )
        note = "" if self.case is None else self.case.note
        return ToolUnavailable(f"{self.what}: {down.outage.text}{note}\n  fix: start or repair {cause}")

    def _policy_failure(self, error: BaseException) -> CallResult:
        """Returns the result of a call whose failure the policy caused."""
        name = self.tool.name
        kinds: dict[type[BaseException], str] = {user_code.CallTimeout: "tool_timeout", InvalidOutcome: "wrong_outcome"}
        if isinstance(error, user_code.CallTimeout):
            text = f"{name} gave no result within {self.timeout_s:g} s"
        elif isinstance(error, ToolFault):
            text = f"{name}: {user_code.error_text(error, 1000)}"
        else:
            detail = user_code.error_text(error, 300) if isinstance(error, InvalidOutcome) else user_code.describe_error(error)
            text = f"{name} failed: {detail}"
        known = error.kind if isinstance(error, ToolFault) else kinds.get(type(error))
        user_code.log_unexpected(self.what, error, trace=known is None)
        kind, message = known or type(error).__name__[:64], user_code.printable(f"{self.what}: {user_code.describe_error(error)}", 500)
        failure = Failure(stage="tool", blame=Blame.POLICY, kind=kind, message=message, turn=self.turn)
        return CallResult(outcome=ToolOutcome(output=f"error: {text}", ok=False), failure=failure)


def checked_outcome(outcome: object, limits: Limits) -> ToolOutcome:
    """Returns the outcome with its output cut to the limit and without the run's secrets. Raises `InvalidOutcome` with a message for the
    agent if `outcome` is not a `ToolOutcome`, or if its answer has more than `MAX_ANSWER` characters."""
    if not isinstance(outcome, ToolOutcome):
        raise InvalidOutcome(f"it returned {user_code.printable(type(outcome).__name__, 64)}, not a ToolOutcome")
    if outcome.answer is not None and len(outcome.answer) > MAX_ANSWER:
        raise InvalidOutcome(f"its answer has {len(outcome.answer)} characters; the maximum is {MAX_ANSWER}")
    outcome = replace(outcome, output=redact(outcome.output))
    if len(outcome.output) <= limits.tool_output_chars + _CUT_MARK:
        return outcome
    return replace(outcome, output=clip(outcome.output, limits.tool_output_chars))


def _outage(error: BaseException, arguments: Mapping[str, Any], *, alone: bool) -> Outage | None:
    """Returns the outage that ended a call; None if no outage did. `alone`: whether no sandbox is involved, so that a late result is an
    outage too."""
    if isinstance(error, ToolFault):
        return error.outage
    if isinstance(error, user_code.CallTimeout):
        return Outage(text=user_code.error_text(error, 300), late=True) if alone else None
    return None if isinstance(error, InvalidOutcome) else outage_of(error, arguments)


class _WatchedSandbox(ForwardingSandbox):
    """The episode's sandbox as a tool sees it. This view records what a tool may hide: a fault of the sandbox, and a call that was cut
    short by a deadline, after which the sandbox does not respond."""

    def __init__(self, sandbox: Sandbox, on_lost: Callable[[], None]) -> None:
        super().__init__(sandbox)
        self._on_lost = on_lost
        self.error: BaseException | None = None
        self.lost = False

    async def close(self) -> None:
        """Closes the episode's sandbox, which also ends the episode."""
        self.lost = True
        self._on_lost()
        await self._sandbox.close()

    async def _through(self, operation: Awaitable[T]) -> T:
        since = user_code.cancellation_count()
        try:
            return await operation
        except ARGUMENT_FAULTS:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and user_code.cancellation_count() > since:
                self.lost = self.lost or self.error is None
                if self.lost:
                    self._on_lost()
            elif not self.lost:
                self.error = self.error or error
            raise


SUBMIT = "submit"
"""Name of the tool that submits an answer."""


async def run_calls(
    episode: LiveEpisode, tools: Toolbox, calls: Sequence[ToolCall], *, spent: Counter[str], also: Sequence[str] = ()
) -> tuple[tuple[ToolResult, ...], str | None]:
    """Runs the calls of one turn until an answer is submitted or the sandbox is lost. Returns the results so far and the answer, which is
    None if none was submitted. If the sandbox is lost while concurrent calls run, all their results are returned.

    Consecutive calls run concurrently if their tools allow concurrency. Every other call runs alone, in order. Raises the errors of
    `call_tool`. If several concurrent calls fail, the error of the first one is raised.

    Args:
        spent: the episode's calls so far (`count_calls`). Each call is added before it runs.
        also: names of tools outside the toolbox, for the error about an unknown tool.
    """
    results: list[ToolResult] = []
    for batch in _batches(tools, calls):
        refused = [_refused(episode, tools, call, spent, also) for call in batch]
        for call, (outcome, wall_s) in zip(batch, await _run(episode, tools, batch, refused), strict=True):
            output = episode.clip_output(outcome.output)
            name, reward, parts = call.name[:64], outcome.reward, outcome.parts
            results.append(ToolResult(name=name, output=output, ok=outcome.ok, wall_s=wall_s, reward=reward, parts=parts))
            if outcome.answer is not None:
                return tuple(results), outcome.answer
        if episode.sandbox_lost:
            break
    return tuple(results), None


async def run_call(episode: LiveEpisode, tools: Toolbox, call: ToolCall, spent: Counter[str]) -> ToolOutcome:
    """Runs one call and adds it to `spent`, the episode's calls so far (`count_calls`). Returns an error for an unknown tool or a call that
    exceeds a bound. Raises the errors of `call_tool`."""
    return (await _run(episode, tools, [call], [_refused(episode, tools, call, spent)]))[0][0]


def _batches(tools: Toolbox, calls: Sequence[ToolCall]) -> Iterator[list[ToolCall]]:
    for together, group in groupby(calls, key=lambda call: call.name in tools and runs_together(tools[call.name])):
        if together:
            yield list(group)
        else:
            yield from ([call] for call in group)


async def _run(
    episode: LiveEpisode, tools: Toolbox, calls: Sequence[ToolCall], refused: Sequence[ToolOutcome | None]
) -> list[tuple[ToolOutcome, float]]:
    """Runs the calls that are not rejected, concurrently. Returns the outcome and the duration in seconds of each call, including the
    rejected ones."""
    allowed = [call for call, refusal in zip(calls, refused, strict=True) if refusal is None]
    sandbox = await episode.sandbox() if any(tools[call.name].needs_sandbox for call in allowed) else None
    results: Iterator[tuple[CallResult, float]] = iter(())
    if allowed:
        with episode.running(sandbox):
            jobs = [_call(episode, tools, call, sandbox) for call in allowed]
            results = iter([await jobs[0]] if len(jobs) == 1 else await _together(jobs))
    outcomes: list[tuple[ToolOutcome, float]] = []
    for refusal in refused:
        if refusal is not None:
            outcomes.append((refusal, 0.0))
            continue
        called, wall_s = next(results)
        if called.failure is not None:
            episode.add_failure(called.failure)
        episode.sandbox_lost = episode.sandbox_lost or called.sandbox_lost
        outcomes.append((called.outcome, wall_s))
    return outcomes


async def _call(episode: LiveEpisode, tools: Toolbox, call: ToolCall, sandbox: Sandbox | None) -> tuple[CallResult, float]:
    """Runs one call. Returns the call's result and its duration in seconds."""
    tool, started = tools[call.name], time.monotonic()

    def lose() -> None:
        episode.sandbox_lost = True

    try:
        called = await call_tool(
            tool,
            json_object(call.arguments),  # a copy: the record must show what the agent wrote
            sandbox if tool.needs_sandbox else None,
            episode.task.limits,
            turn=episode.turn_count,
            caller=Caller(attempt=episode.id, task=episode.task.id),
            record=None if episode.tools is None else episode.tools.record,
            on_lost=lose,
            refer=tools.refer,
        )
    except InfrastructureError:
        if not tool.needs_sandbox or not episode.sandbox_lost:
            raise
        outcome = ToolOutcome(output="error: the sandbox is gone: another agent's call to it was cut short", ok=False)
        called = CallResult(outcome=outcome, sandbox_lost=True)  # the other agent's call is recorded as the policy's fault
    return called, time.monotonic() - started


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results in the order of the calls, once all calls have finished. Raises the error of the first call that failed."""
    running = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(running)
    except BaseException:  # a cancellation: each call ends within its grace period
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        raise
    failed = [task for task in running if task.cancelled() or task.exception() is not None]
    return [task.result() for task in failed or running]


def count_calls(episode: LiveEpisode) -> Counter[str]:
    """Returns the number of calls so far per tool name, including rejected calls. A user message does not count as a call."""
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    calls = (turn.tool_results for turn in turns if user_message(turn.message, turn.tool_results) is None)
    return Counter(result.name for results in calls for result in results)


def budget_error(episode: LiveEpisode, spent: Counter[str], name: str) -> ToolOutcome | None:
    """Returns the error for a call beyond `Limits.tool_calls`, and records the policy's failure; None if the call is within the limit.

    `spent` already includes the call. Calls to all tools count, except submissions of an answer.
    """
    most = episode.task.limits.tool_calls
    if most is None or name == SUBMIT or spent.total() - spent[SUBMIT] <= most:
        return None
    message = f"this episode may make {most} tool calls, and has made them: answer with what you know"
    episode.add_failure(Failure(stage="tool", blame=Blame.POLICY, kind="tool_calls", message=message, turn=episode.turn_count))
    return ToolOutcome(output=f"error: {message}", ok=False)


def _refused(episode: LiveEpisode, tools: Toolbox, call: ToolCall, spent: Counter[str], also: Sequence[str] = ()) -> ToolOutcome | None:
    """Counts a call. Returns the error if the call must not run, else None."""
    tool = tools.get(call.name)
    spent[call.name[:64]] += 1
    if tool is None:
        return ToolOutcome(output=f"error: no tool {call.name[:64]!r}; tools: {', '.join([*tools, *also])}", ok=False)
    if over := budget_error(episode, spent, call.name):
        return over
    most = bounds_of(tool).calls
    if most is None or spent[call.name[:64]] <= most:
        return None
    message = f"error: {tool.name} may be called {most} times in an episode, and was: continue without it"
    return ToolOutcome(output=message, ok=False)
