"""Reads and writes ATIF, the Agent Trajectory Interchange Format (v1.0 to v1.8), which Harbor also reads and writes.

rfcs/0001-trajectory-format.md in the Harbor repository specifies the format, and the package `atif` contains models for it. A document
contains the steps of one agent and the documents of its sub-agents. Paths in a document are never opened. Written documents have version
1.8. Documents written for traces of agentrl's runs contain the exact token ids and logprobs. Values for which ATIF has no field are stored
in `extra.agentrl`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl import __version__
from agentrl.base.numbers import finite
from agentrl.errors import UserError
from agentrl.failure.formats import values
from agentrl.failure.formats.conversations import (
    Conversation,
    ConversationMessage,
    build_trace,
    conversations_of,
    is_single_conversation,
    unique_label,
)
from agentrl.failure.formats.values import Gaps, as_object, as_objects, as_string, format_time, object_or_empty, parse_time, printable_label
from agentrl.failure.trace import ImportedMessage, Trace
from agentrl.records import ToolCall, Turn

NAME = "atif"
EXTRA = "agentrl"
"""Key in `extra` under which values that have no ATIF field are stored."""
NEWEST = 8
SCHEMA = f"ATIF-v1.{NEWEST}"
"""Schema version of written documents."""
MAX_DEPTH = 16
"""Maximum number of sub-agent levels in one document."""
MAX_AGENTS = 10_000
UNKNOWN = "unknown"
"""Written as the name or version of an agent if that is unknown, because ATIF requires both."""

_VERSION = re.compile(r"ATIF-v1\.(\d{1,3})")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_SOURCES = {role: source for source, role in _ROLES.items()}
_COST_KEYS = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
_TOKEN_KEYS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def recognizes(document: Any) -> bool:
    """Whether a JSON document appears to be an ATIF document."""
    return isinstance(document, dict) and (
        str(document.get("schema_version", "")).upper().startswith("ATIF") or ("steps" in document and "agent" in document)
    )


def parse(document: Any, location: Mapping[str, str]) -> Trace:
    """Returns the trace in an ATIF document. Raises `ValueError` if the document is invalid (`UserError` if the version is unsupported)."""
    data = as_object(document, "the document")
    version = data.get("schema_version")
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None or int(match[1]) > NEWEST:
        found_version = f"has the schema_version {version[:40]!a}" if isinstance(version, str) else "has no schema_version"
        raise UserError(
            f"{found_version}; supported versions are ATIF-v1.0 to ATIF-v1.{NEWEST}", fix="export it again in one of these versions"
        )
    reader = _Reader()
    messages = list(reader.trajectory(data, "", 0))
    if not messages:
        raise ValueError("has no steps")
    gaps, agent = reader.gaps, object_or_empty(data.get("agent"))
    origin = values.build_origin(
        id=data.get("trajectory_id") or data.get("session_id"),
        session=data.get("session_id"),
        trajectory=data.get("trajectory_id"),
        agent=agent.get("name"),
        agent_version=agent.get("version"),
        model=agent.get("model_name"),
        schema=version,
        notes=data.get("notes"),
        started=reader.started.isoformat() if reader.started else "",
        **reader.sub_agents,
    )
    if isinstance(data.get("continued_trajectory_ref"), str):
        gaps.add(f"its continuation, which is in another file: {printable_label(data['continued_trajectory_ref'])}")
    if data.get("final_metrics") is not None or set(object_or_empty(data.get("extra"))) - {EXTRA}:
        gaps.add("final metrics and extra of the trajectory: they are not kept")
    if reader.untimed:
        gaps.add("time of a message", reader.untimed)
    tools = values.tool_schemas(agent.get("tool_definitions"), gaps)
    return build_trace(NAME, messages, {**location, **origin}, gaps, tools=tools)


@dataclass(slots=True)
class _Reader:
    """Reads one document and the documents of its sub-agents. The `at` arguments are positions for error messages."""

    gaps: Gaps = field(default_factory=Gaps)
    taken: dict[str, int] = field(default_factory=dict)  # agent labels in use; see `unique_label`
    sub_agents: dict[str, Any] = field(default_factory=dict)  # origin of sub-agents: "id:LABEL", "model:LABEL", "version:LABEL", ...
    started: datetime | None = None
    untimed: int = 0

    def trajectory(self, data: dict[str, Any], at: str, depth: int) -> Iterator[ImportedMessage]:
        """Yields the messages of a trajectory. A sub-agent's messages come before the tool result that refers to the sub-agent."""
        if depth > MAX_DEPTH or len(self.taken) >= MAX_AGENTS:
            raise ValueError(f"has more than {MAX_DEPTH} levels of sub-agents, or more than {MAX_AGENTS} agents")
        agent = self._agent(data, at, depth)
        children: dict[str, dict[str, Any]] = {}
        unreferenced: list[dict[str, Any]] = []
        for number, child in enumerate(as_objects(data.get("subagent_trajectories"), f"{at}subagent_trajectories")):
            id = child.get("trajectory_id")
            if isinstance(id, str) and id not in children:
                children[id] = child
            else:
                self.gaps.add(f"the caller of {at}subagent_trajectories[{number}]: its trajectory_id is missing or repeated")
                unreferenced.append(child)
        model = object_or_empty(data.get("agent")).get("model_name")
        for number, step in enumerate(as_objects(data.get("steps"), f"{at}steps"), start=1):
            if step.get("step_id") != number:
                self.gaps.add("step_id of a step: steps are numbered by position instead")
            yield from self._step(step, f"{at}step {number}", agent, model, children, depth)
        for child in [*children.values(), *unreferenced]:
            yield from self.trajectory(child, f"{at}sub-agent {printable_label(child.get('trajectory_id'))}: ", depth + 1)

    def _agent(self, data: Mapping[str, Any], at: str, depth: int) -> str:
        agent = as_object(data.get("agent"), f"{at}agent")
        name = printable_label(agent.get("name"))
        if not name:
            self.gaps.add("name of an agent")
        if depth == 0 and _extra(data).get("unnamed") is True:
            name = ""
        label = unique_label(name, self.taken)
        if depth:
            details = {"id": data.get("trajectory_id"), "session": data.get("session_id"), "name": name if name != label else ""}
            details |= {"model": agent.get("model_name"), "version": agent.get("version")}
            self.sub_agents |= {f"{key}:{label}": value for key, value in details.items()}
            if agent.get("tool_definitions"):
                self.gaps.add("schemas of a sub-agent's tools: only the first agent's are kept")
        return label

    def _step(
        self, step: dict[str, Any], at: str, agent: str, model: Any, children: dict[str, dict[str, Any]], depth: int
    ) -> Iterator[ImportedMessage]:
        role = _ROLES.get(as_string(step.get("source"), f"{at}: source"))
        if role is None:
            raise ValueError(f"{at}: source is not system, user or agent")
        extra = _extra(step)
        calls, ids = self._calls(step, at)
        self._note_gaps(step, model)
        seconds = self._seconds(step)
        if extra.get("bare") is not True:
            yield values.build_message(
                printable_label(extra.get("role"))[:40] or role,
                values.message_text(step.get("message"), f"{at}: message", self.gaps),
                calls=calls,
                call_ids=ids,
                reasoning=as_string(step.get("reasoning_content"), f"{at}: reasoning_content"),
                agent=printable_label(extra.get("agent")) or agent,
                at_s=seconds,
                gaps=self.gaps,
            )
        results = as_objects(as_object(step.get("observation"), f"{at}: observation").get("results"), f"{at}: results")
        for number, result in enumerate(results):
            yield from self._result(result, f"{at}: results[{number}]", agent, seconds, children, depth)

    def _calls(self, step: Mapping[str, Any], at: str) -> tuple[list[ToolCall], list[str]]:
        calls, ids = [], []
        for number, call in enumerate(as_objects(step.get("tool_calls"), f"{at}: tool_calls")):
            what = f"{at}: tool_calls[{number}]"
            calls.append(values.build_tool_call(call.get("function_name"), call.get("arguments"), what, self.gaps))
            generated = _extra(call).get("made_id") is True
            ids.append("" if generated else as_string(call.get("tool_call_id"), f"{what}.tool_call_id"))
        return calls, ids

    def _result(
        self, result: dict[str, Any], at: str, agent: str, seconds: float | None, children: dict[str, dict[str, Any]], depth: int
    ) -> Iterator[ImportedMessage]:
        refs = as_objects(result.get("subagent_trajectory_ref"), f"{at}.subagent_trajectory_ref")
        for ref in refs:
            id = ref.get("trajectory_id")
            child = children.pop(id, None) if isinstance(id, str) else None
            if child is not None:
                yield from self.trajectory(child, f"sub-agent {printable_label(id)}: ", depth + 1)
            else:
                where = printable_label(ref.get("trajectory_path") or id or ref.get("session_id"))
                self.gaps.add(f"a sub-agent's separate trajectory: {where}")
        extra = _extra(result)
        answers = as_string(result.get("source_call_id"), f"{at}.source_call_id") or as_string(extra.get("answers"), f"{at}.extra")
        if result.get("content") is None and not refs:
            self.gaps.add("content of a result")
        text = values.message_text(result.get("content"), f"{at}.content", self.gaps)
        at_s = extra.get("at_s")
        time = float(at_s) if isinstance(at_s, int | float) and abs(at_s) < 1e12 else seconds
        yield values.build_message("tool", text, answers=answers, failed=extra.get("failed") is True, agent=agent, at_s=time)

    def _seconds(self, step: Mapping[str, Any]) -> float | None:
        when = parse_time(step.get("timestamp"))
        if when is None:
            self.untimed += 1
            return None
        self.started = self.started or when
        return (when - self.started).total_seconds()

    def _note_gaps(self, step: Mapping[str, Any], model: Any) -> None:
        """Records as gaps the data of a step that a trace cannot contain."""
        metrics = object_or_empty(step.get("metrics"))
        if any(metrics.get(key) for key in _TOKEN_KEYS):
            self.gaps.add("exact tokens and logprobs of a step: they are not kept")
        if any(metrics.get(key) is not None for key in _COST_KEYS):
            self.gaps.add("token counts or cost of a step: they are not kept")
        if step.get("model_name") not in (None, model):
            self.gaps.add(f"model of single steps ({printable_label(step['model_name'])}): only the agent's is kept")
        if set(object_or_empty(step.get("extra"))) - {EXTRA}:
            self.gaps.add("extra of a step: it is not kept")
        if step.get("is_copied_context") is True:
            self.gaps.add("which steps are copied from another trajectory")
        if step.get("reasoning_effort") is not None:
            self.gaps.add("reasoning effort of a step: it is not kept")


def _extra(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that agentrl wrote into the `extra` field of an object."""
    return object_or_empty(object_or_empty(item.get("extra")).get(EXTRA))


def document(trace: Trace) -> dict[str, Any]:
    """Returns the ATIF document for a trace. A sub-agent's document is nested in its caller's document and has a unique id."""
    conversations = conversations_of(trace)
    if not conversations:
        return {"schema_version": SCHEMA, "agent": {"name": UNKNOWN, "version": UNKNOWN}, "steps": []}
    taken: dict[str, int] = {}
    ids = [_id(trace, conversation, first=number == 0, taken=taken) for number, conversation in enumerate(conversations)]
    refs: dict[int, dict[int, list[dict[str, Any]]]] = {}  # conversation -> index of a result -> the sub-agents that produced it
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
    """Returns, for each conversation, the index of the conversation whose document contains it.

    A conversation is stored in the document of its caller or, if it continues another conversation, in the document that contains the
    continued one. The document of the first conversation contains all other conversations that have no caller or would be nested too
    deeply.
    """
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


def _known(**fields: Any) -> dict[str, Any]:
    """Returns the fields whose values are not None, False or empty. Fields with the value 0 are included."""
    return {name: value for name, value in fields.items() if value or (value == 0 and value is not False)}


def _with_extra(written: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    return written | {"extra": {EXTRA: dict(extra)}} if extra else written


def _trajectory(trace: Trace, conversation: Conversation, id: str | None, ids: Sequence[str | None], *, first: bool) -> dict[str, Any]:
    """Returns the document of a conversation, without its steps."""
    origin, own, label, continues = trace.origin, trace.episode is not None, conversation.label, conversation.continues
    session = origin.get("session") or (trace.episode.id if trace.episode else "")
    version = origin.get("agent_version") if first else origin.get(f"version:{label}")
    written = _known(
        schema_version=SCHEMA,
        session_id=session if first else origin.get(f"session:{label}"),
        trajectory_id=id,
        agent=_known(
            name=conversation.name or origin.get(f"name:{label}") or label or origin.get("agent") or origin.get("service") or UNKNOWN,
            version=f"agentrl {__version__}" if own else version or UNKNOWN,
            model_name=origin.get("model") if first or own else origin.get(f"model:{label}"),
            tool_definitions=[dict(tool) for tool in trace.tools] if first else [],
        ),
        notes=origin.get("notes") if first else "",
    )
    extra = _known(
        unnamed=first and not own and is_single_conversation(trace.spoken),
        stop_reason=conversation.stop_reason,
        continues=None if continues is None else {"trajectory_id": ids[continues.trajectory], "turn": continues.turn},
    )
    return _with_extra(written, extra | (_trace_fields(trace) if first and own else {}))


def _trace_fields(trace: Trace) -> dict[str, Any]:
    """Returns the data that a trace of an agentrl run contains in addition to its messages: ids, answer, score and tags."""
    extra: dict[str, Any] = {"trace": trace.id, "why": str(trace.why), "phase": trace.phase, "step": trace.step}
    if trace.episode is not None:
        extra["task"] = {"id": trace.episode.task_id, "key": trace.episode.task_key}
        if trace.episode.answer is not None:
            extra["answer"] = trace.episode.answer
    if trace.score is not None:
        parts = {name: value for name, value in trace.score.parts.items() if math.isfinite(value)}
        extra["score"] = {"value": finite(trace.score.value), "parts": parts, "reason": trace.score.reason}
    extra["tags"] = [{"name": tag.name, "by": tag.by, "turn": tag.turn, "confidence": tag.confidence} for tag in trace.tags]
    return extra


def _steps(conversation: Conversation, refs: Mapping[int, list[dict[str, Any]]], started: datetime | None) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    call_ids: set[str] | None = None  # call ids that are valid in results of the newest step; None means any
    for index, one in enumerate(conversation.messages):
        if one.imported.message.role != "tool":
            steps.append(_step(one, len(steps) + 1, conversation.label, started))
            calls = steps[-1].get("tool_calls")
            call_ids = None if calls is None else {call["tool_call_id"] for call in calls if "extra" not in call}
            continue
        if not steps:
            steps.append(_with_extra({"step_id": 1, "source": "system", "message": ""}, {"bare": True}))
        results = steps[-1].setdefault("observation", {"results": []})["results"]
        results.append(_result(one, call_ids, steps[-1].get("timestamp"), refs.get(index, []), started))
    return steps


def _step(one: ConversationMessage, number: int, label: str, started: datetime | None) -> dict[str, Any]:
    message, calls = one.imported.message, one.imported.message.tool_calls
    source = "agent" if calls else _SOURCES.get(message.role, "system")  # in ATIF only agents call tools
    step = {"step_id": number, "source": source, **_known(timestamp=_timestamp(one.imported, started)), "message": message.content}
    step |= _known(
        reasoning_content=one.imported.reasoning if source == "agent" else "",
        tool_calls=[_call(one.imported, index, number) for index in range(len(calls))],
    )
    extra: dict[str, Any] = {} if _SOURCES.get(message.role) == source else {"role": message.role}
    if one.imported.agent != label:
        extra["agent"] = one.imported.agent
    if one.turn is not None:
        step |= _known(metrics=_metrics(one, one.turn), is_copied_context=one.inherited)
        versions = [[span.version, span.start, span.end] for span in one.turn.versions]
        extra |= {"turn": one.number, "finish_reason": one.turn.finish_reason, "versions": versions}
    return _with_extra(step, extra)


def _call(one: ImportedMessage, index: int, number: int) -> dict[str, Any]:
    call = one.message.tool_calls[index]
    id = one.call_ids[index] if index < len(one.call_ids) else ""
    written = {"tool_call_id": id or f"call_{number}_{index}", "function_name": call.name, "arguments": dict(call.arguments)}
    return _with_extra(written, _known(made_id=not id))


def _metrics(one: ConversationMessage, turn: Turn) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(one.context),
        "completion_tokens": len(turn.completion_ids),
        "prompt_token_ids": list(one.context),
        "completion_token_ids": list(turn.completion_ids),
    }
    extra = _known(forced=list(turn.forced))
    if all(map(math.isfinite, turn.logprobs)):
        metrics["logprobs"] = list(turn.logprobs)
    else:
        extra["logprobs"] = "omitted: not all of them are finite numbers"
    return _with_extra(metrics, extra)


def _result(
    one: ConversationMessage, call_ids: set[str] | None, timestamp: str | None, refs: list[dict[str, Any]], started: datetime | None
) -> dict[str, Any]:
    answer = one.imported
    named = call_ids is None or answer.answers in call_ids
    result = _known(source_call_id=answer.answers if named else "")
    if answer.message.content or not refs:
        result["content"] = answer.message.content
    extra = _known(answers="" if named else answer.answers, failed=answer.failed)
    if answer.at_s is not None and _timestamp(answer, started) != timestamp:
        extra["at_s"] = answer.at_s
    if one.result is not None:
        extra["wall_s"] = finite(one.result.wall_s)
    return _with_extra(result | _known(subagent_trajectory_ref=refs), extra)


def _timestamp(one: ImportedMessage, started: datetime | None) -> str | None:
    return None if started is None or one.at_s is None else format_time(started, one.at_s)
