"""Builds a task from an imported trace: its prompt, its tools with their recorded results, and a truth that the user supplies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.failure.trace import Trace
from agentrl.records import Message, SandboxSpec, Split, Task
from agentrl.records.fields import JsonObject
from agentrl.task.recorded_tools import RECORDED_TOOLS, RecordedCall, Recording

_LARGEST = 64 << 20  # bytes of a file of truths


@dataclass(frozen=True, slots=True, kw_only=True)
class UserParts:
    """User-supplied parts of a task that an imported trace does not hold."""

    verifiers: tuple[str, ...] = ()
    truths: Mapping[str, JsonObject | str | float | bool] = field(default_factory=dict)  # trace id -> right answer
    truth_from: str = ""  # key of the traces' origin that holds the right answer
    tools: tuple[str, ...] = ()  # references of stubs; empty means the recorded results
    image: str = ""  # sandbox image, for stubs and verifiers that use a sandbox

    def truth_of(self, trace: Trace) -> Any:
        """The right answer to a trace's task; None if it is unknown."""
        return self.truths.get(trace.id, trace.origin.get(self.truth_from) if self.truth_from else None)


def task_from_trace(trace: Trace, supplied: UserParts) -> Task:
    """The task of a trace's agent. Raises a `UserError` that names everything that is supplied."""
    asked = [one.message for one in trace.spoken]
    first = next((number for number, one in enumerate(asked) if one.role == "assistant"), len(asked))
    prompt = tuple(Message(role=one.role, content=one.content) for one in asked[:first] if one.role in ("system", "developer", "user"))
    truth = supplied.truth_of(trace)
    lacks = [
        (not any(one.role == "user" for one in prompt), "what the user asked: no user message comes before the agent's first message"),
        (not supplied.verifiers, "a verifier: give --verifier, such as rewards.exact:exact"),
        (
            truth is None,
            f"the right answer: give --truths FILE with a line {json.dumps({'trace': trace.id, 'truth': '...'})}, or --truth-from KEY",
        ),
        (not supplied.tools and _called(trace) and not _answered(trace), "the results of its tools: give stubs with --tools module:attr"),
    ]
    if missing := [text for wrong, text in lacks if wrong]:
        keys = f" (keys of its origin: {', '.join(sorted(trace.origin))})" if truth is None and trace.origin else ""
        raise UserError(
            printable(f"trace {trace.id} ({trace.source}) holds no task; missing: {'; '.join(missing)}{keys}", 2000),
            fix="add the missing options to the command",
        )
    tools = supplied.tools or ((RECORDED_TOOLS,) if _called(trace) or trace.tools else ())
    data: dict[str, Any] = {"answer": truth, "kind": trace.source}
    if RECORDED_TOOLS in tools:
        data |= _recording(trace).data()
    return Task(
        id=f"imported-{trace.id}",
        family="imported",
        prompt=prompt,
        tools=tools,
        sandbox=SandboxSpec(image=supplied.image or "sandboxes/tables"),
        verifiers=supplied.verifiers,
        data=data,
        split=Split.HELDOUT,
    )


def describe_excluded_messages(trace: Trace) -> str:
    """A note on the user's messages that the task does not include; empty if it includes all of them."""
    roles = [one.message.role for one in trace.spoken]
    later = sum(role == "user" for role in roles[roles.index("assistant") :]) if "assistant" in roles else 0
    return f"{later} later messages of the user are excluded: a case holds only what the user asked first" if later else ""


def read_truths(path: Path) -> dict[str, Any]:
    """Reads trace id -> right answer from lines such as {"trace": "...", "truth": "412"}. Raises a `UserError` that names the line."""
    truths: dict[str, Any] = {}
    try:
        lines = read_bytes(path, most=_LARGEST).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}", fix="give a file of truths") from None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text) if text.strip() else None
            if line is not None:
                truths[str(line["trace"])] = line["truth"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path}:{number} is not a truth", fix='write it as {"trace": "ID", "truth": "the right answer"}') from None
    return truths


def _called(trace: Trace) -> bool:
    return any(one.message.tool_calls for one in trace.spoken)


def _answered(trace: Trace) -> bool:
    return any(one.message.role == "tool" for one in trace.spoken)


def _recording(trace: Trace) -> Recording:
    calls: list[RecordedCall] = []
    waiting: dict[str, int] = {}  # id of a call -> its index in `calls`
    open_: list[int] = []  # indices of calls without a result, the oldest first
    for one in trace.spoken:
        for number, call in enumerate(one.message.tool_calls):
            if number < len(one.call_ids):
                waiting[one.call_ids[number]] = len(calls)
            open_.append(len(calls))
            calls.append(RecordedCall(name=call.name, arguments=call.arguments, output="", failed=True))
        if one.message.role == "tool" and open_:
            place = waiting.get(one.answers, open_[0])
            calls[place] = replace(calls[place], output=one.message.content, failed=one.failed)
            open_ = [other for other in open_ if other != place]
    answered = [call for number, call in enumerate(calls) if number not in open_]
    return Recording(tools=tuple(_schemas(trace, answered)), calls=tuple(answered))


def _schemas(trace: Trace, calls: Sequence[RecordedCall]) -> list[JsonObject]:
    """The recorded schemas of the tools. For a tool without a schema, one is derived from its calls."""
    offered: list[JsonObject] = [dict(one) for one in trace.tools if isinstance(one.get("function"), dict) and one["function"].get("name")]
    known = {one["function"]["name"] for one in offered}
    for name in dict.fromkeys(call.name for call in calls if call.name not in known):
        keys = dict.fromkeys(key for call in calls if call.name == name for key in call.arguments)
        parameters = {"type": "object", "properties": {key: {} for key in keys}}
        offered.append({"type": "function", "function": {"name": name, "description": "", "parameters": parameters}})
    return offered
