"""Anthropic messages: a request read, an answer written, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway.request import (
    EFFORTS,
    MAX_BODY,
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
    storable,
    text,
    whole,
    within,
)
from agentrl.gateway.schemas import Schemas
from agentrl.records import ToolCall

HINTS: Mapping[str, Check] = {
    **{"temperature": within(0, 1), "top_p": within(0, 1), "top_k": integer},
    **{"metadata": mapping, "service_tier": one_of("auto", "standard_only"), "inference_geo": text, "cache_control": mapping},
}
"""Fields that are checked but have no effect."""

NOTHING: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}
"""Fields that are taken where they ask for nothing."""

FIELDS = (
    *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "thinking", "stream", "stop_sequences"),
    *("context_management", "output_config", "output_format", *NOTHING, *HINTS),
)
_ERRORS = {
    "wrong_key": "authentication_error",
    "ended": "permission_error",
    "turn_limit": "permission_error",
    "wrong_host": "permission_error",
    "unknown_model": "not_found_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "too_many": "rate_limit_error",
    "failed": "api_error",
}
_CHOICE = ("type", "name", "disable_parallel_tool_use")
_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""An edit of the context that leaves it as it is."""


def read(body: Any) -> CompletionRequest:
    """Raises `RequestError`."""
    if mapping(body, "the body").get("max_tokens") is None:
        raise RequestError("invalid", "max_tokens: Field required", param="max_tokens")
    return _read(body)


def read_count(body: Any) -> CompletionRequest:
    """A request to count the tokens of a context. Raises `RequestError`."""
    return _read(body)


def _read(body: Any) -> CompletionRequest:
    asked = fields(body, FIELDS)
    nothing_else(asked, NOTHING)
    check_all(asked, HINTS)
    shape = _shape(asked)
    system = given(asked.get("system"), "")
    texts = [system] if isinstance(system, str) else [_text(one, f"system[{at}]") for at, one in enumerate(listed(system, "system"))]
    offered = listed(given(asked.get("tools"), []), "tools", most=MAX_TOOLS)
    tools = _Tools([_tool(one, f"tools[{at}]") for at, one in enumerate(offered)], [bool(one.get("defer_loading")) for one in offered])
    entries = enumerate(listed(asked.get("messages"), "messages"))
    heads, rest = split_system([one for at, value in entries for one in _messages(value, f"messages[{at}]", tools)])
    choice = fields(given(asked.get("tool_choice"), {"type": "auto"}), _CHOICE, where="tool_choice")
    return CompletionRequest(
        model=text(asked.get("model"), "model"),
        system=tuple(one for one in (*texts, *heads) if one),
        messages=rest,
        tools=tuple(tools.shown),
        loaded=tuple(tools.loaded.values()),
        max_tokens=whole(asked.get("max_tokens"), "max_tokens"),
        stream=flag(asked.get("stream"), "stream"),
        **choice_of(choice.get("type"), choice.get("name"), [*tools.shown, *tools.loaded.values()], "tool_choice"),
        shape=shape,
        single=flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"),
        strict=frozenset(one["name"] for one in offered if one.get("strict")),
        stop=stops(listed(given(asked.get("stop_sequences"), []), "stop_sequences"), "stop_sequences"),
        options={"thinking": _thinks(asked.get("thinking"))},
    )


def write(answer: Answer, asked: CompletionRequest) -> dict[str, Any]:
    return {**_head(answer), "content": _blocks(answer, asked), **_stop(answer), "usage": _usage(answer)}


def events(answer: Answer, asked: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event."""
    begun = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**_usage(answer), "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": begun}
    for index, block in enumerate(_blocks(answer, asked)):
        empty, deltas = _pieces(block, answer)
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    yield "message_delta", {"type": "message_delta", "delta": _stop(answer), "usage": {"output_tokens": answer.completion_tokens}}
    yield "message_stop", {"type": "message_stop"}


def error(refused: RequestError) -> dict[str, Any]:
    kind = _ERRORS.get(refused.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": None}


def models(names: Sequence[str]) -> dict[str, Any]:
    return {"data": [model(name) for name in names], "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _shape(asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema of the answer, if one is requested. Also checks other options that are objects."""
    config = fields(given(asked.get("output_config"), {}), ("effort", "format"), where="output_config")
    check_all(config, {"effort": one_of(*EFFORTS)}, "output_config")
    _check_context(asked)
    where = "output_format" if config.get("format") is None else "output_config.format"  # the former is the older one
    value = given(config.get("format"), asked.get("output_format"))
    if value is None:
        return None
    about = fields(value, ("type", "schema"), where=where)
    one_of("json_schema")(about.get("type"), f"{where}.type")
    return Schemas().rebuilt(about.get("schema"), f"{where}.schema")


def _check_context(asked: Mapping[str, Any]) -> None:
    context = fields(given(asked.get("context_management"), {}), ("edits",), where="context_management")
    for at, edit in enumerate(listed(given(context.get("edits"), []), "context_management.edits")):
        if edit != _KEEPS_ALL:
            where = f"context_management.edits[{at}]"
            raise RequestError(
                "unsupported", f"{where}: the context is kept as it was sampled; only {_KEEPS_ALL} is supported.", param=where
            )


def _thinks(value: Any) -> bool:
    """Whether the answer shows the reasoning. The policy decides how much it reasons."""
    about = fields(given(value, {}), ("type", "budget_tokens", "display"), where="thinking")
    whole(about.get("budget_tokens"), "thinking.budget_tokens")
    check_all(about, {"type": one_of("enabled", "adaptive", "disabled"), "display": one_of("summarized", "updates", "omitted")}, "thinking")
    return about.get("type") in ("enabled", "adaptive") and about.get("display") != "omitted"


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(answer: Answer, asked: CompletionRequest) -> list[dict[str, Any]]:
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


def _stop(answer: Answer) -> dict[str, Any]:
    if not answer.cut and not answer.calls and answer.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": "max_tokens" if answer.cut else "tool_use" if answer.calls else "end_turn", "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


class _Tools:
    """The tools of a request: those that the policy sees from the start, and deferred ones, which a result shows by a reference."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], deferred: Sequence[bool]) -> None:
        self.shown = [tool for tool, later in zip(tools, deferred, strict=True) if not later]
        self.loaded: dict[str, Mapping[str, Any]] = {}
        self._deferred = {tool["function"]["name"]: tool for tool, later in zip(tools, deferred, strict=True) if later}
        self._known = {tool["function"]["name"]: tool for tool in tools}
        self._chars = 0  # of definitions in results, which a short reference can repeat

    def definition(self, reference: Any, where: str) -> str:
        """The definition of the tool that a result refers to, as a line. Raises `RequestError`."""
        name = text(reference, f"{where}.tool_name")
        if name not in self._known:
            raise RequestError("invalid", f"{where}.tool_name: {name[:100]!a} is not among the tools.", param=f"{where}.tool_name")
        if name in self._deferred:
            self.loaded[name] = self._deferred[name]
        line = json.dumps(self._known[name], ensure_ascii=False) + "\n"
        self._chars += len(line)
        if self._chars > MAX_BODY:
            raise RequestError("too_large", f"{where}: references to tools of more than {MAX_BODY} characters.", param=where)
        return line


def _messages(value: Any, where: str, tools: _Tools) -> list[RequestMessage]:
    """A message is one of ours, but for results of tools: each of those is a message of its own, before the text beside it."""
    about = mapping(value, where)
    role, content = about.get("role"), about.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError("invalid", f"{where}.role: must be user, assistant or system", param=f"{where}.role")
    if isinstance(content, str):
        return [said(role, content)]
    texts: list[str] = []
    results: list[RequestMessage] = []
    calls: list[tuple[str, ToolCall]] = []
    for at, one in enumerate(listed(content, f"{where}.content")):
        here = f"{where}.content[{at}]"
        block = mapping(one, here)
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, here))
        elif kind == "tool_use" and role == "assistant":
            calls.append((text(block.get("id"), f"{here}.id"), call(block.get("name"), block.get("input"), here)))
        elif kind == "tool_result" and role == "user":
            name, ok = text(block.get("tool_use_id"), f"{here}.tool_use_id"), not flag(block.get("is_error"), f"{here}.is_error")
            results.append(said("tool", _result(block.get("content"), here, tools), call_id=name, ok=ok))
        elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
            raise RequestError(
                "unsupported", f"{here}.type: blocks of type {str(kind)[:40]!a} are not supported here", param=f"{here}.type"
            )
    if role == "assistant":
        return [said(role, "".join(texts), [one for _, one in calls], call_ids=tuple(name for name, _ in calls))]
    return [*results, *([said(role, "\n".join(texts))] if texts or not results else [])]


def _text(value: Any, where: str) -> str:
    block = mapping(value, where)
    if block.get("type") != "text":
        raise RequestError("unsupported", f"{where}.type: only text is supported here", param=f"{where}.type")
    return text(block.get("text"), f"{where}.text")


def _result(content: Any, where: str, tools: _Tools) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for at, one in enumerate(listed(content, f"{where}.content")):
        here = f"{where}.content[{at}]"
        refers = mapping(one, here).get("type") == "tool_reference"
        parts.append(tools.definition(one.get("tool_name"), here) if refers else _text(one, here))
    return "".join(parts)


def _tool(value: Any, where: str) -> dict[str, Any]:
    about = mapping(value, where)
    if about.get("type") not in (None, "custom"):
        raise RequestError("unsupported", f"{where}.type: only tools of type 'custom' are supported", param=f"{where}.type")
    known = (
        "type",
        "name",
        "description",
        "input_schema",
        "cache_control",
        "strict",
        "eager_input_streaming",
        "input_examples",
        "defer_loading",
    )
    named = fields(about, known, where=where)
    check_all(named, {"cache_control": mapping, **dict.fromkeys(("strict", "eager_input_streaming", "defer_loading"), flag)}, where)
    examples = listed(given(named.get("input_examples"), []), f"{where}.input_examples")
    shown = [storable(mapping(one, f"{where}.input_examples[{at}]"), f"{where}.input_examples[{at}]") for at, one in enumerate(examples)]
    told = [text(given(named.get("description"), ""), f"{where}.description"), *(f"Example: {json.dumps(one)}" for one in shown)]
    return function(named.get("name"), "\n".join(filter(None, told)), named.get("input_schema"), where)
