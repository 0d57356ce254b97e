"""OpenAI Responses: a request read, an answer written, whole or as the events of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway import chat_completions
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
    listed,
    mapping,
    nothing_else,
    one_of,
    said,
    split_system,
    text,
    whole,
    within,
)
from agentrl.gateway.schemas import ANY_OBJECT, Schemas
from agentrl.records import ToolCall

HINTS: Mapping[str, Check] = {
    **{"temperature": within(0, 2), "top_p": within(0, 1), "max_tool_calls": whole},
    **{"user": text, "metadata": mapping, "client_metadata": mapping, "service_tier": one_of("auto", "default")},
    **{"prompt_cache_key": text, "prompt_cache_retention": text, "safety_identifier": text},
}
"""Fields that are checked but have no effect. `max_tool_calls` limits built-in tools of the server, and the gateway has none."""

NOTHING: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    **dict.fromkeys(("conversation", "prompt", "moderation", "prompt_cache_options"), ()),
}
"""Fields that are taken where they ask for nothing."""

FIELDS = (
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "previous_response_id"),
    *("stream", "stream_options", "store", "text", "reasoning", "include"),
    *NOTHING,
    *HINTS,
)
ENCRYPTED = "reasoning.encrypted_content"
INCLUDED = (
    *(ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
)
"""Values of `include`. All except the first concern tools and pictures that no answer of the gateway has."""

_FORMAT = ("type", "name", "description", "schema", "strict")
_PREFIX = "resp_"
_IN = "__"
"""Between a namespace and the name of a tool in it, as the policy sees it: a word in every chat format."""

error = chat_completions.error


def read(body: Any) -> CompletionRequest:
    """Raises `RequestError`."""
    asked = fields(body, FIELDS)
    nothing_else(asked, NOTHING)
    check_all(asked, HINTS)
    entries = asked.get("input")
    messages = [said("user", entries)] if isinstance(entries, str) else _messages(listed(entries, "input"))
    heads, rest = split_system(messages)
    instructions = text(given(asked.get("instructions"), ""), "instructions")
    tools, spaces, strict = _tools(listed(given(asked.get("tools"), []), "tools", most=MAX_TOOLS))
    after, parallel = asked.get("previous_response_id"), asked.get("parallel_tool_calls")
    return CompletionRequest(
        model=text(asked.get("model"), "model"),
        system=(*filter(None, (instructions,)), *heads),
        messages=rest,
        tools=tuple(tools),
        max_tokens=whole(asked.get("max_output_tokens"), "max_output_tokens"),
        after=text(after, "previous_response_id").removeprefix(_PREFIX) if after is not None else "",
        stream=flag(asked.get("stream"), "stream"),
        shape=_shape(given(asked.get("text"), {})),
        **_choice(given(asked.get("tool_choice"), "auto"), tools),
        single=parallel is not None and not flag(parallel, "parallel_tool_calls"),
        strict=strict,
        options={**_options(asked), "previous_response_id": after, "spaces": spaces},
    )


def _options(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options that determine how the answer is written and stored. Also checks options that are objects."""
    shape = fields(given(asked.get("text"), {}), ("format", "verbosity"), where="text")
    check_all(shape, {"verbosity": one_of("low", "medium", "high")}, "text")
    summaries = dict.fromkeys(("summary", "generate_summary"), one_of("auto", "concise", "detailed", "none"))
    checks: dict[str, Check] = {"effort": one_of(*EFFORTS), "context": text, **summaries}
    check_all(fields(given(asked.get("reasoning"), {}), tuple(checks), where="reasoning"), checks, "reasoning")
    stream = fields(given(asked.get("stream_options"), {}), ("include_obfuscation",), where="stream_options")
    check_all(stream, {"include_obfuscation": flag}, "stream_options")
    included = listed(given(asked.get("include"), []), "include")
    for at, one in enumerate(included):
        one_of(*INCLUDED)(one, f"include[{at}]")
    stored = asked.get("store") is None or flag(asked["store"], "store")
    return {"encrypted": ENCRYPTED in included, "stored": stored}


def _choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `CompletionRequest` for a choice of tools."""
    if isinstance(value, str):
        return choice_of({"required": "any", "any": None, "tool": None}.get(value, value), None, tools, "tool_choice")
    about = mapping(value, "tool_choice")
    return choice_of("tool" if about.get("type") == "function" else None, about.get("name"), tools, "tool_choice")


def _shape(value: Any) -> Mapping[str, Any] | None:
    """The JSON schema of the answer, if one is requested."""
    where = "text.format"
    about = fields(given(mapping(value, "text").get("format"), {"type": "text"}), _FORMAT, where=where)
    if about.get("type") == "json_schema":
        return Schemas().rebuilt(about.get("schema"), f"{where}.schema")
    one_of("text", "json_object")(about.get("type"), f"{where}.type")
    return ANY_OBJECT if about["type"] == "json_object" else None


def write(answer: Answer, asked: CompletionRequest) -> dict[str, Any]:
    done = _response(answer, asked, status="incomplete" if answer.cut else "completed")
    return {**done, "output": _items(answer, asked), "usage": _usage(answer)}


def events(answer: Answer, asked: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event, in the order in which they are numbered."""
    for number, (name, data) in enumerate(_events(answer, asked)):
        yield name, {"type": name, "sequence_number": number, **data}


def _events(answer: Answer, asked: CompletionRequest) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _response(answer: Answer, asked: CompletionRequest, *, status: str) -> dict[str, Any]:
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
        "parallel_tool_calls": not asked.single,
        "previous_response_id": asked.options.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if asked.calls else "none",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _items(answer: Answer, asked: CompletionRequest) -> list[dict[str, Any]]:
    spaces = asked.options.get("spaces", {})
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought: dict[str, Any] = {
            "type": "reasoning",
            "id": f"rs_{answer.id}",
            "summary": [{"type": "summary_text", "text": answer.reasoning}],
        }
        items.append({**thought, "encrypted_content": answer.id} if asked.options.get("encrypted") else thought)
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


def _messages(items: Sequence[Any]) -> list[RequestMessage]:
    """Converts items to messages. Joins the texts and calls of one turn, which are separate items in any order."""
    made: list[RequestMessage] = []
    texts: list[str] = []  # of the turn that is being joined
    calls: list[tuple[str, ToolCall]] = []
    spoken = False

    def end_turn() -> None:
        nonlocal spoken
        if spoken:
            content = "\n".join(filter(None, texts))
            made.append(said("assistant", content, [one for _, one in calls], call_ids=tuple(name for name, _ in calls)))
        spoken = False
        texts.clear()
        calls.clear()

    for at, value in enumerate(items):
        where = f"input[{at}]"
        item = mapping(value, where)
        kind, role = given(item.get("type"), "message"), item.get("role")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            calls.append(_call(item, where))
            spoken = True
        elif kind == "message" and role == "assistant":
            texts.append(_content(item.get("content"), f"{where}.content"))
            spoken = True
        elif kind == "function_call_output":
            end_turn()
            output = _content(item.get("output"), f"{where}.output")
            made.append(said("tool", output, call_id=text(item.get("call_id"), f"{where}.call_id")))
        elif kind == "message" and role in ("user", "system", "developer"):
            end_turn()
            made.append(said("user" if role == "user" else "system", _content(item.get("content"), f"{where}.content")))
        else:
            field = "role" if kind == "message" else "type"
            raise RequestError("unsupported", f"{where}.{field}: items of this {field} are not supported.", param=f"{where}.{field}")
    end_turn()
    return made


def _call(item: Mapping[str, Any], where: str) -> tuple[str, ToolCall]:
    name = text(item.get("name"), f"{where}.name")
    if item.get("namespace"):
        name = text(item["namespace"], f"{where}.namespace") + _IN + name
    return text(item.get("call_id"), f"{where}.call_id"), call(name, item.get("arguments"), where)


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = []
    for at, one in enumerate(listed(value, where)):
        part = mapping(one, f"{where}[{at}]")
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise RequestError("unsupported", f"{where}[{at}].type: only text is supported.", param=f"{where}[{at}].type")
        field = "refusal" if kind == "refusal" else "text"
        parts.append(text(part.get(field), f"{where}[{at}].{field}"))
    return "".join(parts)


def _tools(values: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], frozenset[str]]:
    """The tools of a request; the namespace and name of tools in a namespace, which the policy sees as one name; the strict tools."""
    tools: list[dict[str, Any]] = []
    spaces: dict[str, tuple[str, str]] = {}
    strict: set[str] = set()
    chars = 0  # of descriptions: a namespace's is told with each of its tools
    for at, value in enumerate(values):
        where = f"tools[{at}]"
        about = mapping(value, where)
        space, told, inner = None, "", [(about, where)]
        if about.get("type") == "namespace":
            named = fields(about, ("type", "name", "description", "tools"), where=where)
            space, told = text(named.get("name"), f"{where}.name"), text(given(named.get("description"), ""), f"{where}.description")
            some = listed(named.get("tools"), f"{where}.tools", most=MAX_TOOLS)
            inner = [(mapping(one, f"{where}.tools[{place}]"), f"{where}.tools[{place}]") for place, one in enumerate(some)]
        for one, here in inner:
            made = _tool(one, here)
            chars += len(told)
            if chars > MAX_BODY:
                raise RequestError("too_large", f"tools: descriptions of more than {MAX_BODY} characters.", param="tools")
            if space is not None:
                own = made["function"]["name"]
                description = "\n".join(filter(None, (told, made["function"]["description"])))
                made["function"] |= {"name": space + _IN + own, "description": description}
                spaces[space + _IN + own] = (space, own)
            strict |= {made["function"]["name"]} if one.get("strict") else set()
            tools.append(made)
    names = Counter(tool["function"]["name"] for tool in tools)
    if len(tools) > MAX_TOOLS or any(names[name] > 1 for name in spaces):
        raise RequestError("invalid", f"tools: more than {MAX_TOOLS} of them, or two that have one name.", param="tools")
    return tools, spaces, frozenset(strict)


def _tool(about: dict[str, Any], where: str) -> dict[str, Any]:
    if about.get("type") != "function":
        raise RequestError("unsupported", f"{where}.type: only tools of type 'function' are supported.", param=f"{where}.type")
    named = fields(about, ("type", "name", "description", "parameters", "strict"), where=where)
    flag(named.get("strict"), f"{where}.strict")
    return function(named.get("name"), named.get("description"), named.get("parameters"), where)
