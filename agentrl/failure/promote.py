"""Promotes traces to regression cases. A case consists of the trace's frozen task and its origin.

The task of an imported trace is built from its messages, its tools with their recorded results, and a user-supplied correct answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.base.error_text import reason_text
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.failure.case import Baseline, Case, check_attempt_options, load_suite, own_threshold, save_case
from agentrl.failure.overlap import Overlap, WithheldTasks
from agentrl.failure.trace import CaptureReason, Trace, kind_of_task
from agentrl.records import EpisodeState, Message, SandboxSpec, Split, Task
from agentrl.records.fields import JsonObject
from agentrl.task.recorded_tools import RECORDED_TOOLS, RecordedCall, Recording

_MAX_TRUTHS = 64 << 20  # maximum bytes of a file of truths


@dataclass(frozen=True, slots=True, kw_only=True)
class UserParts:
    """User-supplied parts of a task that an imported trace does not contain."""

    verifiers: tuple[str, ...] = ()
    truths: Mapping[str, JsonObject | str | float | bool] = field(default_factory=dict)  # trace id -> correct answer
    truth_from: str = ""  # key in the traces' origin under which the correct answer is stored
    tools: tuple[str, ...] = ()  # plug-in references of stubs; empty means that the recorded results are used
    image: str = ""  # sandbox image, for stubs and verifiers that use a sandbox

    def truth_of(self, trace: Trace) -> Any:
        """Returns the correct answer to a trace's task; None if it is unknown."""
        return self.truths.get(trace.id, trace.origin.get(self.truth_from) if self.truth_from else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """The result of promoting one trace."""

    trace: str
    case: str  # the new case, or the existing case with which the task overlaps
    likeness: Overlap | None = None  # overlap with the existing case
    path: Path | None = None  # file of the new case; None if its task is in the suite already

    @property
    def summary(self) -> str:
        """A description of the result in one line."""
        if self.path is None:
            return f"{self.trace}: its task is already in the suite, as case {self.case}"
        twin = f" (a near duplicate of case {self.case}, which stays in the suite)" if self.likeness is not None else ""
        return f"{self.trace}: {self.path}{twin}"


def promote(
    traces: list[Trace],
    suite: Path,
    *,
    note: str = "",
    by: str = "",
    threshold: float | None = None,
    repeats: int | None = None,
    starts: Mapping[str, EpisodeState | None] = MappingProxyType({}),
    supplied: UserParts | None = None,
) -> list[Promotion]:
    """Adds a case for each trace to a suite, which is created if necessary. A task that is already in the suite is not added again.

    A case is compared only with cases that start with the same tokens.

    Args:
        note: reason for promoting the cases.
        by: who promotes them.
        threshold: mean score that the attempts at each case must reach; None means the threshold that the environment
            declares or, if it has the default, the evaluation's threshold. Must not be None if the environment has no threshold.
        repeats: attempts at each case in an evaluation; None means the suite's number.
        starts: trace id -> the state at which the trace's case starts; other cases start with their task.
        supplied: user-supplied parts for imported traces.

    If a trace cannot become a case, raises `UserError` before any case is written. Also raises the errors of `save_case`.
    """
    check_attempt_options(repeats=repeats, threshold=threshold)
    about: dict[str, Any] = {"note": note, "by": by, "threshold": threshold, "repeats": repeats}
    cases = [_case_from(trace, starts.get(trace.id), supplied or UserParts(), about) for trace in traces]
    known = list(load_suite(suite).cases) if any((suite / "cases").glob("*.json")) else []
    promoted: list[Promotion] = []
    for trace, case in zip(traces, cases, strict=True):
        comparable = WithheldTasks(other for other in known if _start_tokens(other) == _start_tokens(case))
        existing, overlap = comparable.match(case.task) or (None, None)
        if existing is not None and overlap is Overlap.SAME:
            promoted.append(Promotion(trace=trace.id, case=existing.id, likeness=overlap))
            continue
        path = save_case(suite, case)
        promoted.append(Promotion(trace=trace.id, case=case.id if existing is None else existing.id, likeness=overlap, path=path))
        known.append(case)
    return promoted


def task_from_trace(trace: Trace, supplied: UserParts) -> Task:
    """Builds the task of an imported trace. If parts are missing, raises a `UserError` that lists all of them."""
    messages = [utterance.message for utterance in trace.spoken]
    first = next((number for number, message in enumerate(messages) if message.role == "assistant"), len(messages))
    roles = ("system", "developer", "user")
    prompt = tuple(Message(role=message.role, content=message.content) for message in messages[:first] if message.role in roles)
    called, answered = any(message.tool_calls for message in messages), any(message.role == "tool" for message in messages)
    truth = supplied.truth_of(trace)
    missing = []
    if not any(message.role == "user" for message in prompt):
        missing.append("a user message before the agent's first message")
    if not supplied.verifiers:
        missing.append("a verifier: give --verifier, such as rewards.exact:exact")
    if truth is None:
        line = json.dumps({"trace": trace.id, "truth": "..."})
        missing.append(f"the correct answer: give --truths FILE with a line {line}, or --truth-from KEY")
    if not supplied.tools and called and not answered:
        missing.append("the results of its tools: give stubs with --tools module:attr")
    if missing:
        keys = f" (keys of its origin: {', '.join(sorted(trace.origin))})" if truth is None and trace.origin else ""
        raise UserError(
            printable(f"trace {trace.id} ({trace.source}) contains no task; missing: {'; '.join(missing)}{keys}", 2000),
            fix="add the missing options to the command",
        )
    tools = supplied.tools or ((RECORDED_TOOLS,) if called or trace.tools else ())
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
    """Returns a note about the user messages that the task does not include; empty if it includes all of them."""
    roles = [utterance.message.role for utterance in trace.spoken]
    later = sum(role == "user" for role in roles[roles.index("assistant") :]) if "assistant" in roles else 0
    return f"later messages of the user are excluded ({later}): a case contains only the user's first messages" if later else ""


def read_truths(path: Path) -> dict[str, Any]:
    """Returns a mapping trace id -> correct answer, read from lines such as {"trace": "...", "truth": "412"}.

    Raises `UserError` if the file cannot be read or a line is invalid. The error for an invalid line contains the line number.
    """
    truths: dict[str, Any] = {}
    try:
        lines = read_bytes(path, most=_MAX_TRUTHS).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason_text(error)}", fix="give a file with one truth per line") from None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text) if text.strip() else None
            if line is not None:
                truths[str(line["trace"])] = line["truth"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path}:{number} does not contain a truth", fix='write it as {"trace": "ID", "truth": "the correct answer"}'
            ) from None
    return truths


def _case_from(trace: Trace, start: EpisodeState | None, supplied: UserParts, about: Mapping[str, Any]) -> Case:
    """Returns the regression case for a trace.

    The case id is derived from the kind and key of the task (and the turn of `start`), so a task has one case. The baseline is the score of
    the policy that failed. Raises `UserError` if the trace has no task, if it records a fault, which says nothing about the policy, or if
    there is no threshold.
    """
    task = trace.task if trace.task is not None else task_from_trace(trace, supplied)
    if trace.why is CaptureReason.FAULT:
        raise UserError(
            f"trace {trace.id} records a fault of the infrastructure or the task, not a failure of the policy",
            fix="promote other traces: agentrl failures list RUN shows why each trace was captured",
        )
    kind = re.sub(r"[^A-Za-z0-9_]+", "-", kind_of_task(task)).strip("-_")[:40] or "case"
    origin = {key: value for key, value in trace.origin.items() if key != "audit"}
    origin |= {"trace": trace.id, "phase": trace.phase, "step": str(trace.step), "why": str(trace.why)}
    origin |= {"versions": " ".join(map(str, trace.versions))} | ({"by": about["by"]} if about["by"] else {})
    run = f"{trace.origin['run']}:" if "run" in trace.origin else ""
    if about["threshold"] is None:
        if task.pass_threshold is None:
            raise UserError(f"trace {trace.id}: its environment has no pass threshold", fix="give --threshold")
        about = {**about, "threshold": own_threshold(task)}
    return Case(
        id=f"{kind}-{task.key[:12]}" + (f"-t{start.turn_count + 1}" if start is not None else ""),
        task=task,
        trace=f"{run}{trace.id}",
        tags=trace.tags,
        origin=origin,
        baseline=_baseline(trace),
        start=start,
        **about,
    )


def _baseline(trace: Trace) -> Baseline | None:
    """Returns the score of the trace's attempt as a baseline; None if the attempt is unscored or several versions sampled it."""
    value = None if trace.score is None else trace.score.value
    if value is None or not math.isfinite(value) or len(trace.versions) > 1:
        return None
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Baseline(model=trace.origin.get("model", ""), version=next(iter(trace.versions), None), scores=(value,), at=at)


def _start_tokens(case: Case) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens with which a case starts; empty if it starts with its task."""
    if case.start is None:
        return ()
    return (*(ids for turn in case.start.trajectories[0].turns for ids in (turn.prompt_ids, turn.completion_ids)), *case.start.prompt_ids)


def _recording(trace: Trace) -> Recording:
    calls: list[RecordedCall] = []
    indices: dict[str, int] = {}  # id of a call -> its index in `calls`
    unanswered: list[int] = []  # indices of calls without a result, the oldest first
    for utterance in trace.spoken:
        for number, call in enumerate(utterance.message.tool_calls):
            if number < len(utterance.call_ids):
                indices[utterance.call_ids[number]] = len(calls)
            unanswered.append(len(calls))
            calls.append(RecordedCall(name=call.name, arguments=call.arguments, output="", failed=True))
        if utterance.message.role == "tool" and unanswered:
            index = indices.get(utterance.answers, unanswered[0])
            calls[index] = replace(calls[index], output=utterance.message.content, failed=utterance.failed)
            unanswered = [other for other in unanswered if other != index]
    answered = [call for number, call in enumerate(calls) if number not in unanswered]
    return Recording(tools=tuple(_schemas(trace, answered)), calls=tuple(answered))


def _schemas(trace: Trace, calls: Sequence[RecordedCall]) -> list[JsonObject]:
    """Returns the recorded schemas of a trace's tools. If a tool has no recorded schema, its schema is derived from its calls."""
    schemas: list[JsonObject] = [
        dict(tool) for tool in trace.tools if isinstance(tool.get("function"), dict) and tool["function"].get("name")
    ]
    known = {tool["function"]["name"] for tool in schemas}
    for name in dict.fromkeys(call.name for call in calls if call.name not in known):
        keys = dict.fromkeys(key for call in calls if call.name == name for key in call.arguments)
        parameters = {"type": "object", "properties": {key: {} for key in keys}}
        schemas.append({"type": "function", "function": {"name": name, "description": "", "parameters": parameters}})
    return schemas
