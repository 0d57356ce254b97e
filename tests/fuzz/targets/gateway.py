"""Requests of an outside program to the gateway, in each protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.gateway import anthropic_messages, chat_completions, responses
from agentrl.gateway.graph import ConversationGraph, conversation_ends
from agentrl.gateway.request import MAX_MESSAGES, STATUS, Answer, AnswerCall, RequestError, read_json
from agentrl.records import ToolCall
from tests.fuzz import mutators
from tests.fuzz.target import Check, Target, must

PROTOCOLS: dict[str, Any] = {"chat": chat_completions, "messages": anthropic_messages, "responses": responses}
ANSWER = Answer(
    id="0",
    model="policy",
    text="I look.",
    reasoning="hm",
    calls=(AnswerCall(id="call_0", call=ToolCall(name="look", arguments={"at": "é"})),),
    cut=False,
    prompt_tokens=3,
    completion_tokens=2,
    created=0,
)


def prepare(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        label, body = mutators.split(data)
        protocol = PROTOCOLS.get(label)
        if protocol is None:
            return
        try:
            parsed = protocol.read(read_json(body))
        except RequestError as error:
            must(error.status in STATUS.values() and bool(error.message), "a refusal without a message")
            _written(protocol.error(error))
            return
        must(len(parsed.messages) <= MAX_MESSAGES * MAX_MESSAGES and all(isinstance(text, str) for text in parsed.system), "invalid")
        must(len(conversation_ends(parsed.messages)) == len(parsed.messages) + 1, "a conversation without an end")
        location = ConversationGraph().locate(parsed)
        must(location.before is None and location.parent is None, "an unknown conversation continues a sampled one")
        _written(protocol.write(ANSWER, parsed))
        events = [event for _, event in protocol.events(ANSWER, parsed)]
        must(len(events) > 1, "a stream without an event")
        for event in events:
            _written(event)

    return check


def _written(body: Any) -> None:
    must(json.loads(json.dumps(body).encode()) == body, "an answer changes when it is read back")


def seeds() -> Sequence[bytes]:
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    function = {"name": "look", "description": "Looks.", "parameters": schema}
    tool_call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "b"}'}}
    chat = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {"role": "assistant", "content": None, "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "stop": ["\n\n\n"],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seen"}], "is_error": True}
    messages = {
        "model": "policy",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "b"}}]},
            {"role": "user", "content": [result, {"type": "text", "text": "now?"}]},
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": schema}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["\n\n\n"],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    items = {
        "model": "policy",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "seen"},
        ],
        "tools": [{"type": "function", **function, "strict": True}],
        "max_output_tokens": 9,
    }
    shape = {"$ref": "#/$defs/A", "$defs": {"A": {**schema, "required": ["at"], "anyOf": [{"enum": [1]}]}}}
    with_schema = {"model": "policy", "input": "look", "text": {"format": {"type": "json_schema", "name": "a", "schema": shape}}}
    legacy: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "look"}],
        "functions": [function],
        "function_call": {"name": "look"},
    }
    legacy["messages"] += [
        {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "content": "seen"},
    ]
    bodies = [("chat", chat), ("messages", messages), ("responses", items), ("responses", with_schema), ("chat", legacy)]
    return [label.encode() + b"\n" + json.dumps(body).encode() for label, body in bodies]


target = Target(
    name="gateway",
    about="requests of an outside program to the gateway",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.labelled(dict.fromkeys(PROTOCOLS, mutators.json_text)),
    words=(
        b'"role"',
        b'"content"',
        b'"tool_calls"',
        b'"type"',
        b'"developer"',
        b'"refusal"',
        b'"previous_response_id"',
        b"\\ud800",
        b"1e999",
    ),
)
