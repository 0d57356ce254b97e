"""OpenAI Responses: a request read, an answer written, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.gateway import chat_completions
from agentrl.gateway.asked import (
    MAX_BODY,
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
    *("temperature", "top_p", "parallel_tool_calls", "max_tool_calls", "truncation", "reasoning", "include", "stream_options"),
    *("store", "user", "metadata", "client_metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
)
"""Fields that are taken and change nothing. What a session was answered is kept until its end, whether `store` asks for it or not."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto",),
    "background": (False,),
    "top_logprobs": (0,),
    "conversation": (),
    "prompt": (),
}
"""Fields that are taken where they ask for nothing."""

FIELDS = (
    *("model", "input", "instructions", "tools", "max_output_tokens", "previous_response_id", "stream", "text"),
    *NOTHING,
    *HINTS,
)
_PREFIX = "resp_"
_IN = "__"
"""Between a namespace and the name of a tool in it, as the policy sees it: a word in every chat format."""

error = chat_completions.error


def read(body: Any) -> Asked:
    """Raises `Refused`."""
    asked = fields(body, FIELDS)
    nothing_else(asked, NOTHING)
    shape = fields(asked.get("text") or {}, ("format", "verbosity"), where="text")
    nothing_else(shape, {"format": ({"type": "text"},)})
    given = asked.get("input")
    messages = [said("user", given)] if isinstance(given, str) else _messages(listed(given, "input"))
    heads, rest = split_system(messages)
    instructions = asked.get("instructions")
    system = (*([text(instructions, "instructions")] if instructions else []), *heads)
    tools, spaces = _tools(listed(asked.get("tools") or [], "tools", most=MAX_TOOLS))
    after = asked.get("previous_response_id")
    return Asked(
        model=text(asked.get("model"), "model"),
        system=system,
        messages=rest,
        tools=tuple(tools),
        max_tokens=whole(asked.get("max_output_tokens"), "max_output_tokens"),
        after=text(after, "previous_response_id").removeprefix(_PREFIX) if after is not None else "",
        stream=flag(asked.get("stream"), "stream"),
        options={"previous_response_id": after, "spaces": spaces},
    )


def write(answer: Answer, asked: Asked) -> dict[str, Any]:
    done = _response(answer, asked, status="incomplete" if answer.cut else "completed")
    return {**done, "output": _items(answer, asked), "usage": _usage(answer)}


def events(answer: Answer, asked: Asked) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event, in the order in which they are numbered."""
    for number, (name, data) in enumerate(_events(answer, asked)):
        yield name, {"type": name, "sequence_number": number, **data}


def _events(answer: Answer, asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(answer, asked, status="in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(answer, asked)):
        at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            [part] = item["content"]
            yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", "content": []}}
            at["content_index"] = 0
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        elif item["type"] == "function_call":
            yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", "arguments": ""}}
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        else:
            yield "response.output_item.added", {"output_index": index, "item": item}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield ("response.incomplete" if answer.cut else "response.completed"), {"response": write(answer, asked)}


def _response(answer: Answer, asked: Asked, *, status: str) -> dict[str, Any]:
    return {
        "id": f"{_PREFIX}{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": asked.max_tokens,
        "metadata": {},
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": asked.options.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _items(answer: Answer, asked: Asked) -> list[dict[str, Any]]:
    spaces = asked.options.get("spaces") or {}
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [{"type": "summary_text", "text": answer.reasoning}]})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        status = "incomplete" if answer.cut else "completed"
        items.append({"type": "message", "id": f"msg_{answer.id}", "status": status, "role": "assistant", "content": [part]})
    for one in answer.calls:
        space, name = spaces.get(one.call.name, (None, one.call.name))
        about = {"call_id": one.id, "name": name, "arguments": one.arguments, "status": "completed"}
        about |= {"namespace": space} if space else {}
        items.append({"type": "function_call", "id": f"fc_{one.id}", **about})
    return items


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _messages(items: Sequence[Any]) -> list[Said]:
    """Items as messages: the text and the calls of one turn, which are items of their own, are put together."""
    made: list[Said] = []
    words: str | None = None  # of the turn that is being put together
    calls: list[tuple[str, ToolCall]] = []

    def end_turn() -> None:
        nonlocal words
        if words is not None or calls:
            made.append(said("assistant", words or "", [one for _, one in calls], call_ids=tuple(name for name, _ in calls)))
        words = None
        calls.clear()

    for at, value in enumerate(items):
        where = f"input[{at}]"
        item = mapping(value, where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            name = text(item.get("name"), f"{where}.name")
            if item.get("namespace"):
                name = text(item["namespace"], f"{where}.namespace") + _IN + name
            calls.append((text(item.get("call_id"), f"{where}.call_id"), call(name, item.get("arguments"), where)))
            continue
        if kind == "message" and item.get("role") == "assistant":
            if words is not None or calls:
                end_turn()
            words = _content(item.get("content"), where)
            continue
        end_turn()
        if kind == "function_call_output":
            made.append(said("tool", _content(item.get("output"), where), call_id=text(item.get("call_id"), f"{where}.call_id")))
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            role = "user" if item["role"] == "user" else "system"
            made.append(said(role, _content(item.get("content"), where)))
        else:
            raise Refused("unsupported", f"{where}: items of this type or role are not supported.", param=where)
    end_turn()
    return made


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = []
    for at, one in enumerate(listed(value, f"{where}.content")):
        part = mapping(one, f"{where}.content[{at}]")
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise Refused("unsupported", f"{where}.content[{at}]: only text is supported.", param=where)
        parts.append(text(part.get("text"), f"{where}.content[{at}].text"))
    return "".join(parts)


def _tools(values: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The tools of a request, and of those in a namespace, which the policy knows by both names in one, the two names."""
    tools: list[dict[str, Any]] = []
    spaces: dict[str, tuple[str, str]] = {}
    chars = 0  # of descriptions: a namespace's is told with each of its tools
    for at, value in enumerate(values):
        where = f"tools[{at}]"
        about = mapping(value, where)
        if about.get("type") != "namespace":
            tools.append(_tool(about, where))
            continue
        space = fields(about, ("type", "name", "description", "tools"), where=where)
        about_all = text(space.get("description") or "", f"{where}.description")
        name, inner = text(space.get("name"), f"{where}.name"), listed(space.get("tools"), f"{where}.tools", most=MAX_TOOLS)
        for place, one in enumerate(inner):
            made = _tool(mapping(one, f"{where}.tools[{place}]"), f"{where}.tools[{place}]")
            own = made["function"]["name"]
            chars += len(about_all)
            if chars > MAX_BODY:
                raise Refused("too_large", f"tools: descriptions of more than {MAX_BODY} characters.", param="tools")
            told = "\n".join(filter(None, (about_all, made["function"]["description"])))
            made["function"] |= {"name": name + _IN + own, "description": told}
            spaces[name + _IN + own] = (name, own)
            tools.append(made)
    names = [tool["function"]["name"] for tool in tools]
    if len(tools) > MAX_TOOLS or any(names.count(name) > 1 for name in spaces):
        raise Refused("invalid", f"tools: more than {MAX_TOOLS} of them, or two that have one name.", param="tools")
    return tools, spaces


def _tool(about: dict[str, Any], where: str) -> dict[str, Any]:
    if about.get("type") != "function":
        raise Refused("unsupported", f"{where}.type: only tools of type 'function' are supported.", param=f"{where}.type")
    named = fields(about, ("type", "name", "description", "parameters", "strict"), where=where)
    return function(named.get("name"), named.get("description"), named.get("parameters"), where)
