"""Files that somebody else's agent left: chat messages, spans, trajectories. Whatever is read can be stored, and written as ATIF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats import UnreadableDocument, read, write
from agentrl.failure.trace import Trace
from agentrl.records import codec
from tests.fuzz import mutators
from tests.fuzz.target import Check, Target, must, one_in


def prepare(scratch: Path) -> Check:
    file, again = scratch / "traces.jsonl", scratch / "again.jsonl"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        traces = []
        try:
            for one in read(file):
                if isinstance(one, UnreadableDocument):
                    _check_told(one)
                else:
                    traces.append(one)
        except UserError as error:
            must(bool(str(error)), "an error that says nothing")
        for trace in traces:
            must(codec.from_json(Trace, codec.to_json(trace)) == trace, "a trace is read back as another one")
            must(trace.id.replace("-", "").isalnum(), "a trace's id is no name")
        if traces and one_in(4, data):
            _check_written(traces, again)

    return check


def _check_told(one: UnreadableDocument) -> None:
    text = str(one)
    must(bool(one.fix) and len(text) < 4000, "an error without advice, or without end")
    must(all(letter.isprintable() or letter == "\n" for letter in text), "a message that a terminal obeys")


def _check_written(traces: Sequence[Trace], file: Path) -> None:
    """What is exported says the same once it is imported."""
    for format in ("openai", "atif"):
        write(traces, file, format=format)
    back = [one for one in read(file, "atif") if isinstance(one, Trace)]
    must({_said(trace) for trace in traces} == {_said(trace) for trace in back}, "an exported trace says something else")


def _said(trace: Trace) -> str:
    """What was said in a trace, in the order in which it was said."""
    told = [(one.message, one.answers, one.failed, one.call_ids, one.reasoning) for one in trace.spoken]
    return codec.to_json(told).decode()


def _otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    service = {"attributes": [{"key": "service.name", "value": {"stringValue": "s"}}]}
    return {"resourceSpans": [{"resource": service, "scopeSpans": [{"spans": list(spans)}]}]}


def _span(id: str, parent: str, operation: str, start: int, **attributes: Any) -> dict[str, Any]:
    told = {"gen_ai.operation.name": operation, **{f"gen_ai.{name.replace('_', '.')}": value for name, value in attributes.items()}}
    values = [{"key": key, "value": {"stringValue": value if isinstance(value, str) else json.dumps(value)}} for key, value in told.items()]
    return {
        "traceId": "ab" * 16,
        "spanId": id * 8,
        "parentSpanId": parent * 8,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + 5),
        "attributes": values,
        "status": {"code": 2} if operation == "execute_tool" else {},
    }


def seeds() -> Sequence[bytes]:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "é"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "content": "done", "name": "b"},
    ]
    asks = {"role": "user", "parts": [{"type": "text", "content": "q"}]}
    calls = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "ask", "arguments": {"a": 1}}]}
    told = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "r"}]}
    ends = {"role": "assistant", "parts": [{"type": "text", "content": "e"}, {"type": "reasoning", "content": "t"}]}
    spans = _otlp(
        _span("a1", "", "invoke_agent", 1, agent_name="desk"),
        _span("b1", "a1", "chat", 2, input_messages=[asks], output_messages=[calls], conversation_id="k"),
        _span("c1", "a1", "execute_tool", 3, tool_name="ask"),
        _span("d1", "c1", "invoke_agent", 4, agent_name="helper"),
        _span("e1", "d1", "chat", 5, input_messages=[asks], output_messages=[ends]),
        _span("f1", "a1", "chat", 9, input_messages=[asks, calls, told], output_messages=[ends]),
    )
    body = {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": "q"}}]}}
    names = [[{"key": "event.name", "value": {"stringValue": f"gen_ai.{name}"}}] for name in ("user.message", "choice")]
    ids = {"traceId": "cd" * 16, "spanId": "ab" * 8, "timeUnixNano": "5"}
    said = {"kvlistValue": {"values": [{"key": "message", "value": body}]}}
    logs = {
        "resourceLogs": [
            {"scopeLogs": [{"logRecords": [{**ids, "attributes": names[0], "body": body}, {**ids, "attributes": names[1], "body": said}]}]}
        ]
    }
    agent = {"name": "desk", "version": "1", "model_name": "m"}
    inner = {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": "i",
        "agent": agent,
        "steps": [{"step_id": 1, "source": "user", "message": "q"}],
    }
    result = {"source_call_id": "c", "content": "r", "subagent_trajectory_ref": [{"trajectory_id": "i"}]}
    steps = [
        {"step_id": 1, "source": "user", "message": "q", "timestamp": "2025-10-16T14:30:00Z"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "m",
            "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {}}],
            "observation": {"results": [result]},
        },
    ]
    atif = {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": agent, "steps": steps, "subagent_trajectories": [inner]}
    lines = [chat, {"messages": chat, "tools": [{"type": "function", "function": {"name": "find"}}]}, spans, logs, atif]
    return [json.dumps(line).encode() for line in lines] + [b"\n".join(json.dumps(line).encode() for line in lines)]


def _mutated(data: bytes, chance: Random) -> bytes:
    """A change of one line, or of their order."""
    if b"\n" not in data.strip():
        return mutators.json_text(data, chance)
    if chance.random() < 0.2:
        return mutators.lines(data, chance)
    rows = data.split(b"\n")
    at = chance.randrange(len(rows))
    rows[at] = mutators.json_text(rows[at], chance)
    return b"\n".join(rows)


target = Target(
    name="traces",
    about="files of somebody else's agents: chat messages, spans, trajectories",
    prepare=prepare,
    seeds=seeds,
    brief=2_500,
    mutate=_mutated,
    words=tuple(
        word.encode()
        for word in (
            *(
                '"schema_version"',
                '"ATIF-v1.9"',
                '"steps"',
                '"subagent_trajectories"',
                '"trajectory_id"',
                '"resourceSpans"',
                '"resourceLogs"',
            ),
            *(
                '"resourceLogs"',
                '"parentSpanId"',
                '"kvlistValue"',
                '"arrayValue"',
                '"messages"',
                '"tool_calls"',
                '"function_call"',
                '"choices"',
                '"parts"',
            ),
            *(
                '"__unparsed__"',
                '"bare"',
                '"unnamed"',
                '"made_id"',
                '"role"',
                "NaN",
                "\\ud83d",
                "2025-10-16T14:30:00Z",
                "9999-12-31T23:59:59Z",
            ),
        )
    ),
)
