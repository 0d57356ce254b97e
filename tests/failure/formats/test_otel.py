"""Spans: conversations read from exports of real instrumentations, and from invalid spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.failure.formats import UnreadableDocument, otel_conversations, read, read_all
from agentrl.failure.formats.otel import CAPTURE
from agentrl.failure.trace import Trace

DATA = Path(__file__).parent / "data"


def spoken_messages(trace: Trace) -> list[Any]:
    return [(entry.message, entry.call_ids, entry.answers) for entry in trace.spoken]


@pytest.mark.parametrize("name", ["otel_events", "otel_parts.jsonl", "otel_parts_events", "otel_openllmetry.jsonl"])
def test_every_emitter_gives_the_real_conversation(name: str) -> None:
    """The same agent as in openai.jsonl; up to v1.36 a repeated message with tool calls loses its text."""
    (trace,), errors = read_all(DATA / name)
    (expected, _), _ = read_all(DATA / "openai.jsonl")
    assert not errors and spoken_messages(trace) == spoken_messages(expected)
    times = [entry.at_s for entry in trace.spoken if entry.at_s is not None]
    assert len(times) == 8 and times == sorted(times) and times[0] == 0.0
    assert trace.origin["service"] == "support" and trace.origin["started"].startswith("20")


def test_agents_keep_their_names_and_tool_errors_are_kept() -> None:
    (trace,), _ = read_all(DATA / "otel_agents.jsonl")
    assert [(entry.agent, entry.message.role) for entry in trace.spoken] == [
        *(("desk", role) for role in ("system", "user", "assistant")),
        *(("checker", role) for role in ("system", "user", "assistant", "tool", "assistant")),  # before the answer that it led to
        *(("desk", role) for role in ("tool", "assistant")),
    ]
    assert [entry.failed for entry in trace.spoken if entry.message.role == "tool"] == [True, False]
    assert not trace.missing


def test_contents_that_were_not_captured_are_unreadable() -> None:
    for error in read(DATA / "otel_silent.jsonl"):
        assert isinstance(error, UnreadableDocument) and CAPTURE in error.fix and "trace" in error.position


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def span(id: int, parent: int = 0, operation: str = "chat", **fields: Any) -> dict[str, Any]:
    attributes = {"gen_ai.operation.name": operation, **{f"gen_ai.{name.replace('_', '.')}": value for name, value in fields.items()}}
    values = [
        {"key": key, "value": {"stringValue": item if isinstance(item, str) else json.dumps(item)}} for key, item in attributes.items()
    ]
    return {
        "traceId": "a" * 32, "spanId": f"{id:016x}", "parentSpanId": f"{parent:016x}" if parent else "", "attributes": values,
        "startTimeUnixNano": str(id * 10), "endTimeUnixNano": str(id * 10 + 5),
    }  # fmt: skip


def export(path: Path, *spans: Any) -> list[Trace | UnreadableDocument]:
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}))
    return list(read(path))


def test_spans_in_a_cycle_are_read_once(tmp_path: Path) -> None:
    spans = [span(number, number % 3 + 1, "invoke_agent", agent_name=f"agent{number}") for number in (1, 2, 3)]
    calls = [
        span(10 + number, number, input_messages=[text("user", f"q{number}")], output_messages=[text("assistant", "a")])
        for number in (1, 2, 3)
    ]
    loop = [{**span(20, 21), "attributes": []}, {**span(21, 20), "attributes": []}, span(22, 21, input_messages=[text("user", "q")])]
    (trace,) = export(tmp_path / "a.json", *spans, *calls, *loop)
    assert isinstance(trace, Trace) and len(trace.spoken) == 7
    assert {entry.agent for entry in trace.spoken} == {"", "agent1", "agent2", "agent3"}
    assert any("cycle" in gap for gap in trace.missing)


def test_deeply_nested_agents_are_all_read(tmp_path: Path) -> None:
    depth = otel_conversations.DEEPEST * 40
    agents = [span(number, number - 1, "invoke_agent", agent_name="a") for number in range(1, depth)]
    calls = [span(depth + number, number, input_messages=[text("user", str(number))]) for number in range(1, depth)]
    (trace,) = export(tmp_path / "a.json", *agents, *calls)
    assert isinstance(trace, Trace) and len({entry.agent for entry in trace.spoken}) == len(trace.spoken) == depth - 1


def test_duplicates_gaps_and_wrong_types_do_not_lose_the_rest(tmp_path: Path) -> None:
    good = span(1, input_messages=[text("user", "q")], output_messages=[text("assistant", "a")])
    cut = span(2, input_messages='[{"role": "user", "parts": [{"ty', output_messages=[text("assistant", "b")])
    odd = [7, {"traceId": "../x" * 40}, {**span(3), "attributes": 3}, {**good, "parentSpanId": "9" * 16}, {**span(4), "spanId": None}]
    failed = {**span(5, 99, input_messages=[text("user", "q"), text("assistant", "a"), text("user", "r")]), "status": {"code": 2}}
    imported = export(tmp_path / "a.json", good, good, cut, *odd, failed)
    (trace,) = [item for item in imported if isinstance(item, Trace)]
    errors = [item for item in imported if isinstance(item, UnreadableDocument)]
    assert len(errors) == len(odd) and "occurs twice with different parents" in str(errors[3]) and all(error.fix for error in errors)
    assert [entry.message.content for entry in trace.spoken] == ["q", "a", "r", "b"]  # each conversation separately
    for gap in ("cut by the emitter", "the call failed, error", "a span above others", "conversations of one agent"):
        assert any(gap in missing for missing in trace.missing), gap


def test_a_tool_span_gives_the_last_result_that_no_call_repeats(tmp_path: Path) -> None:
    answer = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}}]}
    chat_span = span(1, 9, input_messages=[text("user", "q")], output_messages=[answer])
    tool_span = {**span(2, 9, "execute_tool", tool_name="f", tool_call_id="x"), "status": {"code": 2}}
    tool_span["attributes"][-1] = {"key": "gen_ai.tool.call.id", "value": {"stringValue": "c"}}
    tool_span["attributes"].append({"key": "gen_ai.tool.call.result", "value": {"stringValue": "it broke"}})
    (trace,) = export(tmp_path / "a.json", chat_span, tool_span)
    assert isinstance(trace, Trace)
    last = trace.spoken[-1]
    assert (last.message.content, last.answers, last.failed) == ("it broke", "c", True)


def test_conversations_of_one_service_are_separated(tmp_path: Path) -> None:
    """Calls without other spans: each has its own trace id, and only the messages show which call continues which."""
    spans = []
    for number in range(6):
        talk, turn = divmod(number, 2) if number < 4 else (number, 0)
        history = [text("user", f"q{talk}"), text("assistant", "a"), text("user", "more")][: 1 + 2 * turn]
        chat = span(number + 1, input_messages=history, output_messages=[text("assistant", "a" if turn == 0 else "b")])
        spans.append({**chat, "traceId": f"{number:032x}"})
    traces = [item for item in export(tmp_path / "a.json", *spans) if isinstance(item, Trace)]
    assert [[entry.message.content for entry in trace.spoken] for trace in traces] == [
        ["q0", "a", "more", "b"], ["q1", "a", "more", "b"], ["q4", "a"], ["q5", "a"],
    ]  # fmt: skip


CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"order": 7}'}}
TALK = [
    ("user", {"content": "Where is 7?"}),
    ("assistant", {"content": "", "tool_calls": [CALLED]}),
    ("tool", {"id": "c1", "content": "on its way"}),
]
CHATS = [
    {"role": "user", "content": "Where is 7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "on its way"},
]
PARTS = [
    text("user", "Where is 7?"),
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"order": 7}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "on its way"}]},
]


def values(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": item if isinstance(item, str) else json.dumps(item)}} for key, item in attributes.items()]


def event(name: str, at: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "timeUnixNano": str(at), "attributes": values(fields)}


def record(name: str, at: int, body: Any = None, **fields: Any) -> dict[str, Any]:
    ids = {"traceId": "a" * 32, "spanId": f"{1:016x}", "timeUnixNano": str(at)}
    return (
        ids | {"attributes": values({"event.name": name, **fields})} | ({} if body is None else {"body": {"stringValue": json.dumps(body)}})
    )


def as_messages(make: Any, pack: Any) -> list[dict[str, Any]]:
    """One event per message, up to v1.36, where `make` puts the result of `pack`."""
    messages = [make(f"gen_ai.{role}.message", 20 + number, **pack({"role": role, **fields})) for number, (role, fields) in enumerate(TALK)]
    return [*messages, make("gen_ai.choice", 30, **pack({"index": 0, "message": {"content": "It is on its way."}}))]


DETAILED = {"gen_ai.input.messages": PARTS, "gen_ai.output.messages": [text("assistant", "It is on its way.")]}
ANSWER = [{"role": "assistant", "content": "It is on its way."}]
LOCATIONS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {  # attributes of the span, its events, log records
    "attributes with parts": (DETAILED, [], []),
    "attributes up to v1.27": ({"gen_ai.prompt": CHATS, "gen_ai.completion": ANSWER}, [], []),
    "one event with parts": ({}, [event("gen_ai.client.inference.operation.details", 20, **DETAILED)], []),
    "one record with parts": ({}, [], [record("gen_ai.client.inference.operation.details", 20, **DETAILED)]),
    "one record with parts in its body": ({}, [], [record("gen_ai.client.inference.operation.details", 20, DETAILED)]),
    "two events up to v1.27": (
        {},
        [
            event("gen_ai.content.prompt", 20, **{"gen_ai.prompt": CHATS}),
            event("gen_ai.content.completion", 30, **{"gen_ai.completion": ANSWER}),
        ],
        [],
    ),
    "events in plain attributes": ({}, as_messages(event, lambda fields: fields), []),
    "events with all of it in one attribute": ({}, as_messages(event, lambda fields: {"gen_ai.event.content": fields}), []),
    "records in their bodies": ({}, [], as_messages(record, lambda fields: {"body": fields})),
    "records in plain attributes": ({}, [], as_messages(record, lambda fields: fields)),
    "attributes, and the same in events": (DETAILED, as_messages(event, lambda fields: fields), []),
    "attributes, and the same in records": (DETAILED, [], as_messages(record, lambda fields: {"body": fields})),
}


@pytest.mark.parametrize("location", LOCATIONS)
def test_messages_of_all_generations_of_the_conventions_are_read(location: str, tmp_path: Path) -> None:
    attributes, events, records = LOCATIONS[location]
    chat = span(1)
    chat["attributes"] += values(attributes)
    document = {
        "resourceSpans": [{"scopeSpans": [{"spans": [{**chat, "events": events}]}]}],
        "resourceLogs": [{"scopeLogs": [{"logRecords": records}]}],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    (trace,) = read(tmp_path / "a.json")
    assert isinstance(trace, Trace), trace
    messages = [(entry.message.role, entry.message.content, entry.call_ids, entry.answers) for entry in trace.spoken]
    assert messages == [
        ("user", "Where is 7?", (), ""),
        ("assistant", "", ("c1",), ""),
        ("tool", "on its way", (), "c1"),
        ("assistant", "It is on its way.", (), ""),
    ]
    assert dict(trace.spoken[1].message.tool_calls[0].arguments) == {"order": 7}
    assert not [gap for gap in trace.missing if "answer of the model" in gap]


def test_invalid_events_do_not_lose_the_others(tmp_path: Path) -> None:
    good = span(1, input_messages=[text("user", "q")], output_messages=[text("assistant", "a")])
    odd = [
        7,
        {"name": 7},
        {"name": "gen_ai.user.message", "attributes": 3},
        {"name": "gen_ai.choice", "attributes": values({"index": 1})},
        {"name": "exception", "attributes": [{"key": "x", "value": 7}]},
    ]
    for invalid in odd:
        (tmp_path / "a.json").write_text(
            json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**good, "events": [invalid]}]}]}], "resourceLogs": []})
        )
        traces = [item for item in read(tmp_path / "a.json") if isinstance(item, Trace)]
        assert [[entry.message.content for entry in trace.spoken] for trace in traces] == [["q", "a"]], invalid
