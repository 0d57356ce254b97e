"""Anthropic messages: a request read, an answer written, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.gateway.asked import (
    MAX_TOOLS,
    Answer,
    Asked,
    Refused,
    Said,
    call,
    fields,
    flag,
    function,
    listed,
    mapping,
    nothing_else,
    said,
    text,
    whole,
)
from agentrl.records import ToolCall

HINTS = ("temperature", "top_p", "top_k", "metadata", "service_tier", "inference_geo", "output_config", "cache_control")
"""Fields that are taken and change nothing."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "stop_sequences": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "mcp_servers": ([],),
    "container": (),
    "context_management": ({"edits": []},),
}
"""Fields that are taken where they ask for nothing."""

FIELDS = ("model", "messages", "max_tokens", "system", "tools", "thinking", "stream", *NOTHING, *HINTS)
_ERRORS = {
    "wrong_key": "authentication_error",
    "ended": "permission_error",
    "turn_limit": "permission_error",
    "unknown_model": "not_found_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "too_many": "rate_limit_error",
    "failed": "api_error",
}


def read(body: Any) -> Asked:
    """Raises `Refused`."""
    asked = fields(body, FIELDS)
    nothing_else(asked, NOTHING)
    most = whole(asked.get("max_tokens"), "max_tokens")
    if most is None:
        raise Refused("invalid", "max_tokens: Field required")
    fields(asked.get("output_config") or {}, ("effort",), where="output_config")
    thinking = mapping(asked.get("thinking") or {"type": "disabled"}, "thinking")
    system = asked.get("system") or ""
    texts = [system] if isinstance(system, str) else [_text(one, f"system[{at}]") for at, one in enumerate(listed(system, "system"))]
    messages = [one for at, value in enumerate(listed(asked.get("messages"), "messages")) for one in _messages(value, f"messages[{at}]")]
    tools = [_tool(one, f"tools[{at}]") for at, one in enumerate(listed(asked.get("tools") or [], "tools", most=MAX_TOOLS))]
    return Asked(
        model=text(asked.get("model"), "model"),
        system=tuple(one for one in texts if one),
        messages=tuple(messages),
        tools=tuple(tools),
        max_tokens=most,
        stream=flag(asked.get("stream"), "stream"),
        options={"thinking": thinking.get("type") in ("enabled", "adaptive")},
    )


def write(answer: Answer, asked: Asked) -> dict[str, Any]:
    return {
        **_head(answer),
        "content": _blocks(answer, asked),
        "stop_reason": _stop(answer),
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def events(answer: Answer, asked: Asked) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event."""
    begun = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**_usage(answer), "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": begun}
    for index, block in enumerate(_blocks(answer, asked)):
        empty, deltas = _pieces(block, answer)
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    end = {"stop_reason": _stop(answer), "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.completion_tokens}}
    yield "message_stop", {"type": "message_stop"}


def error(refused: Refused) -> dict[str, Any]:
    kind = _ERRORS.get(refused.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": None}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(answer: Answer, asked: Asked) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning and asked.options.get("thinking"):
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.id})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [{"type": "tool_use", "id": one.id, "name": one.call.name, "input": dict(one.call.arguments)} for one in answer.calls]
    return blocks


def _pieces(block: dict[str, Any], answer: Answer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "tool_use":
        arguments = next(one.arguments for one in answer.calls if one.id == block["id"])
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _stop(answer: Answer) -> str:
    return "max_tokens" if answer.cut else "tool_use" if answer.calls else "end_turn"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _messages(value: Any, where: str) -> list[Said]:
    """A message is one of ours, but for results of tools: each of those is a message of its own, before the text beside it."""
    about = mapping(value, where)
    role, content = about.get("role"), about.get("content")
    if role not in ("user", "assistant"):
        raise Refused("invalid", f"{where}.role: must be user or assistant")
    if isinstance(content, str):
        return [said(role, content)]
    texts: list[str] = []
    results: list[Said] = []
    calls: list[tuple[str, ToolCall]] = []
    for at, one in enumerate(listed(content, f"{where}.content")):
        here = f"{where}.content[{at}]"
        block = mapping(one, here)
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, here))
        elif kind == "tool_use" and role == "assistant":
            calls.append((text(block.get("id"), f"{here}.id"), call(block.get("name"), mapping(block.get("input"), f"{here}.input"), here)))
        elif kind == "tool_result" and role == "user":
            name, ok = text(block.get("tool_use_id"), f"{here}.tool_use_id"), not flag(block.get("is_error"), f"{here}.is_error")
            results.append(said("tool", _result(block.get("content"), here), call_id=name, ok=ok))
        elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
            raise Refused("unsupported", f"{here}: blocks of type {str(kind)[:40]!a} are not supported here")
    if role == "assistant":
        return [said(role, "".join(texts), [one for _, one in calls], call_ids=tuple(name for name, _ in calls))]
    return [*results, *([said(role, "\n".join(texts))] if texts or not results else [])]


def _text(value: Any, where: str) -> str:
    block = mapping(value, where)
    if block.get("type") != "text":
        raise Refused("unsupported", f"{where}: only text is supported here")
    return text(block.get("text"), f"{where}.text")


def _result(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(one, f"{where}.content[{at}]") for at, one in enumerate(listed(content, f"{where}.content")))


def _tool(value: Any, where: str) -> dict[str, Any]:
    about = mapping(value, where)
    if about.get("type") not in (None, "custom"):
        raise Refused("unsupported", f"{where}.type: only tools of type 'custom' are supported")
    known = ("type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming", "input_examples")
    named = fields(about, known, where=where)
    return function(named.get("name"), named.get("description"), named.get("input_schema"), where)
