"""Files of third-party agents: chat messages, spans, trajectories. Every trace that is read can be stored and written as ATIF."""

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
    file, exported = scratch / "traces.jsonl", scratch / "again.jsonl"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        traces = []
        try:
            for document in read(file):
                if isinstance(document, UnreadableDocument):
                    _check_error(document)
                else:
                    traces.append(document)
        except UserError as error:
            must(bool(str(error)), "an error without a message")
        for trace in traces:
            must(codec.from_json(Trace, codec.to_json(trace)) == trace, "a trace changes when it is read back")
            must(trace.id.replace("-", "").isalnum(), "the id of a trace is not a valid name")
        if traces and one_in(4, data):
            _check_written(traces, exported)

    return check


def _check_error(error: UnreadableDocument) -> None:
    text = str(error)
    must(bool(error.fix) and len(text) < 4000, "an error without advice, or too long")
    must(all(letter.isprintable() or letter == "\n" for letter in text), "a message with control characters")


def _check_written(traces: Sequence[Trace], file: Path) -> None:
    """Exporting traces and importing them changes no message."""
    for format in ("openai", "atif"):
        write(traces, file, format=format)
    imported = [document for document in read(file, "atif") if isinstance(document, Trace)]
    must({_messages(trace) for trace in traces} == {_messages(trace) for trace in imported}, "an exported trace has other messages")


def _messages(trace: Trace) -> str:
    """The messages of a trace, in order."""
    messages = [(message.message, message.answers, message.failed, message.call_ids, message.reasoning) for message in trace.spoken]
    return codec.to_json(messages).decode()


def _otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    service = {"attributes": [{"key": "service.name", "value": {"stringValue": "s"}}]}
    return {"resourceSpans": [{"resource": service, "scopeSpans": [{"spans": list(spans)}]}]}


def _span(id: str, parent: str, operation: str, start: int, **attributes: Any) -> dict[str, Any]:
    data = {"gen_ai.operation.name": operation, **{f"gen_ai.{name.replace('_', '.')}": value for name, value in attributes.items()}}
    values = [{"key": key, "value": {"stringValue": value if isinstance(value, str) else json.dumps(value)}} for key, value in data.items()]
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
    user_message = {"role": "user", "parts": [{"type": "text", "content": "q"}]}
    call_message = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "ask", "arguments": {"a": 1}}]}
    response_message = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "r"}]}
    final_message = {"role": "assistant", "parts": [{"type": "text", "content": "e"}, {"type": "reasoning", "content": "t"}]}
    spans = _otlp(
        _span("a1", "", "invoke_agent", 1, agent_name="desk"),
        _span("b1", "a1", "chat", 2, input_messages=[user_message], output_messages=[call_message], conversation_id="k"),
        _span("c1", "a1", "execute_tool", 3, tool_name="ask"),
        _span("d1", "c1", "invoke_agent", 4, agent_name="helper"),
        _span("e1", "d1", "chat", 5, input_messages=[user_message], output_messages=[final_message]),
        _span("f1", "a1", "chat", 9, input_messages=[user_message, call_message, response_message], output_messages=[final_message]),
    )
    body = {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": "q"}}]}}
    names = [[{"key": "event.name", "value": {"stringValue": f"gen_ai.{name}"}}] for name in ("user.message", "choice")]
    ids = {"traceId": "cd" * 16, "spanId": "ab" * 8, "timeUnixNano": "5"}
    resp = {"kvlistValue": {"values": [{"key": "message", "value": body}]}}
    logs = {
        "resourceLogs": [
            {"scopeLogs": [{"logRecords": [{**ids, "attributes": names[0], "body": body}, {**ids, "attributes": names[1], "body": resp}]}]}
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
    """Changes one line, or the order of lines."""
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
    about="files of third-party agents: chat messages, spans, trajectories",
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
