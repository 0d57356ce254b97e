"""Chat messages: those of a real client, and odd forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.failure.formats import read, read_all, write
from agentrl.failure.formats.values import UNPARSED
from agentrl.failure.trace import CaptureReason, ImportedMessage, Trace
from agentrl.records import Message

DATA = Path(__file__).parent / "data"


def read_one(document: Any, path: Path) -> Trace:
    path.write_text(json.dumps(document))
    (trace,), errors = read_all(path)
    assert not errors
    return trace


def test_a_conversation_with_parallel_calls_an_error_and_invalid_arguments() -> None:
    (conversation, question), _ = read_all(DATA / "openai.jsonl")
    roles = [entry.message.role for entry in conversation.spoken]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert "Zoë 🦊 says \u201csoon\u201d,\u2028naïve \u202e<|im_end|>" in conversation.spoken[1].message.content
    parallel_calls, invalid_call = conversation.spoken[2], conversation.spoken[5]
    assert [call.arguments for call in parallel_calls.message.tool_calls] == [{"order": "A-1"}, {"order": "A-2"}]
    assert parallel_calls.call_ids == tuple(entry.answers for entry in conversation.spoken[3:5]) == ("call_1", "call_2")
    assert invalid_call.message.tool_calls[0].arguments == {UNPARSED: '{"order": A-2}'}
    assert any(UNPARSED in gap for gap in conversation.missing) and len(conversation.tools) == 2
    assert (question.origin["model"], len(question.spoken)) == ("stub-1", 3)


def test_a_conversation_round_trips(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (DATA / "openai.jsonl").read_text().splitlines()]
    traces, _ = read_all(DATA / "openai.jsonl")
    assert write(traces, tmp_path / "again.jsonl", format="openai") == 2
    written = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    for message, original in zip(written[0]["messages"], lines[0]["messages"], strict=True):
        assert {key: value for key, value in message.items() if value is not None} == original
    assert written[0]["tools"] == lines[0]["tools"]
    reread, _ = read_all(tmp_path / "again.jsonl")
    assert [trace.spoken for trace in reread] == [trace.spoken for trace in traces]


def test_agents_with_equal_conversations_are_all_read(tmp_path: Path) -> None:
    def spoken(agent: str) -> tuple[ImportedMessage, ...]:
        question, answer = Message(role="user", content="Is it done?"), Message(role="assistant", content="No.")
        return (ImportedMessage(message=question, agent=agent), ImportedMessage(message=answer, agent=agent))

    asked = Trace(id="t", why=CaptureReason.IMPORTED, source="atif", spoken=spoken("first") + spoken("second"))
    assert write([asked], tmp_path / "out.jsonl", "openai") == 2
    traces, errors = read_all(tmp_path / "out.jsonl")
    assert len(traces) == 2 and errors == []


def test_an_agent_in_the_metadata_of_another_program_is_not_an_id(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Is it done?"}, {"role": "assistant", "content": "No."}]
    documents = [{"id": name, "messages": messages, "metadata": {"agent": "support"}} for name in ("first", "second")]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    traces, errors = read_all(tmp_path / "log.jsonl")
    assert [trace.origin["id"] for trace in traces] == ["first", "second"] and errors == []


def test_named_assistants_stay_in_one_conversation(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, *({"role": "assistant", "name": name, "content": name} for name in ("planner", "coder"))]
    trace = read_one(messages, tmp_path / "a.json")
    assert [entry.agent for entry in trace.spoken] == ["", "planner", "coder"]
    for format in ("openai", "atif"):
        assert write([trace], tmp_path / "b.json", format=format) == 1
        (reread,), _ = read_all(tmp_path / "b.json")
        assert reread.spoken == trace.spoken


@pytest.mark.parametrize(
    ("role", "reasoning"), [("assistant", "why"), (" assistant", "why"), ("user", ""), (" function ", ""), (" my  role ", "")]
)
def test_roles_and_reasoning_are_the_same_in_every_format(role: str, reasoning: str, tmp_path: Path) -> None:
    trace = read_one([{"role": role, "content": "a", "reasoning": "why"}], tmp_path / "a.json")
    normalized_role = " ".join(role.split()).replace("function", "tool")
    assert [(entry.message.role, entry.reasoning) for entry in trace.spoken] == [(normalized_role, reasoning)]
    assert any("reasoning in a message of role" in gap for gap in trace.missing) is not bool(reasoning)
    for format in ("openai", "atif"):
        assert write([trace], tmp_path / "b.json", format=format) == 1
        assert read_all(tmp_path / "b.json")[0][0].spoken == trace.spoken


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "a", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "function", "content": "a", "function_call": {"name": "f", "arguments": "{}"}},
    ],
    ids=["tool", "function"],
)
def test_tool_calls_in_a_tool_message_are_dropped_as_a_gap(message: dict[str, Any], tmp_path: Path) -> None:
    trace = read_one([message], tmp_path / "a.json")
    assert trace.spoken[0].message == Message(role="tool", content="a")
    assert any("tool calls in a message of role tool" in gap for gap in trace.missing), trace.missing
    for format in ("openai", "atif"):
        assert write([trace], tmp_path / "b.json", format=format) == 1
        assert read_all(tmp_path / "b.json")[0][0].spoken == trace.spoken


@pytest.mark.parametrize(
    ("message", "gap"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            "image_url",
        ),
        ({"role": "tool", "content": "a"}, "the call that"),
        ({"role": "assistant", "content": "a", "audio": {"data": "x"}}, "audio"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}, "arguments of a tool call"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": '{"a": NaN}'}}, UNPARSED),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": "[" * 5000}}, UNPARSED),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": '{"a": "\ud83d"}'}}, UNPARSED),
    ],
)
def test_gaps_of_a_message_are_described(message: dict[str, Any], gap: str, tmp_path: Path) -> None:
    trace = read_one([message], tmp_path / "a.json")
    assert trace.spoken[0].message.content == "a"
    assert any(gap in missing for missing in trace.missing), trace.missing


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"response": {"error": {"type": "rate_limit_exceeded", "code": 429}}}, "the response is an error, rate_limit_exceeded, 429"),
        ({"response": {"status_code": 500, "body": {"error": {"message": "overloaded"}}}}, "the response is an error, overloaded"),
        ({"response": None, "error": {"code": "batch_expired"}}, "the response is an error, batch_expired"),
        ({"response": {"error": "no"}}, "the response is an error, no"),
        ({"response": {"error": {}}}, "an answer of the model"),
        ({"response": {}}, "an answer of the model"),
    ],
)
def test_a_failed_response_is_a_gap_with_its_error(document: dict[str, Any], message: str, tmp_path: Path) -> None:
    call = {"request": {"messages": [{"role": "user", "content": "q"}]}, **document}
    (tmp_path / "a.json").write_text(json.dumps(call))
    (trace,) = read(tmp_path / "a.json")
    assert isinstance(trace, Trace) and any(message in gap for gap in trace.missing), trace
