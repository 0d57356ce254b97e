"""Values of somebody else's JSON, taken as what they claim to be or refused with a `ValueError` that names them."""

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
"""The one argument of a call whose arguments are no JSON object: their text, as it was written."""

_LABEL = 200  # characters of a name or id that is kept to be shown
_GAPS = 40  # kinds of gaps that are told apart in one trace


class Gaps:
    """What a trace does not hold, in words, each said once with how often it was met."""

    def __init__(self) -> None:
        self._met: Counter[str] = Counter()

    def add(self, what: str, times: int = 1) -> None:
        self._met[what if what in self._met or len(self._met) < _GAPS else "other things"] += times

    def same_as(self, other: Gaps) -> None:
        """Takes over what another one met that may have met the same again: the larger count of each."""
        for what, times in other._met.items():
            self.add(what, max(0, times - self._met[what]))

    def descriptions(self) -> tuple[str, ...]:
        return tuple(what if times == 1 else f"{what} ({times} times)" for what, times in self._met.items())


def type_name(value: Any) -> str:
    """What a JSON value is, for messages: "a text", "an object"."""
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), "something else")


def as_objects(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of objects; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{what} is {type_name(value)}, not a list")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"{what}[{number}] is {type_name(item)}, not an object")
    return value


def as_object(value: Any, what: str) -> dict[str, Any]:
    """An object; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type_name(value)}, not an object")
    return value


def as_string(value: Any, what: str) -> str:
    """A text; null is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type_name(value)}, not a text")
    return value


def printable_label(value: Any) -> str:
    """A name or id as it can be shown and stored: bounded, printable, in one line. Anything but a text or whole number is none."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 63 else ""
    return " ".join(user_code.printable(fields.text(value), _LABEL).split())


def object_or_empty(value: Any) -> dict[str, Any]:
    """`value` where it is an object, else an empty one: for what is taken if it is there."""
    return value if isinstance(value, dict) else {}


def message_text(value: Any, what: str, gaps: Gaps) -> str:
    """The text of a message: a text, or a list of parts whose texts are joined by newlines; parts that are no text are gaps."""
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for number, part in enumerate(as_objects(value, what)):
        sort = part.get("type")
        text = part.get("refusal" if sort == "refusal" else "text")
        if isinstance(text, str):
            texts.append(text)
        else:
            gaps.add(f"content of type {printable_label(sort) or 'unknown'}: only text is kept")
            as_string(text, f"{what}[{number}].text")
    return "\n".join(texts)


def decode_json(value: Any) -> Any:
    """The value of JSON text. Any other text or value is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def build_tool_call(name: Any, arguments: Any, what: str, gaps: Gaps) -> ToolCall:
    """A tool call whose arguments are an object, or JSON text of one. Any other text is kept under `UNPARSED`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} names no function: {type_name(name)} in place of its name")
    if arguments is None or arguments == "":
        gaps.add("arguments of a tool call")
        return ToolCall(name=name, arguments={})
    parsed = decode_json(arguments)
    if isinstance(parsed, dict):
        try:
            return ToolCall(name=name, arguments=parsed)
        except ValueError:  # NaN, a number without end, nested too deep, half of a surrogate pair
            pass
    return ToolCall(name=name, arguments={UNPARSED: fields.text(arguments if isinstance(arguments, str) else as_text(arguments, what))})


def arguments_text(made: ToolCall) -> str:
    """The arguments of a call as JSON text, or as the text that was none."""
    unparsed = made.arguments.get(UNPARSED)
    return unparsed if isinstance(unparsed, str) and len(made.arguments) == 1 else json.dumps(dict(made.arguments), ensure_ascii=False)


def as_text(value: Any, what: str) -> str:
    """A text as it is, any other value as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep") from None


def build_message(
    role: str, text: str, *, calls: Sequence[ToolCall] = (), call_ids: Sequence[str] = (), answers: str = "", failed: bool = False,
    reasoning: str = "", agent: str = "", at_s: float | None = None,
) -> ImportedMessage:  # fmt: skip
    """A message; a role is an identifier of at most 40 characters."""
    if not role or len(role) > 40 or not role.isprintable():
        raise ValueError(f"a message has the role {role[:40]!a}")
    return ImportedMessage(
        message=Message(role=role, content=text, tool_calls=tuple(calls)), agent=agent, call_ids=tuple(call_ids) if any(call_ids) else (),
        answers=answers, failed=failed, reasoning=reasoning, at_s=at_s,
    )  # fmt: skip


def tool_schemas(value: Any, gaps: Gaps) -> tuple[dict[str, Any], ...]:
    """Schemas of tools as the chat completions API has them; what is none is a gap."""
    kept = []
    for tool in value if isinstance(value, list) else []:
        if isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str) and "function" not in tool:
            tool = {"type": "function", "function": {key: item for key, item in tool.items() if key != "type"}}
        try:
            kept.append(fields.json_object(tool))
        except ValueError:
            gaps.add("the schema of a tool: it is no JSON object")
    if value is not None and not isinstance(value, list):
        gaps.add(f"the schemas of the tools: they are {type_name(value)}")
    return tuple(kept)


def parse_time(value: Any) -> datetime | None:
    """A time as ISO 8601 writes it, in UTC where it names no zone; None where it is none."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        when = datetime.fromisoformat(value)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def format_time(start: datetime, seconds: float) -> str | None:
    """ISO 8601 of a time `seconds` after another, to the microsecond; None where there is no such date."""
    try:
        return (start + timedelta(microseconds=round(seconds * 1e6))).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError):
        return None


def build_origin(**known: Any) -> Mapping[str, str]:
    """What is known of where a trace comes from; what is empty is left out."""
    return {name: text for name, value in known.items() if (text := printable_label(value))}
