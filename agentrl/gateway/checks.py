"""Checks the fields in a request. All functions raise `RequestError` with the path of an invalid field."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from agentrl.gateway.request import MAX_MESSAGES, RequestError
from agentrl.records import ToolCall
from agentrl.records.fields import json_value

MAX_STOPS = (16, 1024)
"""Maximum number of stop sequences in a request, and of characters in each."""
MAX_KEY = 200
"""Maximum characters shown of an unknown key in an error."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Check = Callable[[Any, str], object]
"""Receives a value and the path of its field. Raises `RequestError` if the field cannot have this value."""


def known_fields(body: Any, known: Collection[str], where: str = "") -> dict[str, Any]:
    """Returns `body` if it is an object whose keys are all known. Raises `RequestError`."""
    fields = mapping(body, where or "the body")
    if unknown := next((key for key in fields if key not in known), None):
        name = path(where, ascii(unknown[:MAX_KEY])[1:-1])
        raise RequestError("unknown_field", f"Unknown parameter: '{name}'.", param=name)
    return fields


def path(where: str, name: str) -> str:
    """Returns the path of a field in the object at `where`."""
    return f"{where}.{name}" if where else name


def value_or(value: Any, default: Any) -> Any:
    """Returns the value of a field, or the default if it is missing or null."""
    return default if value is None else value


def storable(value: Any, where: str) -> Any:
    """Returns the value as JSON data that a record can store."""
    try:
        return json_value(value)
    except ValueError as error:
        raise RequestError("invalid", f"{where}: {str(error)[:300]}", param=where) from None


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Returns the value if it is an object."""
    if not isinstance(value, dict):
        raise RequestError("invalid", f"{where} must be an object.", param=where)
    return value


def array(value: Any, where: str, *, most: int = MAX_MESSAGES) -> list[Any]:
    """Returns the value if it is an array of at most `most` entries."""
    if not isinstance(value, list):
        raise RequestError("invalid", f"{where} must be an array.", param=where)
    if len(value) > most:
        raise RequestError("invalid", f"{where} has {len(value)} entries; the maximum is {most}.", param=where)
    return value


def text(value: Any, where: str) -> str:
    """Returns the value if it is a string."""
    if not isinstance(value, str):
        raise RequestError("invalid", f"{where} must be a string.", param=where)
    return value


def positive(value: Any, where: str) -> int | None:
    """Returns the value if it is None or a positive integer below 2**31."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise RequestError("invalid", f"{where} must be a positive integer.", param=where)
    return value


def flag(value: Any, where: str) -> bool:
    """Returns the value if it is a boolean; returns False for null."""
    if not isinstance(value, bool | None):
        raise RequestError("invalid", f"{where} must be true or false.", param=where)
    return bool(value)


def within(low: float, high: float) -> Check:
    """Returns a check that a value is a number from `low` to `high`."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError("invalid", f"{where} must be a number from {low:g} to {high:g}.", param=where)

    return check


def one_of(*values: str) -> Check:
    """Returns a check that a value is one of these strings."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise RequestError("unsupported", f"Unsupported value: {where} must be one of {', '.join(values)}.", param=where)

    return check


def integer(value: Any, where: str) -> None:
    """Checks that a value is an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("invalid", f"{where} must be an integer.", param=where)


def check_all(body: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> None:
    """Checks the fields of an object that are present and not null."""
    for name, check in checks.items():
        if body.get(name) is not None:
            check(body[name], path(where, name))


def check_inert(body: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Raises `RequestError` if a field requests unsupported behaviour. `allowed` maps each field to the values other than null that have no
    effect."""
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(other) and value == other for other in values):
            message = f"Unsupported value: this value of {name!r} is not supported by this endpoint."
            raise RequestError("unsupported", message, param=name)


def stop_sequences(value: Any, where: str) -> tuple[str, ...]:
    """Returns the stop sequences from a string or an array of strings, none of which may be empty; no sequences for null."""
    if value is None:
        return ()
    most, chars = MAX_STOPS
    sequences = [value] if isinstance(value, str) else array(value, where, most=most)
    for at, sequence in enumerate(sequences):
        here = where if isinstance(value, str) else f"{where}[{at}]"
        if not storable(text(sequence, here), here) or len(sequence) > chars:
            raise RequestError("invalid", f"{here} must have 1 to {chars} characters.", param=here)
    return tuple(sequences)


def tool_choice(kind: Any, name: Any, tools: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Returns the fields of `CompletionRequest` for the tool choice in a request. `kind`: auto, none, any, or tool, which needs a name."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if kind in ("auto", "none"):
        return {"calls": kind == "auto"}
    if kind not in ("any", "tool"):
        raise RequestError("unsupported", f"Unsupported value: this kind of {where} is not supported by this endpoint.", param=where)
    if not names or (kind == "tool" and text(name, where) not in names):
        raise RequestError("invalid", f"{where} requires a tool that is not among the tools.", param=where)
    return {"forced": names if kind == "any" else (name,), "forced_by": where}


def openai_choice(value: str, tools: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Returns the fields of `CompletionRequest` for a tool choice that OpenAI's protocols write as a string."""
    return tool_choice({"required": "any", "any": None, "tool": None}.get(value, value), None, tools, where)


def tool_call(name: Any, arguments: Any, where: str) -> ToolCall:
    """Returns the record of a call that a client sends back. The call's arguments may be an object or JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError("invalid", f"{where}: the arguments are not valid JSON.", param=where) from None
    try:
        return ToolCall(name=text(name, f"{where}.name"), arguments=mapping(value_or(arguments, {}), f"{where}.arguments"))
    except ValueError as error:
        raise RequestError("invalid", f"{where}: {str(error)[:300]}", param=where) from None


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """Returns a tool in the chat-completions format, which chat templates accept."""
    about = {"name": text(name, f"{where}.name"), "description": text(value_or(description, ""), f"{where}.description")}
    schema = storable(mapping(value_or(parameters, {}), f"{where}.parameters"), f"{where}.parameters")
    return {"type": "function", "function": {**storable(about, where), "parameters": schema}}


def text_content(value: Any, where: str, keys: Mapping[str, str]) -> str:
    """Returns the text in a string or an array of parts. `keys` maps the type of a part to the key of its text."""
    if isinstance(value, str):
        return value
    parts = []
    for at, item in enumerate(array(value, where)):
        here = f"{where}[{at}]"
        part = mapping(item, here)
        kind = part.get("type")
        key = keys.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise RequestError("unsupported", f"{here}.type: only text is supported.", param=f"{here}.type")
        parts.append(text(part.get(key), f"{here}.{key}"))
    return "".join(parts)
