"""Messages in indexed attributes, of exporters without structured values: `gen_ai.prompt.0.role` of OpenLLMetry (formerly
`llm.prompts.0.content`), `llm.input_messages.0.message.role` of OpenInference.

Described at https://github.com/traceloop/openllmetry, packages/opentelemetry-semantic-conventions-ai, and at
https://github.com/Arize-ai/openinference, spec/semantic_conventions.md. Indices become dictionary keys, so a huge index costs nothing.
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
_MAX_DEPTH = 8  # names in a key after the name of the list
_IGNORED_KEYS = ("finish_reason", "refusal_reason", "index")
_ROLES = ("system", "user", "assistant")


def has_messages(attributes: Mapping[str, Any]) -> bool:
    """Whether attributes hold indexed messages."""
    prefixes = tuple(f"{name}." for name in (*PROMPTS, *COMPLETIONS))
    return any(key.startswith(prefixes) and any(map(str.isdigit, key)) for key in attributes)


def messages(attributes: Mapping[str, Any], lists: tuple[str, ...], role: str, gaps: Gaps, read: Read) -> Iterator[ImportedMessage]:
    """Yields the messages of the first of these lists that has any, ordered by index. Raises `ValueError`.

    Args:
        role: of messages without one.
        read: parses one message in the form of structured attributes.
    """
    for name in lists:
        items = indexed_items(attributes, name, gaps)
        for number, item in enumerate(items):
            yield from read({"role": role, **_chat_message(item)}, f"{name}[{number}]", gaps)
        if items:
            return


def definitions(attributes: Mapping[str, Any], gaps: Gaps) -> list[dict[str, Any]]:
    """The schemas of the tools that a call offers."""
    schemas: list[dict[str, Any]] = []
    for name in _TOOLS:
        for item in indexed_items(attributes, name, gaps):
            schema = decode_json(object_or_empty(item.get("tool")).get("json_schema"))
            schema = schema if isinstance(schema, dict) else {key: decode_json(value) for key, value in item.items() if key != "tool"}
            schemas.append(schema if "function" in schema else {"type": "function", "function": schema})
    return schemas


def indexed_items(attributes: Mapping[str, Any], name: str, gaps: Gaps) -> list[dict[str, Any]]:
    """The items of a list whose attributes are called NAME.INDEX.KEY, ordered by index. Unreadable ones are gaps."""
    items: dict[int, dict[str, Any]] = {}
    prefix = f"{name}."
    for key, value in attributes.items():
        if not key.startswith(prefix):
            continue
        number, _, rest = key[len(prefix) :].partition(".")
        if _INDEX.fullmatch(number):
            _put(items.setdefault(int(number), {}), rest.split(".") if rest else ["content"], value, name, gaps)
        elif number.isdigit():
            gaps.add(f"{name} with a number that is not an index")
    if items and max(items) >= len(items):
        gaps.add(f"{name} between those that have attributes")
    return [{key: _with_lists(value) for key, value in items[number].items()} for number in sorted(items)]


def _put(item: dict[str, Any], path: list[str], value: Any, name: str, gaps: Gaps) -> None:
    """Sets a value at a path of keys. A path that is too long, or leads through a value, is a gap."""
    node = item
    if len(path) <= _MAX_DEPTH:
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                break
        else:
            if path[-1] not in node:
                node[path[-1]] = value
                return
    gaps.add(f"attributes of {name} that contradict others or are nested too deep")


def _with_lists(value: Any) -> Any:
    """The value with a list instead of each object whose keys are indices."""
    if not isinstance(value, dict):
        return value
    if value and all(map(_INDEX.fullmatch, value)):
        return [_with_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _with_lists(item) for key, item in value.items()}


def _chat_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """The message in the form of the chat completions API."""
    fields = object_or_empty(item.get("message")) or dict(item)
    message = {key: value for key, value in fields.items() if key not in _IGNORED_KEYS}
    if "role" not in message and len(roles := [role for role in _ROLES if isinstance(message.get(role), str)]) == 1:
        message |= {"role": roles[0], "content": message.pop(roles[0])}
    if isinstance(contents := message.pop("contents", None), list):
        message["content"] = [object_or_empty(object_or_empty(part).get("message_content")) for part in contents]
    elif isinstance(text := message.get("content"), str) and text.startswith("[{"):
        parts = decode_json(text)
        message["content"] = parts if isinstance(parts, list) and all("type" in object_or_empty(part) for part in parts) else text
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(object_or_empty(object_or_empty(call).get("tool_call")) or object_or_empty(call)) for call in calls]
    name, arguments = message.pop("function_call_name", None), message.pop("function_call_arguments_json", None)
    if name is not None:
        message["function_call"] = {"name": name, "arguments": arguments}
    return message


def _call(fields: Mapping[str, Any]) -> dict[str, Any]:
    function = fields.get("function") or {key: fields[key] for key in ("name", "arguments") if key in fields}
    return {"id": fields.get("id"), "function": function}
