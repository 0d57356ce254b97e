"""Types and helpers that all forms of tool calls share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agentrl.agent.arguments import Allowed, Parameters
from agentrl.agent.calls import (
    CLOSE,
    MAX_CALLS,
    NOT_CLOSED,
    OPEN,
    CallError,
    InvalidJson,
    UnclosedCall,
    after,
    call_at,
    read_json,
    too_many,
)
from agentrl.records import ToolCall

T = TypeVar("T")

Schemas = Sequence[Mapping[str, Any]]
"""Function schemas of a task's tools."""

_PYTHONS: Mapping[str, tuple[str, Any]] = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The content of a turn: valid calls, errors of the other calls (worded for the model), and the text outside the calls."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    content: str = ""
    ids: tuple[str, ...] = ()  # the id that the model gave each call; empty if the form has no ids
    thinking: str = ""  # reasoning, if the form marks it


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text around the arguments of a call, which guided decoding enforces. `%` in `begin` is replaced with the tool's name."""

    begin: str  # before the arguments
    end: str  # after the arguments
    style: str  # xgrammar's `style` of a `json_schema`
    between: str  # between two calls
    excludes: tuple[str, ...] = ()  # strings that no argument may contain, because the reader would end the arguments there

    def of(self, tool: str) -> Frame:
        """Returns the frame for calls to one tool."""
        return replace(self, begin=self.begin.replace("%", tool))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A form in which models write tool calls, and its reader.

    A reader accepts any string, takes time linear in its length, and never raises.
    """

    name: str
    about: str
    read: Callable[[str, Schemas], Reading]
    opens: tuple[str, ...]  # strings that open a call, which must not occur where a call is not allowed
    ends: tuple[str, ...] = ()  # tokens that end a turn, in addition to the tokenizer's eos and the token that the template writes
    hands_over: tuple[str, ...] = ()  # tokens that end a turn by starting the next turn
    inner: tuple[str, ...] = ()  # tokens that occur between turns and also within a turn
    argument: str = ""  # regular expression for the argument names that can be written; empty means any name
    frame: Frame | None = None  # None means that guided decoding cannot enforce the form


@dataclass(slots=True)
class Collected:
    """Collects the calls and errors of a turn, up to `MAX_CALLS` calls."""

    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tried: int = 0

    def build(self, make: Callable[[], ToolCall], *, call_id: str = "") -> None:
        """Adds the call that `make` returns, or the `CallError` that it raises. Only counts a call beyond `MAX_CALLS`."""
        try:
            self.add(make() if self.tried < MAX_CALLS else None, call_id=call_id)
        except CallError as error:
            self.add(error)

    def add(self, call: ToolCall | CallError | None, *, call_id: str = "") -> None:
        """Adds a call or its error. None means a call beyond `MAX_CALLS`, which is only counted."""
        self.tried += 1
        if isinstance(call, ToolCall):
            self.calls.append(call)
            self.ids.append(call_id)
        elif call is not None:
            self.errors.append(str(call))

    def reading(self, content: str = "", *, thinking: str = "") -> Reading:
        """Returns the calls and errors, with `content` as the text outside the calls."""
        errors = [*self.errors, *([too_many(self.tried)] if self.tried > MAX_CALLS else [])]
        ids = tuple(self.ids) if any(self.ids) else ()
        return Reading(calls=tuple(self.calls), errors=tuple(errors), content=content.strip(), ids=ids, thinking=thinking.strip())


def read_tagged(text: str, scan: Callable[[str, int], tuple[T, int]], make: Callable[[T], ToolCall]) -> Reading:
    """Reads the calls between `<tool_call>` tags.

    Args:
        scan: parses the body that starts at a position in the text, and returns the body and the position of its end. May raise
            `CallError`.
        make: builds a call from a body. May raise `CallError`.
    """
    collected, outside, at = Collected(), list[str](), 0
    call: ToolCall | CallError | None
    while (opened := text.find(OPEN, at)) >= 0:
        body = opened + len(OPEN)
        call, end = call_at(text, body, CLOSE, scan, make) if collected.tried < MAX_CALLS else (None, after(text, CLOSE, body))
        if end < 0:
            collected.errors.append(str(call) if isinstance(call, UnclosedCall) else NOT_CLOSED)
            break
        collected.add(call)
        outside.append(text[at:opened])
        at = end
    return collected.reading("".join((*outside, text[at:])))


def declared(schemas: Schemas, name: str) -> Parameters:
    """Returns the parameters of a tool. If no schema describes the tool, any value is allowed."""
    return Parameters(next((schema for schema in schemas if name_of(schema) == name), None))


def name_of(schema: Any) -> Any:
    """Returns the tool's name in a schema, which may be any JSON value; None if it has no name."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def value_of(text: str, allowed: Allowed) -> Any:
    """Returns the value of an argument that is written without quotes.

    The value is a string if the schema accepts a string or the text is not JSON; otherwise it is the JSON value. `null`, `None`, `True` and
    `False` are not strings if the schema also lists their type. If there is no schema, JSON is parsed, except for a JSON string, whose
    quotes are always part of the value. Raises `CallError` if the JSON exceeds the bounds and the schema does not accept a string.
    """
    kinds = allowed.kinds
    if kinds == {"string"}:
        return text
    if text in _PYTHONS and _PYTHONS[text][0] in kinds:  # Python literals, as Qwen3.5's template writes them
        return _PYTHONS[text][1]
    try:
        value = read_json(text)
    except CallError as error:
        if isinstance(error, InvalidJson) or ("string" in kinds and allowed.fits(text)):
            return text
        raise
    if value is None and "null" in kinds:
        return None
    if isinstance(value, str) or ("string" in kinds and (allowed.fits(text) or not allowed.fits(value))):
        return text
    return value
