"""Writes traces as ATIF documents, v1.8. Traces of agentrl's runs have exact token ids and logprobs. `extra.agentrl` contains what ATIF has
no field for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from agentrl import __version__
from agentrl.failure.formats.atif import EXTRA, MAX_DEPTH, NEWEST
from agentrl.failure.formats.conversations import Conversation, ConversationMessage, conversations_of, is_single_conversation, unique_label
from agentrl.failure.formats.values import format_time, parse_time
from agentrl.failure.trace import ImportedMessage, Trace

SCHEMA = f"ATIF-v1.{NEWEST}"
UNKNOWN = "unknown"
"""Name and version of an agent without one; ATIF requires both."""

_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


def document(trace: Trace) -> dict[str, Any]:
    """The ATIF document of a trace. A sub-agent's document is inside its caller's and has a unique id."""
    conversations = conversations_of(trace)
    if not conversations:
        return {**_header(UNKNOWN, None, ""), "agent": {"name": UNKNOWN, "version": UNKNOWN}, "steps": []}
    taken: dict[str, int] = {}
    ids = [_id(trace, conversation, first=number == 0, taken=taken) for number, conversation in enumerate(conversations)]
    refs: dict[int, dict[int, list[dict[str, Any]]]] = {}  # conversation -> index of a result -> the sub-agents behind it
    for conversation, id in zip(conversations, ids, strict=True):
        if conversation.parent is not None and conversation.answer is not None and id is not None:
            refs.setdefault(conversation.parent, {}).setdefault(conversation.answer, []).append({"trajectory_id": id})
    started = parse_time(trace.origin.get("started"))
    containers = _containers(conversations)
    documents: list[dict[str, Any]] = []
    for number, conversation in enumerate(conversations):
        written = _trajectory(trace, conversation, ids[number], ids, first=number == 0)
        written["steps"] = _steps(conversation, refs.get(number, {}), started)
        documents.append(written)
        if number:
            documents[containers[number]].setdefault("subagent_trajectories", []).append(written)
    return documents[0]


def _containers(conversations: Sequence[Conversation]) -> list[int]:
    """For each conversation, the one whose document contains it: its caller, or the container of the one that it continues. The first one
    contains those that are too deep or have no caller."""
    containers, levels = [0], [0]
    for conversation in conversations[1:]:
        container = conversation.parent or 0
        if conversation.continues is not None:
            container = containers[container]
        if levels[container] >= MAX_DEPTH:
            container = 0
        containers.append(container)
        levels.append(levels[container] + 1)
    return containers


def _id(trace: Trace, conversation: Conversation, *, first: bool, taken: dict[str, int]) -> str | None:
    known = trace.origin.get("trajectory", "") if first else trace.origin.get(f"id:{conversation.label}", "")
    if first and trace.episode is None:
        return known or None
    return unique_label(known or conversation.label or "agent", taken)


def _header(name: str, id: str | None, session: str) -> dict[str, Any]:
    ids = {key: value for key, value in (("session_id", session), ("trajectory_id", id)) if value}
    return {"schema_version": SCHEMA, **ids, "agent": {"name": name}}


def _trajectory(trace: Trace, conversation: Conversation, id: str | None, ids: Sequence[str | None], *, first: bool) -> dict[str, Any]:
    origin, own, label = trace.origin, trace.episode is not None, conversation.label
    fallback = origin.get("agent") or origin.get("service") or UNKNOWN
    session = (origin.get("session") or (trace.episode.id if trace.episode else "")) if first else origin.get(f"session:{label}", "")
    written = _header(conversation.name or origin.get(f"name:{label}") or label or fallback, id, session)
    version = origin.get("agent_version") if first else origin.get(f"version:{label}")
    model = origin.get("model") if first or own else origin.get(f"model:{label}")
    written["agent"]["version"] = f"agentrl {__version__}" if own else version or UNKNOWN
    if model:
        written["agent"]["model_name"] = model
    if first and trace.tools:
        written["agent"]["tool_definitions"] = [dict(tool) for tool in trace.tools]
    if first and origin.get("notes"):
        written["notes"] = origin["notes"]
    extra: dict[str, Any] = {}
    if first and not own and is_single_conversation(trace.spoken):
        extra["unnamed"] = True
    if conversation.stop_reason:
        extra["stop_reason"] = conversation.stop_reason
    if (continues := conversation.continues) is not None:
        extra["continues"] = {"trajectory_id": ids[continues.trajectory], "turn": continues.turn}
    if first and own:
        extra |= _trace_fields(trace)
    if extra:
        written["extra"] = {EXTRA: extra}
    return written


def _trace_fields(trace: Trace) -> dict[str, Any]:
    """The fields of a trace of an agentrl run that are not messages."""
    extra: dict[str, Any] = {"trace": trace.id, "why": str(trace.why), "phase": trace.phase, "step": trace.step}
    if trace.task is not None:
        extra["task"] = {"id": trace.task.id, "key": trace.task.key}
    if trace.episode is not None and trace.episode.answer is not None:
        extra["answer"] = trace.episode.answer
    if trace.score is not None:
        parts = {name: value for name, value in trace.score.parts.items() if math.isfinite(value)}
        extra["score"] = {"value": _finite(trace.score.value), "parts": parts, "reason": trace.score.reason}
    extra["tags"] = [{"name": tag.name, "by": tag.by, "turn": tag.turn, "confidence": tag.confidence} for tag in trace.tags]
    return extra


def _steps(conversation: Conversation, refs: Mapping[int, list[dict[str, Any]]], started: datetime | None) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    call_ids: set[str] | None = None  # ids that a result of the newest step may name; None means any
    for index, one in enumerate(conversation.messages):
        if one.imported.message.role != "tool":
            steps.append(_step(one, len(steps) + 1, conversation.label, started))
            calls = steps[-1].get("tool_calls")
            call_ids = None if calls is None else {call["tool_call_id"] for call in calls if "extra" not in call}
            continue
        if not steps:
            steps.append({"step_id": 1, "source": "system", "message": "", "extra": {EXTRA: {"bare": True}}})
        results = steps[-1].setdefault("observation", {"results": []})["results"]
        results.append(_result(one, call_ids, steps[-1].get("timestamp"), refs.get(index, []), started))
    return steps


def _step(one: ConversationMessage, number: int, label: str, started: datetime | None) -> dict[str, Any]:
    message = one.imported.message
    step: dict[str, Any] = {"step_id": number, "source": _SOURCES.get(message.role, "agent" if message.tool_calls else "system")}
    extra: dict[str, Any] = {} if message.role in _SOURCES else {"role": message.role}
    if one.imported.agent != label:
        extra["agent"] = one.imported.agent
    when = _timestamp(one.imported, started)
    step |= {"message": message.content} if when is None else {"timestamp": when, "message": message.content}
    if message.tool_calls and step["source"] != "agent":  # in a task's prompt; in ATIF only agents call tools
        step["source"], extra["role"] = "agent", message.role
    if one.imported.reasoning and step["source"] == "agent":
        step["reasoning_content"] = one.imported.reasoning
    if message.tool_calls:
        step["tool_calls"] = [_call(one.imported, index, number) for index in range(len(message.tool_calls))]
    if one.turn is not None:
        step["metrics"] = _metrics(one)
        extra |= {"turn": one.number, "finish_reason": one.turn.finish_reason}
        extra["versions"] = [[span.version, span.start, span.end] for span in one.turn.versions]
        if one.inherited:
            step["is_copied_context"] = True
    return step | ({"extra": {EXTRA: extra}} if extra else {})


def _call(one: ImportedMessage, index: int, number: int) -> dict[str, Any]:
    call = one.message.tool_calls[index]
    id = one.call_ids[index] if index < len(one.call_ids) else ""
    written = {"tool_call_id": id or f"call_{number}_{index}", "function_name": call.name, "arguments": dict(call.arguments)}
    return written if id else written | {"extra": {EXTRA: {"made_id": True}}}


def _metrics(one: ConversationMessage) -> dict[str, Any]:
    turn = one.turn
    assert turn is not None
    metrics: dict[str, Any] = {
        "prompt_tokens": len(one.context),
        "completion_tokens": len(turn.completion_ids),
        "prompt_token_ids": list(one.context),
        "completion_token_ids": list(turn.completion_ids),
    }
    if all(map(math.isfinite, turn.logprobs)):
        metrics["logprobs"] = list(turn.logprobs)
    else:
        metrics["extra"] = {EXTRA: {"logprobs": "omitted: not all of them are finite numbers"}}
    if turn.forced:
        metrics.setdefault("extra", {EXTRA: {}})[EXTRA]["forced"] = list(turn.forced)
    return metrics


def _result(
    one: ConversationMessage, call_ids: set[str] | None, timestamp: str | None, refs: list[dict[str, Any]], started: datetime | None
) -> dict[str, Any]:
    answer = one.imported
    extra: dict[str, Any] = {}
    result: dict[str, Any] = {}
    if answer.answers and (call_ids is None or answer.answers in call_ids):
        result["source_call_id"] = answer.answers
    elif answer.answers:
        extra["answers"] = answer.answers
    if answer.message.content or not refs:
        result["content"] = answer.message.content
    if refs:
        result["subagent_trajectory_ref"] = refs
    if answer.failed:
        extra["failed"] = True
    if answer.at_s is not None and _timestamp(answer, started) != timestamp:
        extra["at_s"] = answer.at_s
    if one.result is not None:
        extra["wall_s"] = _finite(one.result.wall_s)
    return result | ({"extra": {EXTRA: extra}} if extra else {})


def _timestamp(one: ImportedMessage, started: datetime | None) -> str | None:
    return None if started is None or one.at_s is None else format_time(started, one.at_s)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
