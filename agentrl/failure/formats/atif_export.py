"""Traces as ATIF documents, v1.8. Our own come with exact token ids and logprobs; what ATIF has no field for lies in `extra.agentrl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from agentrl import __version__
from agentrl.failure.formats.atif import DEEPEST, NEWEST, OURS
from agentrl.failure.formats.conversations import Conversation, ConversationMessage, conversations_of, is_single_conversation, unique_label
from agentrl.failure.formats.values import format_time, parse_time
from agentrl.failure.trace import ImportedMessage, Trace

SCHEMA = f"ATIF-v1.{NEWEST}"
UNKNOWN = "unknown"
"""Name and version of an agent that a trace does not name; ATIF demands both."""

_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


def document(trace: Trace) -> dict[str, Any]:
    """The ATIF document of a trace. Sub-agents lie inside of the agent that called them, each with an id of its own."""
    found = conversations_of(trace)
    taken: dict[str, int] = {}
    ids = [_id(trace, line, first=number == 0, taken=taken) for number, line in enumerate(found)]
    refs: dict[int, dict[int, list[dict[str, Any]]]] = {}  # line -> place of an answer -> what came of it
    for line, id in zip(found, ids, strict=True):
        if line.parent is not None and line.answer is not None and id is not None:
            refs.setdefault(line.parent, {}).setdefault(line.answer, []).append({"trajectory_id": id})
    started = parse_time(trace.origin.get("started"))
    homes = _homes(found)
    made: list[dict[str, Any]] = []
    for number, line in enumerate(found):
        whole = _trajectory(trace, line, ids[number], ids, first=number == 0)
        whole["steps"] = _steps(line, refs.get(number, {}), started)
        made.append(whole)
        if number:
            made[homes[number]].setdefault("subagent_trajectories", []).append(whole)
    return made[0] if made else {**_head(UNKNOWN, None, ""), "agent": {"name": UNKNOWN, "version": UNKNOWN}, "steps": []}


def _homes(found: Sequence[Conversation]) -> list[int]:
    """For each line the one whose document holds its own: who called it. One that goes on from another lies beside that, however many
    do so; and those too deep to be read again, or called by nobody, lie in the first."""
    homes, levels = [0], [0]
    for line in found[1:]:
        home = line.parent or 0
        if line.continues is not None:
            home = homes[home]
        if levels[home] >= DEEPEST:
            home = 0
        homes.append(home)
        levels.append(levels[home] + 1)
    return homes


def _id(trace: Trace, line: Conversation, *, first: bool, taken: dict[str, int]) -> str | None:
    known = trace.origin.get("trajectory", "") if first else trace.origin.get(f"id:{line.label}", "")
    if first and trace.episode is None:
        return known or None
    return unique_label(known or line.label or "agent", taken)


def _head(name: str, id: str | None, session: str) -> dict[str, Any]:
    given = {"session_id": session, "trajectory_id": id}
    return {"schema_version": SCHEMA, **{key: value for key, value in given.items() if value}, "agent": {"name": name}}


def _trajectory(trace: Trace, line: Conversation, id: str | None, ids: Sequence[str | None], *, first: bool) -> dict[str, Any]:
    origin, own = trace.origin, trace.episode is not None
    fallback = origin.get("agent") or origin.get("service") or UNKNOWN
    session = (origin.get("session") or (trace.episode.id if trace.episode else "")) if first else origin.get(f"session:{line.label}", "")
    whole = _head(line.name or origin.get(f"name:{line.label}") or line.label or fallback, id, session)
    version = origin.get("agent_version") if first else origin.get(f"version:{line.label}")
    model = origin.get("model") if first or own else origin.get(f"model:{line.label}")
    whole["agent"]["version"] = f"agentrl {__version__}" if own else version or UNKNOWN
    if model:
        whole["agent"]["model_name"] = model
    if first and trace.tools:
        whole["agent"]["tool_definitions"] = [dict(tool) for tool in trace.tools]
    if first and origin.get("notes"):
        whole["notes"] = origin["notes"]
    ours: dict[str, Any] = {}
    if first and not own and is_single_conversation(trace.spoken):
        ours["unnamed"] = True
    if line.stop_reason:
        ours["stop_reason"] = line.stop_reason
    if line.continues is not None:
        ours["continues"] = {"trajectory_id": ids[line.continues.trajectory], "turn": line.continues.turn}
    if first and own:
        ours |= _about(trace)
    if ours:
        whole["extra"] = {OURS: ours}
    return whole


def _about(trace: Trace) -> dict[str, Any]:
    """What our own trace says besides what was said."""
    about: dict[str, Any] = {"trace": trace.id, "why": str(trace.why), "phase": trace.phase, "step": trace.step}
    if trace.task is not None:
        about["task"] = {"id": trace.task.id, "key": trace.task.key}
    if trace.episode is not None and trace.episode.answer is not None:
        about["answer"] = trace.episode.answer
    if trace.score is not None:
        parts = {name: value for name, value in trace.score.parts.items() if math.isfinite(value)}
        about["score"] = {"value": _finite(trace.score.value), "parts": parts, "reason": trace.score.reason}
    about["tags"] = [{"name": tag.name, "by": tag.by, "turn": tag.turn, "confidence": tag.confidence} for tag in trace.tags]
    return about


def _steps(line: Conversation, refs: Mapping[int, list[dict[str, Any]]], started: datetime | None) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    called: set[str] | None = None  # ids that a result of the newest step may name; None: any
    for place, one in enumerate(line.messages):
        if one.imported.message.role != "tool":
            steps.append(_step(one, len(steps) + 1, line.label, started))
            calls = steps[-1].get("tool_calls")
            called = None if calls is None else {call["tool_call_id"] for call in calls if "extra" not in call}
            continue
        if not steps:
            steps.append({"step_id": 1, "source": "system", "message": "", "extra": {OURS: {"bare": True}}})
        results = steps[-1].setdefault("observation", {"results": []})["results"]
        results.append(_result(one, called, steps[-1].get("timestamp"), refs.get(place, []), started))
    return steps


def _step(one: ConversationMessage, number: int, label: str, started: datetime | None) -> dict[str, Any]:
    told = one.imported.message
    step: dict[str, Any] = {"step_id": number, "source": _SOURCES.get(told.role, "agent" if told.tool_calls else "system")}
    ours: dict[str, Any] = {} if told.role in _SOURCES else {"role": told.role}
    if one.imported.agent != label:
        ours["agent"] = one.imported.agent
    when = _when(one.imported, started)
    step |= {"message": told.content} if when is None else {"timestamp": when, "message": told.content}
    if told.tool_calls and step["source"] != "agent":  # of a task's prompt: only agents call tools in ATIF
        step["source"], ours["role"] = "agent", told.role
    if one.imported.reasoning and step["source"] == "agent":
        step["reasoning_content"] = one.imported.reasoning
    if told.tool_calls:
        step["tool_calls"] = [_call(one.imported, at, number) for at in range(len(told.tool_calls))]
    if one.turn is not None:
        step["metrics"] = _metrics(one)
        ours |= {"turn": one.number, "finish_reason": one.turn.finish_reason}
        ours["versions"] = [[span.version, span.start, span.end] for span in one.turn.versions]
        if one.inherited:
            step["is_copied_context"] = True
    return step | ({"extra": {OURS: ours}} if ours else {})


def _call(one: ImportedMessage, at: int, number: int) -> dict[str, Any]:
    made = one.message.tool_calls[at]
    id = one.call_ids[at] if at < len(one.call_ids) else ""
    written = {"tool_call_id": id or f"call_{number}_{at}", "function_name": made.name, "arguments": dict(made.arguments)}
    return written if id else written | {"extra": {OURS: {"made_id": True}}}


def _metrics(one: ConversationMessage) -> dict[str, Any]:
    assert one.turn is not None
    prompt = [*one.context]
    metrics: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(one.turn.completion_ids),
        "prompt_token_ids": prompt,
        "completion_token_ids": list(one.turn.completion_ids),
    }
    if all(map(math.isfinite, one.turn.logprobs)):
        metrics["logprobs"] = list(one.turn.logprobs)
    else:
        metrics["extra"] = {OURS: {"logprobs": "left out: not all of them are finite numbers"}}
    if one.turn.forced:
        metrics.setdefault("extra", {OURS: {}})[OURS]["forced"] = list(one.turn.forced)
    return metrics


def _result(
    one: ConversationMessage, called: set[str] | None, stamp: str | None, refs: list[dict[str, Any]], started: datetime | None
) -> dict[str, Any]:
    told = one.imported
    ours: dict[str, Any] = {}
    named = bool(told.answers) and (called is None or told.answers in called)
    result: dict[str, Any] = {"source_call_id": told.answers} if named else {}
    if told.answers and not result:
        ours["answers"] = told.answers
    if told.message.content or not refs:
        result["content"] = told.message.content
    if refs:
        result["subagent_trajectory_ref"] = refs
    if told.failed:
        ours["failed"] = True
    if told.at_s is not None and _when(told, started) != stamp:
        ours["at_s"] = told.at_s
    if one.result is not None:
        ours["wall_s"] = _finite(one.result.wall_s)
    return result | ({"extra": {OURS: ours}} if ours else {})


def _when(one: ImportedMessage, started: datetime | None) -> str | None:
    return None if started is None or one.at_s is None else format_time(started, one.at_s)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
