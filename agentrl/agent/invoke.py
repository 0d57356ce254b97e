"""Runs one tool call. The agent gets an answer in time and the episode is scored, or the attempt ends with an infrastructure fault.

If a tool raises on its arguments or returns no valid outcome, the agent gets an error. An outage of what the tool depends on
(`agentrl.base.outages`), or no answer in time from a tool without a sandbox, is an infrastructure fault: the attempt ends and is retried.
The exception is an outage that the arguments provoked (`agentrl.agent.outage_blame`); otherwise an agent could end its attempts that way
and choose which of them count. To find out, the call is repeated for `PATIENCE_S` if the tool has answered other calls; an outage that is
over by then costs nothing. Sandbox faults are infrastructure faults, even if a tool hides them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentrl.agent.outage_blame import Caller, CallRecord, OutageCase
from agentrl.agent.tools import MAX_TEXT, OUTAGE, InvalidOutcome, Tool, ToolFault, ToolOutcome, bounds_of, clip
from agentrl.base import loop_lag, user_code
from agentrl.base.outages import Outage, outage_of
from agentrl.base.secrets import redact
from agentrl.errors import InfrastructureError, PluginError, TaskError, ToolUnavailable
from agentrl.protocols import Sandbox
from agentrl.protocols.forwarding import ForwardingSandbox
from agentrl.records import Blame, Failure, Limits
from agentrl.records.fields import json_object

T = TypeVar("T")

SANDBOX_MARGIN_S = 60.0
"""Additional time of a call that uses the sandbox. The sandbox's own limits pass before."""
PATIENCE_S = 7.5
"""Seconds for which a call that reports an outage is repeated, at most `Limits.tool_timeout_s`. Meanwhile, other episodes' calls show
whether the tool is up. A call that uses the sandbox or an object of the episode is not repeated; only the decision waits."""
_PAUSES = (1 / 15, 4 / 15, 10 / 15)  # before each repetition, as fractions of this time
MAX_ANSWER = MAX_TEXT
"""Characters of an answer that a tool may submit."""
ARGUMENT_FAULTS = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, FileNotFoundError)
"""What a sandbox raises for invalid arguments, which a tool may have from the agent. Anything else is a fault of the sandbox."""
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
) -> CallResult:
    """Calls a tool with a deadline: `limits.tool_timeout_s`, plus `SANDBOX_MARGIN_S` if it uses the sandbox, plus the time to start a
    server (`opening_s`). The tool's bounds replace these limits.

    Args:
        caller: the caller, for `record`.
        record: how the run's tools have answered. Without it, every outage is an infrastructure fault, and a late answer the policy's.
        on_lost: called as soon as the call makes the sandbox useless, before others that wait for the sandbox fail.

    Raises:
        InfrastructureError: the sandbox failed, or the tool raised it.
        ToolUnavailable: an outage that the arguments did not provoke.
        TaskError, PluginError: the tool raised it.
        BaseException: a bug in the sandbox layer.
    """
    watched = None if sandbox is None else _WatchedSandbox(sandbox, on_lost)
    call = _Call(tool, watched, bounds_of(tool).apply_to(limits), turn, caller or Caller(attempt="", task=""), record)
    result = await call.run(arguments)
    if watched is not None and watched.error is not None:
        raise watched.error
    if watched is None or not watched.lost:
        return result
    message = f"{call.what} abandoned a call to the sandbox, which is unusable now"
    failure = result.failure or Failure(stage="tool", blame=Blame.POLICY, kind="sandbox_abandoned", message=message, turn=turn)
    return CallResult(outcome=result.outcome, failure=failure, sandbox_lost=True)


@dataclass(frozen=True, slots=True)
class _Down:
    """An attempt that ended with an outage."""

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
    case: OutageCase | None = None  # the first outage; later outages of the call belong to it

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
        """Makes one call. Raises the errors of `call_tool`, except `ToolUnavailable`."""
        watched, record = self.watched, self.record
        stalls, made_at = loop_lag.count_stalls()[0], 0 if record is None else record.ended
        with user_code.fault_boundary() as fault:
            given = await user_code.call_user_code(
                lambda: self.tool(arguments, watched, self.limits), what=self.what, timeout_s=self.timeout_s, within=stalls
            )
            result = CallResult(outcome=checked_outcome(given, self.limits))
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
        cause = "the server, or what it calls" if server else "what the tool calls; for wrong arguments raise ValueError"
        note = "" if self.case is None else self.case.note
        return ToolUnavailable(f"{self.what}: {down.outage.text}{note}\n  fix: start or repair {cause}")

    def _policy_failure(self, error: BaseException) -> CallResult:
        """The result of a call whose failure the policy caused."""
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


def checked_outcome(given: object, limits: Limits) -> ToolOutcome:
    """Returns the outcome within bounds, without the run's secrets. Raises `InvalidOutcome`, with a text for the agent."""
    if not isinstance(given, ToolOutcome):
        raise InvalidOutcome(f"it returned {user_code.printable(type(given).__name__, 64)}, not a ToolOutcome")
    if given.answer is not None and len(given.answer) > MAX_ANSWER:
        raise InvalidOutcome(f"its answer has {len(given.answer)} characters; the maximum is {MAX_ANSWER}")
    given = replace(given, output=redact(given.output))
    if len(given.output) <= limits.tool_output_chars + _CUT_MARK:
        return given
    return replace(given, output=clip(given.output, limits.tool_output_chars))


def _outage(error: BaseException, arguments: Mapping[str, Any], *, alone: bool) -> Outage | None:
    """The outage that ended a call. `alone`: no sandbox is involved, so a late answer is an outage too."""
    if isinstance(error, ToolFault):
        return error.outage
    if isinstance(error, user_code.CallTimeout):
        return Outage(text=user_code.error_text(error, 300), late=True) if alone else None
    return None if isinstance(error, InvalidOutcome) else outage_of(error, arguments)


class _WatchedSandbox(ForwardingSandbox):
    """The episode's sandbox as a tool sees it. It records what a tool may hide: a fault of the sandbox, and a call that was cut short by a
    deadline, after which the sandbox does not answer."""

    def __init__(self, sandbox: Sandbox, on_lost: Callable[[], None]) -> None:
        super().__init__(sandbox)
        self._on_lost = on_lost
        self.error: BaseException | None = None
        self.lost = False

    async def close(self) -> None:
        """Ends the episode's sandbox, and with it the episode."""
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
