"""OpenAI chat completions: a request read, an answer written, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    split_system,
    text,
    whole,
)
from agentrl.records import ToolCall

HINTS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("reasoning_effort", "verbosity", "parallel_tool_calls"),
)
"""Fields that are taken and change nothing: how tokens are drawn is the recipe's, for the learner must know it."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are taken where they ask for nothing."""

FIELDS = ("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", *NOTHING, *HINTS)
_ERRORS = {
    "wrong_key": ("invalid_request_error", "invalid_api_key"),
    "unknown_model": ("invalid_request_error", "model_not_found"),
    "unknown_field": ("invalid_request_error", "unknown_parameter"),
    "unsupported": ("invalid_request_error", "unsupported_value"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "too_many": ("rate_limit_error", "rate_limit_exceeded"),
    "turn_limit": ("permission_error", "turn_limit"),
    "ended": ("permission_error", "session_ended"),
    "failed": ("server_error", None),
}


def read(body: Any) -> Asked:
    """Raises `Refused`."""
    asked = fields(body, FIELDS)
    nothing_else(asked, NOTHING)
    messages = [_message(one, f"messages[{at}]") for at, one in enumerate(listed(asked.get("messages"), "messages"))]
    system, rest = split_system(messages)
    tools = [_tool(one, f"tools[{at}]") for at, one in enumerate(listed(asked.get("tools") or [], "tools", most=MAX_TOOLS))]
    most = whole(asked.get("max_completion_tokens"), "max_completion_tokens") or whole(asked.get("max_tokens"), "max_tokens")
    options = fields(asked.get("stream_options") or {}, ("include_usage", "include_obfuscation"), where="stream_options")
    return Asked(
        model=text(asked.get("model"), "model"),
        system=system,
        messages=rest,
        tools=tuple(tools),
        max_tokens=most,
        stream=flag(asked.get("stream"), "stream"),
        options=options,
    )


def write(answer: Answer, asked: Asked) -> dict[str, Any]:
    choice = {"index": 0, "message": _written(answer), "logprobs": None, "finish_reason": _finish(answer)}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, asked: Asked) -> Iterator[tuple[str, Any]]:
    """The name (none here) and the data of each event; a text as data is sent as it is."""
    head = _head(answer, "chat.completion.chunk")
    written = _written(answer)
    calls = written.pop("tool_calls", [])
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    pieces += [{name: written[name]} for name in ("reasoning_content", "content") if written.get(name)]
    pieces += [{"tool_calls": [{"index": at, **one}]} for at, one in enumerate(calls)]
    for piece in pieces:
        yield "", {**head, "choices": [{"index": 0, "delta": piece, "logprobs": None, "finish_reason": None}]}
    yield "", {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(answer)}]}
    if asked.options.get("include_usage"):
        yield "", {**head, "choices": [], "usage": _usage(answer)}
    yield "", "[DONE]"


def error(refused: Refused) -> dict[str, Any]:
    kind, code = _ERRORS.get(refused.kind, ("invalid_request_error", None))
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _written(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.call.name, "arguments": one.arguments}} for one in answer.calls
        ]
    return message


def _finish(answer: Answer) -> str:
    return "length" if answer.cut else "tool_calls" if answer.calls else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens, "total_tokens": total}


def _message(value: Any, where: str) -> Said:
    about = mapping(value, where)
    role = about.get("role")
    if role in ("system", "developer"):
        return said("system", _content(about.get("content"), where))
    if role == "user":
        return said("user", _content(about.get("content"), where))
    if role == "tool":
        return said("tool", _content(about.get("content"), where), call_id=text(about.get("tool_call_id"), f"{where}.tool_call_id"))
    if role == "assistant":
        asked = listed(about.get("tool_calls") or [], f"{where}.tool_calls")
        pairs = [_call(one, f"{where}.tool_calls[{at}]") for at, one in enumerate(asked)]
        content = "" if about.get("content") is None else _content(about["content"], where)
        return said("assistant", content, [one for _, one in pairs], call_ids=tuple(name for name, _ in pairs))
    raise Refused("invalid", f"{where}.role must be system, developer, user, assistant or tool.", param=f"{where}.role")


def _content(value: Any, where: str) -> str:
    """Text, or parts of text; nothing else can be shown to this policy."""
    if isinstance(value, str):
        return value
    parts = []
    for at, one in enumerate(listed(value, f"{where}.content")):
        part = mapping(one, f"{where}.content[{at}]")
        if part.get("type") not in ("text", "refusal"):
            raise Refused("unsupported", f"{where}.content[{at}]: only text is supported.", param=f"{where}.content")
        parts.append(text(part.get(part["type"]), f"{where}.content[{at}]"))
    return "".join(parts)


def _call(value: Any, where: str) -> tuple[str, ToolCall]:
    about = mapping(value, where)
    named: Mapping[str, Any] = mapping(about.get("function"), f"{where}.function")
    return text(about.get("id"), f"{where}.id"), call(named.get("name"), named.get("arguments"), where)


def _tool(value: Any, where: str) -> dict[str, Any]:
    about = mapping(value, where)
    if about.get("type") != "function":
        raise Refused("unsupported", f"{where}.type: only tools of type 'function' are supported.", param=f"{where}.type")
    named = fields(about.get("function"), ("name", "description", "parameters", "strict"), where=f"{where}.function")
    return function(named.get("name"), named.get("description"), named.get("parameters"), where)
