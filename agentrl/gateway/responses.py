"""OpenAI Responses: parses requests and writes answers, at once or as a stream of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway import chat_completions, checks
from agentrl.gateway.checks import Check, check_all, known_fields, mapping, text, value_or
from agentrl.gateway.constraint import answer_schema
from agentrl.gateway.request import MAX_BODY, MAX_TOOLS, Answer, CompletionRequest, RequestError, RequestMessage, said, split_system
from agentrl.records import ToolCall

HINTS: Mapping[str, Check] = {
    **{"temperature": checks.within(0, 2), "top_p": checks.within(0, 1), "max_tool_calls": checks.positive},
    **{"user": text, "metadata": mapping, "client_metadata": mapping, "service_tier": checks.one_of("auto", "default")},
    **{"prompt_cache_key": text, "prompt_cache_retention": text, "safety_identifier": text},
}
"""Fields that are checked but have no effect. `max_tool_calls` limits a server's built-in tools, and the gateway has none."""

INERT: Mapping[str, tuple[Any, ...]] = {
    **{"background": (False,), "top_logprobs": (0,), "truncation": ("disabled",), "context_management": ([],)},
    **dict.fromkeys(("conversation", "prompt", "moderation", "prompt_cache_options"), ()),
}
"""Unsupported fields -> values other than null that are accepted because they have no effect."""

FIELDS = (
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "previous_response_id"),
    *("stream", "stream_options", "store", "text", "reasoning", "include", *INERT, *HINTS),
)
ENCRYPTED = "reasoning.encrypted_content"
INCLUDED = (
    *(ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
)
"""Accepted values of `include`. All except the first concern tools and images, which the gateway's answers never contain."""

_PREFIX = "resp_"
_SEPARATOR = "__"
"""Separator between a namespace and the name of a tool in it, in the names that the policy sees. It is valid in every chat format."""

error = chat_completions.error


def read(body: Any) -> CompletionRequest:
    """Parses a request. Raises `RequestError` if a field is unknown, invalid or not supported."""
    fields = known_fields(body, FIELDS)
    checks.check_inert(fields, INERT)
    check_all(fields, HINTS)
    entries = fields.get("input")
    heads, rest = split_system([said("user", entries)] if isinstance(entries, str) else _messages(checks.array(entries, "input")))
    instructions = text(value_or(fields.get("instructions"), ""), "instructions")
    tools, spaces, strict = _tools(checks.array(value_or(fields.get("tools"), []), "tools", most=MAX_TOOLS))
    after, parallel = fields.get("previous_response_id"), fields.get("parallel_tool_calls")
    choice = value_or(fields.get("tool_choice"), "auto")
    shape = known_fields(value_or(fields.get("text"), {}), ("format", "verbosity"), "text")
    form = known_fields(value_or(shape.get("format"), {"type": "text"}), ("type", "name", "description", "schema", "strict"), "text.format")
    return CompletionRequest(
        model=text(fields.get("model"), "model"),
        system=(*filter(None, (instructions,)), *heads),
        messages=rest,
        tools=tuple(tools),
        max_tokens=checks.positive(fields.get("max_output_tokens"), "max_output_tokens"),
        after=text(after, "previous_response_id").removeprefix(_PREFIX) if after is not None else "",
        stream=checks.flag(fields.get("stream"), "stream"),
        shape=answer_schema(form, "text.format"),
        **(checks.openai_choice(choice, tools, "tool_choice") if isinstance(choice, str) else _choice(choice, tools)),
        single=parallel is not None and not checks.flag(parallel, "parallel_tool_calls"),
        strict=strict,
        options={**_options(fields, shape), "previous_response_id": after, "spaces": spaces},
    )


def _choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    about = mapping(value, "tool_choice")
    return checks.tool_choice("tool" if about.get("type") == "function" else None, about.get("name"), tools, "tool_choice")


def _options(fields: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that determine how the answer is written and stored. Also checks the options whose values are objects."""
    check_all(shape, {"verbosity": checks.one_of("low", "medium", "high")}, "text")
    summaries = dict.fromkeys(("summary", "generate_summary"), checks.one_of("auto", "concise", "detailed", "none"))
    reasoning: dict[str, Check] = {"effort": checks.one_of(*checks.EFFORTS), "context": text, **summaries}
    check_all(known_fields(value_or(fields.get("reasoning"), {}), tuple(reasoning), "reasoning"), reasoning, "reasoning")
    stream = known_fields(value_or(fields.get("stream_options"), {}), ("include_obfuscation",), "stream_options")
    check_all(stream, {"include_obfuscation": checks.flag}, "stream_options")
    included = checks.array(value_or(fields.get("include"), []), "include")
    for at, value in enumerate(included):
        checks.one_of(*INCLUDED)(value, f"include[{at}]")
    stored = fields.get("store") is None or checks.flag(fields["store"], "store")
    return {"encrypted": ENCRYPTED in included, "stored": stored}


def write(answer: Answer, request: CompletionRequest) -> dict[str, Any]:
    """Returns the response body for an answer."""
    response = _response(answer, request, status="incomplete" if answer.cut else "completed")
    return {**response, "output": _items(answer, request), "usage": _usage(answer)}


def events(answer: Answer, request: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """Yields a pair (name, data) for each event of the stream, in the order of the sequence numbers."""
    for number, (name, data) in enumerate(_events(answer, request)):
        yield name, {"type": name, "sequence_number": number, **data}


def _events(answer: Answer, request: CompletionRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    response = _response(answer, request, status="in_progress")
    yield "response.created", {"response": response}
    yield "response.in_progress", {"response": response}
    for index, item in enumerate(_items(answer, request)):
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
    yield ("response.incomplete" if answer.cut else "response.completed"), {"response": write(answer, request)}


def _response(answer: Answer, request: CompletionRequest, *, status: str) -> dict[str, Any]:
    unset = dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p", "usage"))
    return {
        **unset,
        **{"id": f"{_PREFIX}{answer.id}", "object": "response", "created_at": answer.created, "status": status, "model": answer.model},
        **({"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}),
        **{"max_output_tokens": request.max_tokens, "previous_response_id": request.options.get("previous_response_id")},
        **{"parallel_tool_calls": not request.single, "tool_choice": "auto" if request.calls else "none", "truncation": "disabled"},
        **{"output": [], "tools": [], "metadata": {}, "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}},
    }


def _items(answer: Answer, request: CompletionRequest) -> list[dict[str, Any]]:
    spaces = request.options.get("spaces", {})
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        encrypted = {"encrypted_content": answer.id} if request.options.get("encrypted") else {}
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": summary, **encrypted})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        status = "incomplete" if answer.cut else "completed"
        items.append({"type": "message", "id": f"msg_{answer.id}", "status": status, "role": "assistant", "content": [part]})
    for called in answer.calls:
        space, name = spaces.get(called.call.name, (None, called.call.name))
        about = {"call_id": called.id, "name": name, "arguments": called.arguments, "status": "completed"}
        about |= {"namespace": space} if space else {}
        items.append({"type": "function_call", "id": f"fc_{called.id}", **about})
    return items


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _messages(items: Sequence[Any]) -> list[RequestMessage]:
    """Converts items to messages. Joins the text and the calls of one turn, which arrive as separate items in any order.
    Drops reasoning."""
    messages: list[RequestMessage] = []
    texts: list[str] = []  # contents of the turn that is being joined
    calls: list[tuple[str, ToolCall]] = []
    in_turn = False

    def end_turn() -> None:
        nonlocal in_turn
        if in_turn:
            ids = tuple(name for name, _ in calls)
            messages.append(said("assistant", "\n".join(filter(None, texts)), [call for _, call in calls], call_ids=ids))
        in_turn = False
        texts.clear()
        calls.clear()

    for at, value in enumerate(items):
        where = f"input[{at}]"
        item = mapping(value, where)
        kind, role = value_or(item.get("type"), "message"), item.get("role")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            calls.append(_call(item, where))
            in_turn = True
        elif kind == "message" and role == "assistant":
            texts.append(_content(item.get("content"), f"{where}.content"))
            in_turn = True
        elif kind == "function_call_output":
            end_turn()
            output = _content(item.get("output"), f"{where}.output")
            messages.append(said("tool", output, call_id=text(item.get("call_id"), f"{where}.call_id")))
        elif kind == "message" and role in ("user", "system", "developer"):
            end_turn()
            messages.append(said("user" if role == "user" else "system", _content(item.get("content"), f"{where}.content")))
        else:
            field = "role" if kind == "message" else "type"
            raise RequestError("unsupported", f"{where}.{field}: items of this {field} are not supported.", param=f"{where}.{field}")
    end_turn()
    return messages


def _call(item: Mapping[str, Any], where: str) -> tuple[str, ToolCall]:
    name = text(item.get("name"), f"{where}.name")
    if item.get("namespace"):
        name = text(item["namespace"], f"{where}.namespace") + _SEPARATOR + name
    return text(item.get("call_id"), f"{where}.call_id"), checks.tool_call(name, item.get("arguments"), where)


def _content(value: Any, where: str) -> str:
    return checks.text_content(value, where, {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"})


def _tools(values: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], frozenset[str]]:
    """Returns the tools of a request, a mapping for the namespaced tools (name that the policy sees -> namespace and original name), and
    the names of the strict tools."""
    tools: list[dict[str, Any]] = []
    spaces: dict[str, tuple[str, str]] = {}
    strict: set[str] = set()
    chars = 0  # total characters of namespace descriptions, which are repeated for each tool
    for at, value in enumerate(values):
        where = f"tools[{at}]"
        about = mapping(value, where)
        space, shared, inner = None, "", [(about, where)]
        if about.get("type") == "namespace":
            named = known_fields(about, ("type", "name", "description", "tools"), where)
            space, shared = text(named.get("name"), f"{where}.name"), text(value_or(named.get("description"), ""), f"{where}.description")
            some = checks.array(named.get("tools"), f"{where}.tools", most=MAX_TOOLS)
            inner = [(mapping(item, f"{where}.tools[{index}]"), f"{where}.tools[{index}]") for index, item in enumerate(some)]
        for item, here in inner:
            tool = _tool(item, here)
            function = tool["function"]
            chars += len(shared)
            if chars > MAX_BODY:
                raise RequestError("too_large", f"tools: the descriptions have more than {MAX_BODY} characters.", param="tools")
            if space is not None:
                full_name, own_name = space + _SEPARATOR + function["name"], function["name"]
                function |= {"name": full_name, "description": "\n".join(filter(None, (shared, function["description"])))}
                spaces[full_name] = (space, own_name)
            strict |= {function["name"]} if item.get("strict") else set()
            tools.append(tool)
    names = Counter(tool["function"]["name"] for tool in tools)
    if len(tools) > MAX_TOOLS or any(names[name] > 1 for name in spaces):
        raise RequestError("invalid", f"tools: there are more than {MAX_TOOLS} tools, or two tools have the same name.", param="tools")
    return tools, spaces, frozenset(strict)


def _tool(about: dict[str, Any], where: str) -> dict[str, Any]:
    if about.get("type") != "function":
        raise RequestError("unsupported", f"{where}.type: only tools of type 'function' are supported.", param=f"{where}.type")
    named = known_fields(about, ("type", "name", "description", "parameters", "strict"), where)
    checks.flag(named.get("strict"), f"{where}.strict")
    return checks.function_tool(named.get("name"), named.get("description"), named.get("parameters"), where)
