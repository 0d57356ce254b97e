"""Where text of a model becomes records: the bounds of a tool call, and the calls of a completion in the Hermes form.

    <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>

The forms of other models are in `agentrl.agent.forms`, and make their calls here too.

What cannot be a record, because it is too long, too deep, not finite or not Unicode, is answered to the model as an error of its
call, and scored like any other mistake. The text is read once, from the front, whatever stands in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from agentrl.fields import MAX_DIGITS
from agentrl.records import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_CALLS = 64
"""Tool calls that one turn may make; those after them are not made."""

MAX_CHARS = 2_000_000
"""Characters of one call: a program as long as a tool takes one (`agentrl.agent.tools.MAX_TEXT`), with every character escaped."""

MAX_NAME = 256
"""Characters of a tool's name."""


NOT_CLOSED = "a tool call was opened but not closed"


class Refused(ValueError):
    """What is wrong with a call, in words for the model."""


class NotJson(Refused):
    """A text that is no JSON, rather than JSON that cannot be taken."""


def read_calls(text: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...], str]:
    """The tool calls in a text in the Hermes form, what is wrong with the others, and the text without either."""
    return read_tagged(text, OPEN, CLOSE, _call)


def read_tagged(
    text: str, opening: str, closing: str, make: Callable[[str], ToolCall]
) -> tuple[tuple[ToolCall, ...], tuple[str, ...], str]:
    """The calls that stand between two tags, each made of its body by `make`, which may raise `Refused`; as `read_calls`."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    outside: list[str] = []
    bodies, at = 0, 0
    while (opened := text.find(opening, at)) >= 0 and (closed := text.find(closing, opened)) >= 0:
        outside.append(text[at:opened])
        at = closed + len(closing)
        bodies += 1
        if bodies > MAX_CALLS:
            continue
        try:
            calls.append(make(text[opened + len(opening) : closed]))
        except Refused as error:
            errors.append(str(error))
    if bodies > MAX_CALLS:
        errors.append(too_many(bodies))
    if opened >= 0:
        errors.append(NOT_CLOSED)
    return tuple(calls), tuple(errors), "".join((*outside, text[at:])).strip()


def too_many(count: int) -> str:
    """What is told of a turn with `count` calls, more than it may hold."""
    return f"a turn may hold {MAX_CALLS} tool calls; the {count - MAX_CALLS} after them were not made"


def read_call(name: str, arguments: str) -> ToolCall | str:
    """A call whose name and arguments come apart, the arguments as JSON text; or what is wrong with it, in words for the model."""
    try:
        return _call(f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}')
    except Refused as error:
        return str(error)


def _call(body: str) -> ToolCall:
    data = read_json(body)
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise Refused('tool call must be an object with "name" and "arguments"')
    return made_call(data["name"], data.get("arguments", {}))


def made_call(name: str, arguments: Any, *, key: str = "arguments") -> ToolCall:
    """The record of a call, or `Refused`: `arguments` is what the model wrote under `key`, read."""
    if not isinstance(arguments, dict):
        raise Refused(f'tool call "{key}" must be an object')
    if len(name) > MAX_NAME:
        raise Refused(f'tool call "name" of {len(name)} characters; it may have {MAX_NAME}')
    try:
        return ToolCall(name=name, arguments=arguments)
    except ValueError as error:
        raise Refused(f"tool call cannot be taken: {str(error).removeprefix('ToolCall.')}") from None


def read_json(text: str) -> Any:
    """A JSON value within the bounds of a call, from the whole of a text. Raises `Refused`."""
    if len(text) > MAX_CHARS:
        raise Refused(f"tool call of {len(text)} characters; it may have {MAX_CHARS}")
    try:
        return _JSON.decode(text)
    except Refused:
        raise
    except ValueError as error:
        raise NotJson(f"tool call is not valid JSON: {error}") from None
    except RecursionError:
        raise Refused("tool call is not valid JSON that can be read: it is nested too deep") from None


def read_json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a place of a text, and where it ends. Raises `Refused`."""
    try:
        value, end = _JSON.raw_decode(text, at)
    except Refused:
        raise
    except ValueError as error:
        raise NotJson(f"tool call is not valid JSON: {error}") from None
    except RecursionError:
        raise Refused("tool call is not valid JSON that can be read: it is nested too deep") from None
    if end - at > MAX_CHARS:
        raise Refused(f"tool call of {end - at} characters; it may have {MAX_CHARS}")
    return value, end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Refused(f"tool call names {ascii(twice)[:80]} twice in one object")
    return found


def integer(digits: str) -> int:
    """An integer within bounds. Raises `Refused`."""
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise Refused(f"tool call holds an integer of {len(digits)} digits; it may have {MAX_DIGITS}: write it as a text")
    return int(digits)


def number(digits: str) -> float:
    """A finite number. Raises `Refused`."""
    value = float(digits)
    if not math.isfinite(value):
        raise Refused(f"tool call holds {digits[:40]}, which is no finite number: write it as a text")
    return value


def _constant(word: str) -> float:
    raise Refused(f"tool call holds {word}, which is no JSON number: write it as a text")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_int=integer, parse_float=number, parse_constant=_constant)
