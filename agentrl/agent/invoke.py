"""One tool call. Either the agent gets an answer in time and the episode is scored, or the attempt ends with an infrastructure fault.

If a tool raises on its arguments or returns no valid outcome, the agent gets an error. An outage of what the tool depends on
(`agentrl.base.outages`), or no answer in time from a tool without a sandbox, is an infrastructure fault: the attempt is retried. The
exception is an outage that the arguments provoked (`agentrl.agent.outage_blame`): otherwise an agent could end its attempts that way and
choose which of them count. To find out, the call is repeated for `PATIENCE_S` if the tool has answered others; an outage that is over by
then costs nothing. Sandbox faults are infrastructure faults, even if a tool hides them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
"""How much longer than `Limits.tool_timeout_s` a call may take that uses the sandbox. A program's own limit, and those of the
sandbox's other operations, pass before."""
PATIENCE_S = 7.5
"""Seconds for which a call that reports an outage is repeated, at most `Limits.tool_timeout_s`. Meanwhile, other episodes' calls show
whether the tool is up. A call that uses the sandbox or an object of the episode is not repeated; only the decision waits."""
_PAUSES = (1 / 15, 4 / 15, 10 / 15)  # before each repetition, as fractions of this time
MAX_ANSWER = MAX_TEXT
"""Characters of an answer that a tool may submit."""
ARGUMENT_FAULTS = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, FileNotFoundError)
"""What a sandbox raises for arguments it cannot take, which a tool may have from the agent; anything else is a fault of its own."""
_CUT_MARK = 64  # what `clip` adds to a text at most


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call came to: what the agent is told, what went wrong with the tool, and whether that took the sandbox with it."""

    outcome: ToolOutcome
    failure: Failure | None = None
    sandbox_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Down:
    """A call that ended with an outage."""

    out: Outage
    error: BaseException
    told: Callable[[], CallResult]  # returns the call's result if it provoked the outage
    repeats: bool  # whether the call may be repeated
    case: OutageCase | None  # None if there is no record

    @property
    def waits(self) -> bool:
        """Whether other calls may change the decision. The decision about a late call is not delayed."""
        return self.case is not None and self.case.contested and not self.out.late


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
    """Calls a tool with a deadline: `limits.tool_timeout_s`, `SANDBOX_MARGIN_S` more for one that uses the sandbox, and what a server
    may take to be started (`opening_s`). What the tool has of bounds takes the place of these limits.

    Args:
        caller: who calls, for `record`.
        record: how the run's tools answered so far. Without it, every outage is an infrastructure fault, and a late answer the policy's.
        on_lost: told at once when the call makes the sandbox useless, before others that wait for the sandbox fail.

    Raises:
        InfrastructureError: the sandbox failed, or the tool says that something else did.
        ToolUnavailable: an outage that the arguments did not provoke.
        TaskError, PluginError: the tool says that the task is wrong.
        BaseException: a bug in the sandbox layer, whatever it raised.
    """
    watched = None if sandbox is None else _Watched(sandbox, on_lost)
    limits, what = bounds_of(tool).apply_to(limits), f"tool {tool.name}"
    history = None if record is None else _History(record, tool.name, caller or Caller(attempt="", task=""))
    pauses = iter([part * min(PATIENCE_S, limits.tool_timeout_s) for part in _PAUSES])
    called, repeated = await _once(tool, arguments, watched, limits, turn=turn, history=history), False
    while isinstance(called, _Down) and called.waits and (pause := next(pauses, None)) is not None:
        await asyncio.sleep(pause)
        if called.repeats:
            called, repeated = await _once(tool, json_object(arguments), watched, limits, turn=turn, history=history), True
    if isinstance(called, _Down):
        if called.case is None or not called.case.provoked(sure=called.out.late or repeated):
            raise _unavailable(what, called) from called.error
        called = called.told()
    elif history is not None:
        history.over()
    if watched is not None and watched.error is not None:
        raise watched.error
    if watched is None or not watched.lost:
        return called
    message = f"{what} abandoned a call to the sandbox, which cannot be used any more"
    failure = called.failure or Failure(stage="tool", blame=Blame.POLICY, kind="sandbox_abandoned", message=message, turn=turn)
    return CallResult(outcome=called.outcome, failure=failure, sandbox_lost=True)


class _History:
    """The entries of one call, with its repetitions, in a run's record."""

    def __init__(self, record: CallRecord, tool: str, caller: Caller) -> None:
        self._record, self._tool, self._caller = record, tool, caller
        self._case: OutageCase | None = None
        self._since = record.ended  # when the call was made

    def begin(self) -> None:
        self._since = self._record.ended

    def answered(self) -> None:
        self._record.answered(self._tool, self._caller)

    def failed(self, *, late: bool) -> OutageCase:
        """The case of the first failure. Later failures of the call belong to the same case."""
        self._case = self._case or self._record.failed(self._tool, self._caller, since=self._since if late else None)
        return self._case

    def over(self) -> None:
        """Withdraws the case, because the call was answered after all."""
        if self._case is not None:
            self._case.withdraw()


async def _once(
    tool: Tool, arguments: Mapping[str, Any], watched: _Watched | None, limits: Limits, *, turn: int, history: _History | None
) -> CallResult | _Down:
    """Makes one call. Raises the errors of `call_tool`, except `ToolUnavailable`."""
    margin_s = float(getattr(tool, "opening_s", 0.0)) + (0.0 if watched is None else SANDBOX_MARGIN_S)
    what, timeout_s = f"tool {tool.name}", limits.tool_timeout_s + margin_s
    since, stalls = user_code.cancellation_count(), loop_lag.count_stalls()[0]
    if history is not None:
        history.begin()
    try:
        given = await user_code.call_user_code(lambda: tool(arguments, watched, limits), what=what, timeout_s=timeout_s, within=stalls)
        called = CallResult(outcome=checked_outcome(given, limits))
        if history is not None and called.outcome.ok:
            history.answered()
        return called
    except BaseException as error:
        user_code.reraise_if_fatal(error, since)
        if isinstance(error, user_code.DriverStalled):  # also if it has cost the sandbox
            raise
        if isinstance(error, ToolFault) and error.outage is not None and error.outage.late and stalls.excuse(limits.tool_timeout_s):
            raise user_code.DriverStalled(f"{what}: {error.outage.text}: {stalls.text}") from error
        if (known := user_code.first_cause(error, InfrastructureError, TaskError, PluginError)) is not None and not (
            watched and watched.lost
        ):
            raise known from None
        ours = watched is not None and (watched.lost or watched.error is not None)  # a fault of the sandbox, handled in `call_tool`
        out = None if ours else _outage(error, arguments, alone=watched is None and history is not None)
        told = partial(_policys, tool.name, error, timeout_s, turn)
        if out is None:
            return told()
        repeats = watched is None and getattr(tool, "repeats", True) and not (isinstance(error, ToolFault) and error.kind != OUTAGE)
        return _Down(out=out, error=error, told=told, repeats=repeats, case=None if history is None else history.failed(late=out.late))


def checked_outcome(given: object, limits: Limits) -> ToolOutcome:
    """The outcome within bounds, without the run's secrets. Raises `InvalidOutcome`, with what the agent may be told."""
    if not isinstance(given, ToolOutcome):
        raise InvalidOutcome(f"it gave {user_code.printable(type(given).__name__, 64)}, not a ToolOutcome")
    if given.answer is not None and len(given.answer) > MAX_ANSWER:
        raise InvalidOutcome(f"its answer has {len(given.answer)} characters, at most {MAX_ANSWER} are taken")
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


def _unavailable(what: str, down: _Down) -> ToolUnavailable:
    server = isinstance(down.error, ToolFault)
    fix = "start or repair " + ("the server, or what it calls" if server else "what the tool calls; for wrong arguments raise ValueError")
    note = "" if down.case is None else down.case.note
    return ToolUnavailable(f"{what}: {down.out.text}{note}\n  fix: {fix}")


def _policys(name: str, error: BaseException, timeout_s: float, turn: int) -> CallResult:
    """The result of a call whose failure the policy caused."""
    return CallResult(outcome=_told(name, error, timeout_s), failure=_failure(f"tool {name}", error, turn))


def _told(name: str, error: BaseException, timeout_s: float) -> ToolOutcome:
    """What the agent is told of a call that went wrong."""
    if isinstance(error, user_code.CallTimeout):
        return ToolOutcome(output=f"error: {name} gave no result within {timeout_s:g} s", ok=False)
    if isinstance(error, ToolFault):
        return ToolOutcome(output=f"error: {name}: {user_code.error_text(error, 1000)}", ok=False)
    text = user_code.error_text(error, 300) if isinstance(error, InvalidOutcome) else user_code.describe_error(error)
    return ToolOutcome(output=f"error: {name} failed: {text}", ok=False)


def _failure(what: str, error: BaseException, turn: int) -> Failure:
    """The record of a call that went wrong: the policy's, for the arguments were."""
    kinds: dict[type[BaseException], str] = {user_code.CallTimeout: "tool_timeout", InvalidOutcome: "wrong_outcome"}
    known = error.kind if isinstance(error, ToolFault) else kinds.get(type(error))
    user_code.log_unexpected(what, error, trace=known is None)
    message = user_code.printable(f"{what}: {user_code.describe_error(error)}", 500)
    return Failure(stage="tool", blame=Blame.POLICY, kind=known or type(error).__name__[:64], message=message, turn=turn)


class _Watched(ForwardingSandbox):
    """The episode's sandbox as a tool has it. Remembers what a tool may hide: that the sandbox failed, and that a call to it was cut
    short by the tool's deadline or its own, after which a sandbox does not answer any more."""

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
