"""Where text of a model becomes records: the tool calls in a completion, in the Hermes form that Qwen3 uses.

    <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>

What cannot be a record, because it is too long, too deep, not finite or not Unicode, is answered to the model as an error of its
call, and scored like any other mistake. The text is read once, from the front, whatever stands in it.
"""

from __future__ import annotations

import json
import math
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


class _Refused(ValueError):
    """What is wrong with a call, in words for the model."""


def read_calls(text: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...], str]:
    """The tool calls in a text, what is wrong with the others, and the text without either."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    outside: list[str] = []
    bodies, at = 0, 0
    while (opened := text.find(OPEN, at)) >= 0 and (closed := text.find(CLOSE, opened)) >= 0:
        outside.append(text[at:opened])
        at = closed + len(CLOSE)
        bodies += 1
        if bodies > MAX_CALLS:
            continue
        try:
            calls.append(_call(text[opened + len(OPEN) : closed]))
        except _Refused as error:
            errors.append(str(error))
    if bodies > MAX_CALLS:
        errors.append(f"a turn may hold {MAX_CALLS} tool calls; the {bodies - MAX_CALLS} after them were not made")
    if opened >= 0:
        errors.append("a tool call was opened but not closed")
    return tuple(calls), tuple(errors), "".join((*outside, text[at:])).strip()


def read_call(name: str, arguments: str) -> ToolCall | str:
    """A call whose name and arguments come apart, the arguments as JSON text; or what is wrong with it, in words for the model."""
    try:
        return _call(f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}')
    except _Refused as error:
        return str(error)


def _call(body: str) -> ToolCall:
    if len(body) > MAX_CHARS:
        raise _Refused(f"tool call of {len(body)} characters; it may have {MAX_CHARS}")
    try:
        data = _JSON.decode(body)
    except _Refused:
        raise
    except ValueError as error:
        raise _Refused(f"tool call is not valid JSON: {error}") from None
    except RecursionError:
        raise _Refused("tool call is not valid JSON that can be read: it is nested too deep") from None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise _Refused('tool call must be an object with "name" and "arguments"')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        raise _Refused('tool call "arguments" must be an object')
    if len(data["name"]) > MAX_NAME:
        raise _Refused(f'tool call "name" of {len(data["name"])} characters; it may have {MAX_NAME}')
    try:
        return ToolCall(name=data["name"], arguments=arguments)
    except ValueError as error:
        raise _Refused(f"tool call cannot be taken: {str(error).removeprefix('ToolCall.')}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"tool call names {ascii(twice)[:80]} twice in one object")
    return found


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise _Refused(f"tool call holds an integer of {len(digits)} digits; it may have {MAX_DIGITS}: write it as a text")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused(f"tool call holds {digits[:40]}, which is no finite number: write it as a text")
    return value


def _constant(word: str) -> float:
    raise _Refused(f"tool call holds {word}, which is no JSON number: write it as a text")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)
