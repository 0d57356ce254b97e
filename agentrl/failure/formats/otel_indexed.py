"""Messages in numbered attributes, for exporters without structured values: `gen_ai.prompt.0.role` of OpenLLMetry (before that
`llm.prompts.0.content`), `llm.input_messages.0.message.role` of OpenInference.

Described at https://github.com/traceloop/openllmetry, packages/opentelemetry-semantic-conventions-ai, and at
https://github.com/Arize-ai/openinference, spec/semantic_conventions.md. Indices are dictionary keys here, so a huge index costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.failure.formats.values import Gaps, decode_json, object_or_empty
from agentrl.failure.trace import ImportedMessage

Read = Callable[[Mapping[str, Any], str, Gaps], Iterator[ImportedMessage]]

PROMPTS = ("gen_ai.prompt", "gen_ai.input.messages", "llm.input_messages", "llm.prompts")
COMPLETIONS = ("gen_ai.completion", "gen_ai.output.messages", "llm.output_messages", "llm.completions")
_TOOLS = ("llm.tools", "llm.request.functions", "gen_ai.tool.definitions")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_DEEPEST = 8  # names in a key after that of the list
_NOT_KEPT = ("finish_reason", "refusal_reason", "index")  # of a message: said elsewhere
_ROLES = ("system", "user", "assistant")


def has_messages(attributes: Mapping[str, Any]) -> bool:
    """Whether attributes hold numbered messages."""
    starts = tuple(f"{name}." for name in (*PROMPTS, *COMPLETIONS))
    return any(key.startswith(starts) and any(map(str.isdigit, key)) for key in attributes)


def messages(attributes: Mapping[str, Any], lists: tuple[str, ...], role: str, gaps: Gaps, read: Read) -> Iterator[ImportedMessage]:
    """The messages of the first of these lists that has any, in the order of their numbers. Raises `ValueError`.

    Args:
        role: of messages without one.
        read: the reader of one message with its name, as structured attributes have it.
    """
    for name in lists:
        items = numbered(attributes, name, gaps)
        for number, item in enumerate(items):
            yield from read({"role": role, **_chat_message(item)}, f"{name}[{number}]", gaps)
        if items:
            return


def definitions(attributes: Mapping[str, Any], gaps: Gaps) -> list[dict[str, Any]]:
    """The schemas of the tools that a call offers."""
    schemas: list[dict[str, Any]] = []
    for name in _TOOLS:
        for item in numbered(attributes, name, gaps):
            schema = decode_json(object_or_empty(item.get("tool")).get("json_schema"))
            schema = schema if isinstance(schema, dict) else {key: decode_json(value) for key, value in item.items() if key != "tool"}
            schemas.append(schema if "function" in schema else {"type": "function", "function": schema})
    return schemas


def numbered(attributes: Mapping[str, Any], name: str, gaps: Gaps) -> list[dict[str, Any]]:
    """The items of a list whose attributes are called NAME.NUMBER.KEY, in the order of their numbers. What cannot be read is a gap."""
    items: dict[int, dict[str, Any]] = {}
    start = f"{name}."
    for key, value in attributes.items():
        if not key.startswith(start):
            continue
        number, _, rest = key[len(start) :].partition(".")
        if not _INDEX.fullmatch(number):
            if number.isdigit():
                gaps.add(f"{name} with a number that is no index")
            continue
        _put(items.setdefault(int(number), {}), rest.split(".") if rest else ["content"], value, name, gaps)
    if items and max(items) >= len(items):
        gaps.add(f"{name} between those that have attributes")
    return [_with_lists(items[number]) for number in sorted(items)]


def _put(item: dict[str, Any], path: list[str], value: Any, name: str, gaps: Gaps) -> None:
    """Sets a value at a path of names. A path that is too long, or leads through a value, is a gap."""
    node = item
    if len(path) <= _DEEPEST:
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                break
        else:
            if path[-1] not in node:
                node[path[-1]] = value
                return
    gaps.add(f"attributes of {name} that contradict others or are nested too deep")


def _with_lists(item: dict[str, Any]) -> dict[str, Any]:
    """The item with a list in place of each object whose keys are numbers."""
    return {key: _listed(value) for key, value in item.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(map(_INDEX.fullmatch, value)):
        return [_listed(value[key]) for key in sorted(value, key=int)]
    return _with_lists(value)


def _chat_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the chat completions API writes it, in which a call has its name and arguments in `function`."""
    fields = object_or_empty(item.get("message")) or dict(item)
    message = {key: value for key, value in fields.items() if key not in _NOT_KEPT}
    if "role" not in message and len(spoken := [role for role in _ROLES if isinstance(message.get(role), str)]) == 1:
        message |= {"role": spoken[0], "content": message.pop(spoken[0])}
    if isinstance(contents := message.pop("contents", None), list):
        message["content"] = [object_or_empty(object_or_empty(one).get("message_content")) for one in contents]
    elif isinstance(text := message.get("content"), str) and text.startswith("[{"):
        parts = decode_json(text)
        message["content"] = parts if isinstance(parts, list) and all("type" in object_or_empty(part) for part in parts) else text
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(object_or_empty(object_or_empty(one).get("tool_call")) or object_or_empty(one)) for one in calls]
    name, arguments = message.pop("function_call_name", None), message.pop("function_call_arguments_json", None)
    if name is not None:
        message["function_call"] = {"name": name, "arguments": arguments}
    return message


def _call(fields: Mapping[str, Any]) -> dict[str, Any]:
    function = fields.get("function") or {key: fields[key] for key in ("name", "arguments") if key in fields}
    return {"id": fields.get("id"), "function": function}
