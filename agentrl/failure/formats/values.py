"""Checks values in third-party JSON. If a value has the wrong type, the functions raise a `ValueError` that names the value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from agentrl.base import user_code
from agentrl.failure.trace import ImportedMessage
from agentrl.records import Message, ToolCall, fields

UNPARSED = "__unparsed__"
"""Name of the single argument that a call receives if its arguments are not a JSON object. The value is the text of the arguments."""
_MAX_LABEL = 200  # maximum characters
_MAX_GAPS = 40  # maximum number of different gaps in one trace
_TYPE_NAMES = {
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class Gaps:
    """Descriptions of what a trace's source did not contain, with counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, description: str, times: int = 1) -> None:
        """Adds `times` to the count of a gap. Different gaps after the first `_MAX_GAPS` are counted together, as "other things"."""
        known = description in self._counts or len(self._counts) < _MAX_GAPS
        self._counts[description if known else "other things"] += times

    def merge_repeated(self, other: Gaps) -> None:
        """Merges the gaps in `other`, which may repeat gaps that are already counted. Each gap keeps the larger of the two counts."""
        for description, times in other._counts.items():
            self.add(description, max(0, times - self._counts[description]))

    def descriptions(self) -> tuple[str, ...]:
        """Returns the descriptions of the gaps. A description with a count above 1 includes the count."""
        return tuple(text if times == 1 else f"{text} ({times} times)" for text, times in self._counts.items())


def type_name(value: Any) -> str:
    """Returns the name of a JSON value's type for use in messages, such as "an object"."""
    return _TYPE_NAMES.get(type(value), "something else")


def as_objects(value: Any, what: str) -> list[dict[str, Any]]:
    """Returns a list of objects unchanged, and an empty list for null. `what` is the name of the value in error messages."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{what} is {type_name(value)}, not a list")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"{what}[{number}] is {type_name(item)}, not an object")
    return value


def as_object(value: Any, what: str) -> dict[str, Any]:
    """Returns an object unchanged, and an empty object for null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type_name(value)}, not an object")
    return value


def as_string(value: Any, what: str) -> str:
    """Returns a string unchanged, and an empty string for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type_name(value)}, not a string")
    return value


def object_or_empty(value: Any) -> dict[str, Any]:
    """Returns an object unchanged, and an empty object for any other value."""
    return value if isinstance(value, dict) else {}


def printable_label(value: Any) -> str:
    """Returns a name or id as one printable line of at most `_MAX_LABEL` characters; empty if it is not a string or a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 63 else ""
    return " ".join(user_code.printable(fields.text(value), _MAX_LABEL).split())


def message_text(value: Any, what: str, gaps: Gaps) -> str:
    """Returns the text of a message: a string unchanged, or the joined text of a list of parts. Parts without text are recorded as gaps."""
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for number, part in enumerate(as_objects(value, what)):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            texts.append(text)
        else:
            gaps.add(f"content of type {printable_label(kind) or 'unknown'}: only text is kept")
            as_string(text, f"{what}[{number}].text")
    return "\n".join(texts)


def decode_json(value: Any) -> Any:
    """Returns the value that a string of JSON encodes.

    A string that is not JSON, or a value that is not a string, is returned unchanged.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def as_text(value: Any, what: str) -> str:
    """Returns a string unchanged, and any other value as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None


def build_tool_call(name: Any, arguments: Any, what: str, gaps: Gaps) -> ToolCall:
    """Builds a tool call. `arguments` is an object or its JSON text. Any other value is passed as text in the argument `UNPARSED`.

    Missing arguments are recorded as a gap. Raises `ValueError` if the name is missing or not a string.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} has no valid function name: the name is {type_name(name)}")
    if arguments is None or arguments == "":
        gaps.add("arguments of a tool call")
        return ToolCall(name=name, arguments={})
    parsed = decode_json(arguments)
    if isinstance(parsed, dict):
        try:
            return ToolCall(name=name, arguments=parsed)
        except ValueError:  # NaN, infinity, nesting that is too deep, or an unpaired surrogate
            pass
    return ToolCall(name=name, arguments={UNPARSED: fields.text(as_text(arguments, what))})


def arguments_text(call: ToolCall) -> str:
    """Returns the arguments of a call as JSON text, or the original text if that could not be parsed."""
    unparsed = call.arguments.get(UNPARSED)
    return unparsed if isinstance(unparsed, str) and len(call.arguments) == 1 else json.dumps(dict(call.arguments), ensure_ascii=False)


def parse_role(value: Any, what: str) -> str:
    """Returns the role of a message without extra white space; `tool` replaces the older name `function`.

    Raises `ValueError` if the value is neither a string nor null.
    """
    role = " ".join(as_string(value, what).split())
    return "tool" if role == "function" else role


def build_message(
    role: str, text: str, *, calls: Sequence[ToolCall] = (), call_ids: Sequence[str] = (), answers: str = "", failed: bool = False,
    reasoning: str = "", agent: str = "", at_s: float | None = None, gaps: Gaps | None = None,
) -> ImportedMessage:  # fmt: skip
    """Builds a message. Drops parts that ATIF cannot express, and records them as gaps.

    The dropped parts are calls in a message with the role `tool`, and reasoning in a message that is not an assistant's and has no calls.
    Raises `ValueError` if the role is not a printable name of at most 40 characters.
    """
    if not role or len(role) > 40 or not role.isprintable():
        raise ValueError(f"a message has the invalid role {role[:40]!a}")
    if role == "tool" and calls:
        if gaps is not None:
            gaps.add("tool calls in a message of role tool: they are not kept")
        calls, call_ids = (), ()
    if reasoning and role != "assistant" and not calls:
        if gaps is not None:
            gaps.add(f"reasoning in a message of role {role}: it is not kept")
        reasoning = ""
    return ImportedMessage(
        message=Message(role=role, content=text, tool_calls=tuple(calls)), agent=agent, call_ids=tuple(call_ids) if any(call_ids) else (),
        answers=answers, failed=failed, reasoning=reasoning, at_s=at_s,
    )  # fmt: skip


def tool_schemas(value: Any, gaps: Gaps) -> tuple[dict[str, Any], ...]:
    """Returns schemas of tools in the form of the chat completions API. Invalid schemas are recorded as gaps."""
    if value is not None and not isinstance(value, list):
        gaps.add(f"the schemas of the tools: they are {type_name(value)}")
    schemas = []
    for tool in value if isinstance(value, list) else []:
        if isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str) and "function" not in tool:
            tool = {"type": "function", "function": {key: item for key, item in tool.items() if key != "type"}}
        try:
            schemas.append(fields.json_object(tool))
        except ValueError:
            gaps.add("the schema of a tool: it is not a JSON object")
    return tuple(schemas)


def parse_time(value: Any) -> datetime | None:
    """Parses an ISO 8601 time and converts it to UTC; a time without a zone is in UTC. Returns None for any other value."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        when = datetime.fromisoformat(value)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def format_time(start: datetime, seconds: float) -> str | None:
    """Returns the time `seconds` after `start` in ISO 8601, to the microsecond; None if there is no such date."""
    try:
        return (start + timedelta(microseconds=round(seconds * 1e6))).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError):
        return None


def build_origin(**known: Any) -> Mapping[str, str]:
    """Returns the origin of a trace as printable labels, without empty labels."""
    return {name: text for name, value in known.items() if (text := printable_label(value))}
