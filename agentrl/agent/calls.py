"""Parses and builds one tool call in text that a model wrote, within bounds. The readers in `agentrl.agent.forms` find the calls in a turn
and use this module.

A call that is too long or nested too deeply, or that contains a non-finite number or invalid Unicode, becomes an error that the model sees,
like any other mistake. The grammar of the arguments determines where a call ends, so a closing tag inside a JSON string is part of the
string. Parsing takes time linear in the length of the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.records import ToolCall
from agentrl.records.fields import MAX_DIGITS

T = TypeVar("T")

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\n\r]*")  # JSON white space
_ESCAPE = re.compile(r"\\.", re.DOTALL)

MAX_CALLS = 64  # maximum calls in one turn; later calls are not parsed
MAX_CHARS = 2_000_000  # maximum characters in one call: a program of `agentrl.agent.tools.MAX_TEXT` escaped characters
MAX_NAME = 256  # maximum characters in a tool's name
NOT_CLOSED = "a tool call was opened but not closed"


class CallError(ValueError):
    """An error in a call, worded for the model. `at` is the position where parsing stopped, if the rest of the text may belong to the call;
    otherwise 0."""

    def __init__(self, message: str, *, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


class InvalidJson(CallError):
    """The text is not valid JSON. Valid JSON that exceeds the bounds raises a plain `CallError`."""


class UnclosedCall(CallError):
    """A part of the call is not closed, so all text after it may belong to the call."""


def call_at(
    text: str, at: int, closing: str, scan: Callable[[str, int], tuple[T, int]], make: Callable[[T], ToolCall]
) -> tuple[ToolCall | CallError, int]:
    """Returns the call whose body starts at a position, or its error, and the position after its closing tag (-1 if there is none).

    If the body is invalid, the call ends at the first closing tag after the part that was parsed.
    """
    try:
        body, end = scan(text, at)
        end = skip_space(text, end)
        if not text.startswith(closing, end):
            raise CallError(f"tool call must end with {closing} instead of {text[end : end + 40]!a}", at=end)
    except CallError as error:
        return error, after(text, closing, max(at, error.at))
    try:
        return make(body), end + len(closing)
    except CallError as error:
        return error, end + len(closing)


def after(text: str, mark: str, at: int) -> int:
    """Finds the first `mark` at or after a position, and returns the position after the mark; -1 if there is no mark."""
    start = text.find(mark, at)
    return start if start < 0 else start + len(mark)


def skip_space(text: str, at: int) -> int:
    """Returns the position of the next character that is not white space."""
    space = _SPACE.match(text, at)
    return space.end() if space else at


def too_many(count: int) -> str:
    """Returns the error for a turn whose number of calls, `count`, exceeds `MAX_CALLS`."""
    return f"a turn may hold {MAX_CALLS} tool calls; the {count - MAX_CALLS} after them were not run"


def parse_call(name: str, arguments: str) -> ToolCall | str:
    """Builds a call from its name and the JSON text (may be empty) of its arguments. Returns the call, or an error worded for the model."""
    try:
        return build_call(name, read_json(arguments.strip() or "{}"))
    except CallError as error:
        return str(error)


def call_from_object(data: Any, *, key: str = "arguments") -> ToolCall:
    """Returns the call in a JSON object, with its arguments under `key`, or without arguments if this key is missing. Raises `CallError` if
    the value is not such an object, or as `build_call` does."""
    wanted = f'tool call must be an object with "name" and "{key}"'
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise CallError(wanted)
    others = {"parameters", "arguments"} & data.keys() if key in data else data.keys() - {"name", "type", "id"}
    if others := others - {key}:
        raise CallError(f"{wanted}; it has the key {ascii(min(others))[:80]}")
    return build_call(data["name"], data.get(key, {}), key=key)


def build_call(name: str, arguments: Any, *, key: str = "arguments") -> ToolCall:
    """Returns the record of a call. `key` is the key under which the model wrote the arguments. Raises `CallError` if the arguments are not
    an object, or if the name or the arguments are invalid or exceed the bounds."""
    if not isinstance(arguments, dict):
        raise CallError(f'tool call "{key}" must be an object')
    if len(name) > MAX_NAME:
        raise CallError(f'tool call "name" has {len(name)} characters; the maximum is {MAX_NAME}')
    try:
        return ToolCall(name=name, arguments=arguments)
    except ValueError as error:
        raise CallError(f"tool call is invalid: {str(error).removeprefix('ToolCall.')}") from None


def read_json(text: str) -> Any:
    """Returns the JSON value that a string contains. Raises `CallError` if the JSON is invalid or exceeds the bounds of a call."""
    value, end = scan_json(text, 0)
    if (rest := skip_space(text, end)) < len(text):
        raise InvalidJson(f"tool call is not valid JSON: Extra data at character {rest}")
    return value


def scan_json(text: str, at: int) -> tuple[Any, int]:
    """Skips white space, and returns the JSON value that follows and the position of its end. Raises `CallError` if the JSON is invalid or
    exceeds the bounds of a call."""
    at = skip_space(text, at)
    try:
        value, end = _JSON.raw_decode(text, at)
    except CallError as error:  # raised by a hook, which does not know the position
        raise CallError(str(error), at=_read_to(text, at)) from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"tool call is not valid JSON: {error.msg} at character {error.pos - at}", at=_read_to(text, at)) from None
    except RecursionError:
        raise CallError("tool call is nested too deeply") from None
    if end - at > MAX_CHARS:
        raise CallError(f"tool call has {end - at} characters; the maximum is {MAX_CHARS}", at=end)
    return value, end


def _read_to(text: str, at: int) -> int:
    """Returns the position where a rejected JSON value ends: at its own end, at its first syntax error, or at the end of the text if a
    string is not closed. Returns `at` if the value is nested too deeply."""
    try:
        return _ANY_JSON.raw_decode(text, at)[1]
    except json.JSONDecodeError as error:
        if error.msg.startswith("Invalid \\"):  # an invalid escape; the string continues after it
            return at + _read_to(_ESCAPE.sub("xx", text[at:]), 0)
        return len(text) if error.msg.startswith("Unterminated string") else error.pos
    except RecursionError:
        return at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CallError(f"tool call contains the key {ascii(twice)[:80]} twice in one object")
    return members


def integer(digits: str) -> int:
    """Parses an integer. Raises `CallError` if it has more than `MAX_DIGITS` digits."""
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise CallError(f"tool call contains an integer of {len(digits)} digits; the maximum is {MAX_DIGITS}: write it as a string")
    return int(digits)


def number(digits: str) -> float:
    """Parses a number. Raises `CallError` if it is too large for a finite float."""
    value = float(digits)
    if not math.isfinite(value):
        raise CallError(f"tool call contains {digits[:40]}, which is not a finite number: write it as a string")
    return value


def _constant(word: str) -> float:
    raise CallError(f"tool call contains {word}, which is not a JSON number: write it as a string")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_int=integer, parse_float=number, parse_constant=_constant)
_ANY_JSON = json.JSONDecoder(object_pairs_hook=lambda _: None, parse_int=len, parse_float=len, parse_constant=len, strict=False)
