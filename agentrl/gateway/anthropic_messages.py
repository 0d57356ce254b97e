"""Anthropic Messages: parses requests and writes answers, at once or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway import checks
from agentrl.gateway.checks import Check, array, check_all, flag, known_fields, mapping, text, value_or
from agentrl.gateway.constraint import Schemas
from agentrl.gateway.request import MAX_BODY, MAX_TOOLS, Answer, CompletionRequest, RequestError, RequestMessage, said, split_system
from agentrl.records import ToolCall

HINTS: Mapping[str, Check] = {
    **{"temperature": checks.within(0, 1), "top_p": checks.within(0, 1), "top_k": checks.integer, "inference_geo": text},
    **{"metadata": mapping, "service_tier": checks.one_of("auto", "standard_only"), "cache_control": mapping},
}
"""Fields that are checked but have no effect."""

INERT: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}
"""Unsupported fields -> values other than null that are accepted because they have no effect."""

FIELDS = (
    *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "thinking", "stream", "stop_sequences"),
    *("context_management", "output_config", "output_format", *INERT, *HINTS),
)
_TOOL_FIELDS = (
    *("type", "name", "description", "input_schema", "input_examples"),
    *("cache_control", "strict", "eager_input_streaming", "defer_loading"),
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
_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""A context edit that does not change the context."""


def read(body: Any) -> CompletionRequest:
    """Parses a request for a completion, which must set `max_tokens`. Raises `RequestError` like `read_count`."""
    if mapping(body, "the body").get("max_tokens") is None:
        raise RequestError("invalid", "max_tokens: Field required", param="max_tokens")
    return read_count(body)


def read_count(body: Any) -> CompletionRequest:
    """Parses a request for a completion, or a request to count the tokens in a context. Raises `RequestError` if a field is unknown,
    invalid or not supported."""
    fields = known_fields(body, FIELDS)
    checks.check_inert(fields, INERT)
    check_all(fields, HINTS)
    shape = _shape(fields)
    _check_context(fields)
    system = value_or(fields.get("system"), "")
    texts = [system] if isinstance(system, str) else [_text(part, f"system[{at}]") for at, part in enumerate(array(system, "system"))]
    offered = array(value_or(fields.get("tools"), []), "tools", most=MAX_TOOLS)
    tools = _Tools([_tool(tool, f"tools[{at}]") for at, tool in enumerate(offered)], [bool(tool.get("defer_loading")) for tool in offered])
    entries = enumerate(array(fields.get("messages"), "messages"))
    heads, rest = split_system([message for at, value in entries for message in _messages(value, f"messages[{at}]", tools)])
    choice_fields = ("type", "name", "disable_parallel_tool_use")
    choice = known_fields(value_or(fields.get("tool_choice"), {"type": "auto"}), choice_fields, "tool_choice")
    return CompletionRequest(
        model=text(fields.get("model"), "model"),
        system=tuple(filter(None, (*texts, *heads))),
        messages=rest,
        tools=tuple(tools.shown),
        loaded=tuple(tools.loaded.values()),
        max_tokens=checks.positive(fields.get("max_tokens"), "max_tokens"),
        stream=flag(fields.get("stream"), "stream"),
        **checks.tool_choice(choice.get("type"), choice.get("name"), [*tools.shown, *tools.loaded.values()], "tool_choice"),
        shape=shape,
        single=flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"),
        strict=frozenset(tool["name"] for tool in offered if tool.get("strict")),
        stop=checks.stop_sequences(array(value_or(fields.get("stop_sequences"), []), "stop_sequences"), "stop_sequences"),
        options={"thinking": _shows_reasoning(fields.get("thinking"))},
    )


def write(answer: Answer, request: CompletionRequest) -> dict[str, Any]:
    """Returns the response body for an answer."""
    return {**_head(answer), "content": _blocks(answer, request), **_stop(answer), "usage": _usage(answer)}


def events(answer: Answer, request: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """Yields a pair (name, data) for each event of the stream."""
    start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**_usage(answer), "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(answer, request)):
        empty, deltas = _pieces(block, answer)
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    yield "message_delta", {"type": "message_delta", "delta": _stop(answer), "usage": {"output_tokens": answer.completion_tokens}}
    yield "message_stop", {"type": "message_stop"}


def error(refused: RequestError) -> dict[str, Any]:
    """Returns the response body for an error, to which the server adds the request's id."""
    kind = _ERRORS.get(refused.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": None}


def models(names: Sequence[str]) -> dict[str, Any]:
    """Returns the response body for the list of models."""
    return {"data": [model(name) for name in names], "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model(name: str) -> dict[str, Any]:
    """Returns the description of a model."""
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _shape(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the requested JSON schema for the answer; None if no schema is requested."""
    config = known_fields(value_or(fields.get("output_config"), {}), ("effort", "format"), "output_config")
    check_all(config, {"effort": checks.one_of(*checks.EFFORTS)}, "output_config")
    where = "output_format" if config.get("format") is None else "output_config.format"  # `output_format` is older
    value = value_or(config.get("format"), fields.get("output_format"))
    if value is None:
        return None
    about = known_fields(value, ("type", "schema"), where)
    checks.one_of("json_schema")(about.get("type"), f"{where}.type")
    return Schemas().rebuilt(about.get("schema"), f"{where}.schema")


def _check_context(fields: Mapping[str, Any]) -> None:
    context = known_fields(value_or(fields.get("context_management"), {}), ("edits",), "context_management")
    for at, edit in enumerate(array(value_or(context.get("edits"), []), "context_management.edits")):
        if edit != _KEEPS_ALL:
            where = f"context_management.edits[{at}]"
            raise RequestError(
                "unsupported", f"{where}: the sampled context cannot be edited; only {_KEEPS_ALL} is supported.", param=where
            )


def _shows_reasoning(value: Any) -> bool:
    """Whether the answer includes the reasoning. The request cannot change the amount of reasoning."""
    about = known_fields(value_or(value, {}), ("type", "budget_tokens", "display"), "thinking")
    kinds, displays = checks.one_of("enabled", "adaptive", "disabled"), checks.one_of("summarized", "updates", "omitted")
    check_all(about, {"type": kinds, "display": displays, "budget_tokens": checks.positive}, "thinking")
    return about.get("type") in ("enabled", "adaptive") and about.get("display") != "omitted"


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(answer: Answer, request: CompletionRequest) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning and request.options.get("thinking"):
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.id})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [{"type": "tool_use", "id": item.id, "name": item.call.name, "input": dict(item.call.arguments)} for item in answer.calls]
    return blocks


def _pieces(block: dict[str, Any], answer: Answer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the initial form of a block, and the deltas that complete it."""
    if block["type"] == "tool_use":
        arguments = next(called.arguments for called in answer.calls if called.id == block["id"])
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
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens, **cached}


class _Tools:
    """The tools of a request. Deferred tools are not shown to the policy until a result refers to them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], deferred: Sequence[bool]) -> None:
        self.shown = [tool for tool, later in zip(tools, deferred, strict=True) if not later]
        self.loaded: dict[str, Mapping[str, Any]] = {}
        self._deferred = {tool["function"]["name"]: tool for tool, later in zip(tools, deferred, strict=True) if later}
        self._known = {tool["function"]["name"]: tool for tool in tools}
        self._chars = 0  # total characters of definitions in results, which short references can repeat

    def definition(self, reference: Any, where: str) -> str:
        """Returns the definition of the tool to which a result refers, as a line of JSON. Raises `RequestError` if the request has no such
        tool, or if all definitions together have more than `MAX_BODY` characters."""
        name = text(reference, f"{where}.tool_name")
        if name not in self._known:
            raise RequestError("invalid", f"{where}.tool_name: {name[:100]!a} is not among the tools.", param=f"{where}.tool_name")
        if name in self._deferred:
            self.loaded[name] = self._deferred[name]
        line = json.dumps(self._known[name], ensure_ascii=False) + "\n"
        self._chars += len(line)
        if self._chars > MAX_BODY:
            raise RequestError("too_large", f"{where}: the references to tools have more than {MAX_BODY} characters.", param=where)
        return line


def _messages(value: Any, where: str, tools: _Tools) -> list[RequestMessage]:
    """Returns the messages into which one message is split. Each tool result becomes a separate message, and these messages precede the
    text."""
    about = mapping(value, where)
    role, content = about.get("role"), about.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError("invalid", f"{where}.role: must be user, assistant or system", param=f"{where}.role")
    if isinstance(content, str):
        return [said(role, content)]
    texts: list[str] = []
    results: list[RequestMessage] = []
    calls: list[tuple[str, ToolCall]] = []
    for at, item in enumerate(array(content, f"{where}.content")):
        here = f"{where}.content[{at}]"
        block = mapping(item, here)
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, here))
        elif kind == "tool_use" and role == "assistant":
            calls.append((text(block.get("id"), f"{here}.id"), checks.tool_call(block.get("name"), block.get("input"), here)))
        elif kind == "tool_result" and role == "user":
            name, ok = text(block.get("tool_use_id"), f"{here}.tool_use_id"), not flag(block.get("is_error"), f"{here}.is_error")
            results.append(said("tool", _result(block.get("content"), here, tools), call_id=name, ok=ok))
        elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
            raise RequestError(
                "unsupported", f"{here}.type: blocks of type {str(kind)[:40]!a} are not supported here", param=f"{here}.type"
            )
    if role == "assistant":
        return [said(role, "".join(texts), [call for _, call in calls], call_ids=tuple(name for name, _ in calls))]
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
    for at, part in enumerate(array(content, f"{where}.content")):
        here = f"{where}.content[{at}]"
        is_reference = mapping(part, here).get("type") == "tool_reference"
        parts.append(tools.definition(part.get("tool_name"), here) if is_reference else _text(part, here))
    return "".join(parts)


def _tool(value: Any, where: str) -> dict[str, Any]:
    about = mapping(value, where)
    if about.get("type") not in (None, "custom"):
        raise RequestError("unsupported", f"{where}.type: only tools of type 'custom' are supported", param=f"{where}.type")
    named = known_fields(about, _TOOL_FIELDS, where)
    check_all(named, {"cache_control": mapping, **dict.fromkeys(("strict", "eager_input_streaming", "defer_loading"), flag)}, where)
    lines = [text(value_or(named.get("description"), ""), f"{where}.description")]
    for at, example in enumerate(array(value_or(named.get("input_examples"), []), f"{where}.input_examples")):
        here = f"{where}.input_examples[{at}]"
        lines.append(f"Example: {json.dumps(checks.storable(mapping(example, here), here))}")
    return checks.function_tool(named.get("name"), "\n".join(filter(None, lines)), named.get("input_schema"), where)
