"""OpenAI chat completions: a request read, an answer written, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway.request import (
    EFFORTS,
    MAX_TOOLS,
    Answer,
    Check,
    CompletionRequest,
    RequestError,
    RequestMessage,
    call,
    check_all,
    choice_of,
    fields,
    flag,
    function,
    given,
    integer,
    listed,
    mapping,
    nothing_else,
    one_of,
    said,
    split_system,
    stops,
    text,
    whole,
    within,
)
from agentrl.gateway.schemas import ANY_OBJECT, Schemas
from agentrl.records import ToolCall

HINTS: Mapping[str, Check] = {
    **{"temperature": within(0, 2), "top_p": within(0, 1), "top_k": integer, "min_p": within(0, 1), "seed": integer},
    **{"frequency_penalty": within(-2, 2), "presence_penalty": within(-2, 2)},
    **{"reasoning_effort": one_of(*EFFORTS), "verbosity": one_of("low", "medium", "high")},
    **{"user": text, "metadata": mapping, "store": flag, "service_tier": one_of("auto", "default")},
    **{"prompt_cache_key": text, "prompt_cache_retention": text, "safety_identifier": text},
}
"""Fields that are checked but have no effect: the recipe sets the sampling, because the learner must know it; the others are labels."""

NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"), ()),
}
"""Fields that are taken where they ask for nothing."""

FIELDS = (
    *("model", "messages", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "stop", "response_format"),
    *("max_tokens", "max_completion_tokens", "stream", "stream_options"),
    *NOTHING,
    *HINTS,
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
_LEGACY = "function"
"""The id of the only call of an answer in the older form, which has no ids. A result answers the last call."""


def read(body: Any) -> CompletionRequest:
    """Raises `RequestError`."""
    asked = fields(body, FIELDS)
    nothing_else(asked, NOTHING)
    check_all(asked, HINTS)
    messages = [_message(one, f"messages[{at}]") for at, one in enumerate(listed(asked.get("messages"), "messages"))]
    system, rest = split_system(messages)
    offered = listed(given(asked.get("tools"), []), "tools", most=MAX_TOOLS)
    tools = [_tool(one, f"tools[{at}]") for at, one in enumerate(offered)]
    older = listed(given(asked.get("functions"), []), "functions", most=MAX_TOOLS)
    if older and tools:
        raise RequestError("invalid", "functions and tools cannot be used together.", param="functions")
    tools += [_function(one, f"functions[{at}]") for at, one in enumerate(older)]
    strict = {one["name"] for one in [*(tool["function"] for tool in offered), *older] if one.get("strict")}
    most = whole(asked.get("max_completion_tokens"), "max_completion_tokens") or whole(asked.get("max_tokens"), "max_tokens")
    options = fields(given(asked.get("stream_options"), {}), ("include_usage", "include_obfuscation"), where="stream_options")
    check_all(options, dict.fromkeys(options, flag), "stream_options")
    parallel = asked.get("parallel_tool_calls")
    return CompletionRequest(
        model=text(asked.get("model"), "model"),
        system=system,
        messages=rest,
        tools=tuple(tools),
        max_tokens=most,
        stream=flag(asked.get("stream"), "stream"),
        shape=_shape(asked.get("response_format")),
        **_choice(asked, tools),
        single=bool(older) or (parallel is not None and not flag(parallel, "parallel_tool_calls")),
        strict=frozenset(strict),
        stop=stops(asked.get("stop"), "stop"),
        options={**options, "older": bool(older)},
    )


def write(answer: Answer, asked: CompletionRequest) -> dict[str, Any]:
    choice = {"index": 0, "message": _written(answer, asked), "logprobs": None, "finish_reason": _finish(answer, asked)}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, asked: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """The name (none here) and the data of each event; a text as data is sent as it is."""
    head = _head(answer, "chat.completion.chunk")
    written = _written(answer, asked)
    calls = written.pop("tool_calls", [])
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    pieces += [{name: written[name]} for name in ("reasoning_content", "content", "function_call") if written.get(name)]
    pieces += [{"tool_calls": [{"index": at, **one}]} for at, one in enumerate(calls)]
    for piece in pieces:
        yield "", {**head, "choices": [{"index": 0, "delta": piece, "logprobs": None, "finish_reason": None}]}
    yield "", {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(answer, asked)}]}
    if asked.options.get("include_usage"):
        yield "", {**head, "choices": [], "usage": _usage(answer)}
    yield "", "[DONE]"


def error(refused: RequestError) -> dict[str, Any]:
    kind, code = _ERRORS.get(refused.kind, ("invalid_request_error", None))
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}


def models(names: Sequence[str]) -> dict[str, Any]:
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}


def _choice(asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `CompletionRequest` for a choice of tools, in the newer or the older form."""
    where = next((name for name in ("tool_choice", "function_call") if asked.get(name) is not None), "tool_choice")
    value = given(asked.get(where), "auto")
    if isinstance(value, str):
        return choice_of({"required": "any", "any": None, "tool": None}.get(value, value), None, tools, where)
    about = mapping(value, where)
    if where == "function_call":
        return choice_of("tool", about.get("name"), tools, where)
    if about.get("type") != "function":
        return choice_of(None, None, tools, where)
    return choice_of("tool", mapping(about.get("function"), f"{where}.function").get("name"), tools, where)


def _shape(value: Any) -> Mapping[str, Any] | None:
    """The JSON schema of the answer, if one is requested."""
    where = "response_format"
    about = fields(given(value, {"type": "text"}), ("type", "json_schema"), where=where)
    if about.get("type") == "json_schema":
        named = fields(about.get("json_schema"), ("name", "description", "schema", "strict"), where=f"{where}.json_schema")
        return Schemas().rebuilt(given(named.get("schema"), ANY_OBJECT), f"{where}.json_schema.schema")
    one_of("text", "json_object")(about.get("type"), f"{where}.type")
    return ANY_OBJECT if about["type"] == "json_object" else None


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _written(answer: Answer, asked: CompletionRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    functions = [{"name": one.call.name, "arguments": one.arguments} for one in answer.calls]
    if functions and asked.options.get("older"):
        [message["function_call"]] = functions
    elif functions:
        ids = [one.id for one in answer.calls]
        message["tool_calls"] = [{"id": name, "type": "function", "function": one} for name, one in zip(ids, functions, strict=True)]
    return message


def _finish(answer: Answer, asked: CompletionRequest) -> str:
    called = "function_call" if asked.options.get("older") else "tool_calls"
    return "length" if answer.cut else called if answer.calls else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens, "total_tokens": total}


def _message(value: Any, where: str) -> RequestMessage:
    about = mapping(value, where)
    role = about.get("role")
    if role in ("system", "developer"):
        return said("system", _content(about.get("content"), where))
    if role == "user":
        return said("user", _content(about.get("content"), where))
    if role == "tool":
        return said("tool", _content(about.get("content"), where), call_id=text(about.get("tool_call_id"), f"{where}.tool_call_id"))
    if role == "function":
        return said("tool", _content(given(about.get("content"), ""), where), call_id=_LEGACY)
    if role == "assistant":
        return _turn(about, where)
    raise RequestError("invalid", f"{where}.role must be system, developer, user, assistant, tool or function.", param=f"{where}.role")


def _turn(about: Mapping[str, Any], where: str) -> RequestMessage:
    calls = listed(given(about.get("tool_calls"), []), f"{where}.tool_calls")
    pairs = [_call(one, f"{where}.tool_calls[{at}]") for at, one in enumerate(calls)]
    if about.get("function_call") is not None:
        older = mapping(about["function_call"], f"{where}.function_call")
        pairs.append((_LEGACY, call(older.get("name"), older.get("arguments"), f"{where}.function_call")))
    content = _content(given(about.get("content"), ""), where)
    return said("assistant", content, [one for _, one in pairs], call_ids=tuple(name for name, _ in pairs))


def _content(value: Any, where: str) -> str:
    """Text, or parts of text; nothing else can be shown to this policy."""
    if isinstance(value, str):
        return value
    parts = []
    for at, one in enumerate(listed(value, f"{where}.content")):
        here = f"{where}.content[{at}]"
        part = mapping(one, here)
        if part.get("type") not in ("text", "refusal"):
            raise RequestError("unsupported", f"{here}.type: only text is supported.", param=f"{here}.type")
        parts.append(text(part.get(part["type"]), f"{here}.{part['type']}"))
    return "".join(parts)


def _call(value: Any, where: str) -> tuple[str, ToolCall]:
    about = mapping(value, where)
    named: Mapping[str, Any] = mapping(about.get("function"), f"{where}.function")
    return text(about.get("id"), f"{where}.id"), call(named.get("name"), named.get("arguments"), f"{where}.function")


def _tool(value: Any, where: str) -> dict[str, Any]:
    about = mapping(value, where)
    if about.get("type") != "function":
        raise RequestError("unsupported", f"{where}.type: only tools of type 'function' are supported.", param=f"{where}.type")
    return _function(about.get("function"), f"{where}.function")


def _function(value: Any, where: str) -> dict[str, Any]:
    named = fields(value, ("name", "description", "parameters", "strict"), where=where)
    flag(named.get("strict"), f"{where}.strict")
    return function(named.get("name"), named.get("description"), named.get("parameters"), where)
