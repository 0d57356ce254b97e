"""OpenAI chat completions: parses requests and writes answers, at once or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway import checks
from agentrl.gateway.checks import Check, check_all, mapping, value_or
from agentrl.gateway.constraint import answer_schema
from agentrl.gateway.request import MAX_TOOLS, Answer, CompletionRequest, RequestError, RequestMessage, said, split_system
from agentrl.records import ToolCall

HINTS: Mapping[str, Check] = {
    **{"temperature": checks.within(0, 2), "top_p": checks.within(0, 1), "top_k": checks.integer, "min_p": checks.within(0, 1)},
    **{"frequency_penalty": checks.within(-2, 2), "presence_penalty": checks.within(-2, 2), "seed": checks.integer},
    **{"reasoning_effort": checks.one_of(*checks.EFFORTS), "verbosity": checks.one_of("low", "medium", "high")},
    **{"user": checks.text, "metadata": mapping, "store": checks.flag, "service_tier": checks.one_of("auto", "default")},
    **{"prompt_cache_key": checks.text, "prompt_cache_retention": checks.text, "safety_identifier": checks.text},
}
"""Fields that are checked but have no effect: the recipe sets the sampling parameters, because the learner must know them, and the other
fields are labels."""

INERT: Mapping[str, tuple[Any, ...]] = {
    **{"n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "modalities": (["text"],)},
    **dict.fromkeys(("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"), ()),
}
"""Unsupported fields -> values other than null that are accepted because they have no effect."""

FIELDS = (
    *("model", "messages", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "stop", "response_format"),
    *("max_tokens", "max_completion_tokens", "stream", "stream_options", *INERT, *HINTS),
)
_ERRORS = {
    "wrong_key": ("invalid_request_error", "invalid_api_key"),
    "unknown_model": ("invalid_request_error", "model_not_found"),
    "unknown_field": ("invalid_request_error", "unknown_parameter"),
    "unsupported": ("invalid_request_error", "unsupported_value"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "too_many": ("rate_limit_error", "rate_limit_exceeded"),
    "turn_limit": ("permission_error", "turn_limit"),
    "ended": ("permission_error", "session_ended"),
    "wrong_host": ("permission_error", "wrong_host"),
    "failed": ("server_error", None),
}
_LEGACY_ID = "function"
"""The id of the only call in an answer in the legacy form, which has no ids. A result belongs to the last call."""


def read(body: Any) -> CompletionRequest:
    """Parses a request. Raises `RequestError` if a field is unknown, invalid or not supported."""
    fields = checks.known_fields(body, FIELDS)
    checks.check_inert(fields, INERT)
    check_all(fields, HINTS)
    system, rest = split_system(
        [_message(value, f"messages[{at}]") for at, value in enumerate(checks.array(fields.get("messages"), "messages"))]
    )
    offered = checks.array(value_or(fields.get("tools"), []), "tools", most=MAX_TOOLS)
    legacy = checks.array(value_or(fields.get("functions"), []), "functions", most=MAX_TOOLS)
    if legacy and offered:
        raise RequestError("invalid", "functions and tools cannot be used together.", param="functions")
    tools = [_tool(value, f"tools[{at}]") for at, value in enumerate(offered)]
    tools += [_function(value, f"functions[{at}]") for at, value in enumerate(legacy)]
    strict = {function["name"] for function in [*(tool["function"] for tool in offered), *legacy] if function.get("strict")}
    options = checks.known_fields(value_or(fields.get("stream_options"), {}), ("include_usage", "include_obfuscation"), "stream_options")
    check_all(options, dict.fromkeys(options, checks.flag), "stream_options")
    parallel = fields.get("parallel_tool_calls")
    return CompletionRequest(
        model=checks.text(fields.get("model"), "model"),
        system=system,
        messages=rest,
        tools=tuple(tools),
        max_tokens=checks.positive(fields.get("max_completion_tokens"), "max_completion_tokens")
        or checks.positive(fields.get("max_tokens"), "max_tokens"),
        stream=checks.flag(fields.get("stream"), "stream"),
        shape=_shape(fields.get("response_format")),
        **_choice(fields, tools),
        single=bool(legacy) or (parallel is not None and not checks.flag(parallel, "parallel_tool_calls")),
        strict=frozenset(strict),
        stop=checks.stop_sequences(fields.get("stop"), "stop"),
        options={**options, "legacy": bool(legacy)},
    )


def write(answer: Answer, request: CompletionRequest) -> dict[str, Any]:
    """Returns the response body for an answer."""
    choice = {"index": 0, "message": _written(answer, request), "logprobs": None, "finish_reason": _finish(answer, request)}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, request: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """Yields a pair (name, data) for each event of the stream. The name of each event is empty. Data that is a string is sent unchanged."""
    head = _head(answer, "chat.completion.chunk")
    written = _written(answer, request)
    calls = written.pop("tool_calls", [])
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    pieces += [{name: written[name]} for name in ("reasoning_content", "content", "function_call") if written.get(name)]
    pieces += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(calls)]
    for piece in pieces:
        yield "", {**head, "choices": [{"index": 0, "delta": piece, "logprobs": None, "finish_reason": None}]}
    yield "", {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(answer, request)}]}
    if request.options.get("include_usage"):
        yield "", {**head, "choices": [], "usage": _usage(answer)}
    yield "", "[DONE]"


def error(refused: RequestError) -> dict[str, Any]:
    """Returns the response body for an error."""
    kind, code = _ERRORS.get(refused.kind, ("invalid_request_error", None))
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}


def models(names: Sequence[str]) -> dict[str, Any]:
    """Returns the response body for the list of models."""
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    """Returns the description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}


def _choice(fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of `CompletionRequest` for the tool choice in a request, in the current or the legacy form."""
    where = next((name for name in ("tool_choice", "function_call") if fields.get(name) is not None), "tool_choice")
    value = value_or(fields.get(where), "auto")
    if isinstance(value, str):
        return checks.openai_choice(value, tools, where)
    about = mapping(value, where)
    if where == "function_call":
        return checks.tool_choice("tool", about.get("name"), tools, where)
    if about.get("type") != "function":
        return checks.tool_choice(None, None, tools, where)
    return checks.tool_choice("tool", mapping(about.get("function"), f"{where}.function").get("name"), tools, where)


def _shape(value: Any) -> Mapping[str, Any] | None:
    """Returns the requested JSON schema for the answer; None if no schema is requested."""
    where = "response_format"
    about = checks.known_fields(value_or(value, {"type": "text"}), ("type", "json_schema"), where)
    if about.get("type") != "json_schema":
        return answer_schema(about, where)
    named = checks.known_fields(about.get("json_schema"), ("name", "description", "schema", "strict"), f"{where}.json_schema")
    return answer_schema({"type": "json_schema", "schema": value_or(named.get("schema"), {"type": "object"})}, f"{where}.json_schema")


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _written(answer: Answer, request: CompletionRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    functions = [{"name": called.call.name, "arguments": called.arguments} for called in answer.calls]
    if functions and request.options.get("legacy"):
        [message["function_call"]] = functions
    elif functions:
        pairs = zip(answer.calls, functions, strict=True)
        message["tool_calls"] = [{"id": called.id, "type": "function", "function": function} for called, function in pairs]
    return message


def _finish(answer: Answer, request: CompletionRequest) -> str:
    called = "function_call" if request.options.get("legacy") else "tool_calls"
    return "length" if answer.cut else called if answer.calls else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens, "total_tokens": total}


def _message(value: Any, where: str) -> RequestMessage:
    about = mapping(value, where)
    role, content = about.get("role"), about.get("content")
    if role in ("system", "developer", "user"):
        return said("user" if role == "user" else "system", _content(content, where))
    if role == "tool":
        return said("tool", _content(content, where), call_id=checks.text(about.get("tool_call_id"), f"{where}.tool_call_id"))
    if role == "function":
        return said("tool", _content(value_or(content, ""), where), call_id=_LEGACY_ID)
    if role != "assistant":
        raise RequestError("invalid", f"{where}.role must be system, developer, user, assistant, tool or function.", param=f"{where}.role")
    calls = checks.array(value_or(about.get("tool_calls"), []), f"{where}.tool_calls")
    pairs = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    if about.get("function_call") is not None:
        legacy = mapping(about["function_call"], f"{where}.function_call")
        pairs.append((_LEGACY_ID, checks.tool_call(legacy.get("name"), legacy.get("arguments"), f"{where}.function_call")))
    ids = tuple(name for name, _ in pairs)
    return said("assistant", _content(value_or(content, ""), where), [call for _, call in pairs], call_ids=ids)


def _content(value: Any, where: str) -> str:
    return checks.text_content(value, f"{where}.content", {"text": "text", "refusal": "refusal"})


def _call(value: Any, where: str) -> tuple[str, ToolCall]:
    about = mapping(value, where)
    function = mapping(about.get("function"), f"{where}.function")
    call = checks.tool_call(function.get("name"), function.get("arguments"), f"{where}.function")
    return checks.text(about.get("id"), f"{where}.id"), call


def _tool(value: Any, where: str) -> dict[str, Any]:
    about = mapping(value, where)
    if about.get("type") != "function":
        raise RequestError("unsupported", f"{where}.type: only tools of type 'function' are supported.", param=f"{where}.type")
    return _function(about.get("function"), f"{where}.function")


def _function(value: Any, where: str) -> dict[str, Any]:
    about = checks.known_fields(value, ("name", "description", "parameters", "strict"), where)
    checks.flag(about.get("strict"), f"{where}.strict")
    return checks.function_tool(about.get("name"), about.get("description"), about.get("parameters"), where)
