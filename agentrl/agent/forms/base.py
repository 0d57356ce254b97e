"""What the forms of tool calls have in common: a reader of a turn's text, and the values that a tool's schema gives a type to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.agent.arguments import Allowed, Parameters
from agentrl.agent.calls import MAX_CALLS, CallError, InvalidJson, read_json, too_many
from agentrl.records import ToolCall

Schemas = Sequence[Mapping[str, Any]]
"""Schemas of the tools that a task has, as the chat template is given them."""

_PYTHONS: Mapping[str, tuple[str, Any]] = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a turn's text says: the calls to make, what is wrong with the others (in words for the model), and the text beside them."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    content: str = ""
    ids: tuple[str, ...] = ()  # what the model calls each of `calls`; empty where the form has no ids
    thinking: str = ""  # of a form that sets thinking apart by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text around the arguments of a call, with which guided decoding enforces a form. `%` is the tool's name."""

    begin: str  # before the arguments
    end: str  # after the arguments
    style: str  # xgrammar's `style` of a `json_schema`
    between: str  # between two calls
    excludes: tuple[str, ...] = ()  # texts that no argument may contain, because the reader would take them for the end

    def of(self, tool: str) -> Frame:
        """The frame of the calls of one tool."""
        return replace(self, begin=self.begin.replace("%", tool))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A form in which models write tool calls, and a reader for it.

    A reader takes text of any kind, in time proportional to its length, and never raises.
    """

    name: str
    about: str
    read: Callable[[str, Schemas], Reading]
    opens: tuple[str, ...]  # what a call begins with: none of it may stand where no call may be
    ends: tuple[str, ...] = ()  # tokens that end a turn, beside the tokenizer's eos and the one that the template writes
    hands_over: tuple[str, ...] = ()  # tokens that end a turn by beginning the next one
    inner: tuple[str, ...] = ()  # tokens that stand between turns, and within one too: the reader knows where
    argument: str = ""  # regular expression of the names of arguments that can be written; empty means any name
    frame: Frame | None = None  # None means that guided decoding cannot enforce the form


@dataclass(slots=True)
class Collected:
    """Calls as they are found, no more than a turn may hold."""

    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tried: int = 0

    def take(self, make: Callable[[], ToolCall], *, number: str = "") -> bool:
        """Makes a call, or keeps what is wrong with it; False where there was something wrong."""
        try:
            return self.add(make() if self.tried < MAX_CALLS else None, number=number)
        except CallError as error:
            return self.add(error)

    def add(self, call: ToolCall | CallError | None, *, number: str = "") -> bool:
        """Adds a call or its error; None means that the turn has too many calls. Returns False if it was not a valid call."""
        self.tried += 1
        if isinstance(call, ToolCall):
            self.calls.append(call)
            self.ids.append(number)
        elif call is not None:
            self.errors.append(str(call))
        return not isinstance(call, CallError)

    def reading(self, content: str, *, thinking: str = "") -> Reading:
        told = (too_many(self.tried),) if self.tried > MAX_CALLS else ()
        ids = tuple(self.ids) if any(self.ids) else ()
        errors = (*self.errors, *told)
        return Reading(calls=tuple(self.calls), errors=errors, content=content.strip(), ids=ids, thinking=thinking.strip())


def declared(schemas: Schemas, name: str) -> Parameters:
    """The parameters of a tool. Without a schema, they may have any value.

    A schema comes from a task, a server or a client, and may be any JSON.
    """
    return Parameters(next((schema for schema in schemas if name_of(schema) == name), None))


def name_of(schema: Any) -> Any:
    """The name of the tool in a schema; None if the schema describes no tool."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def value_of(text: str, allowed: Allowed) -> Any:
    """The value of an argument that is written without quotes: a string if the tool accepts it, else JSON; a string if it is not JSON.

    Where the schema says nothing, what reads as JSON is taken so, but for a JSON text: its quotes are the argument's own. Raises
    `CallError` for JSON out of bounds.
    """
    kinds = allowed.kinds
    if kinds == {"string"}:
        return text
    if text in _PYTHONS and _PYTHONS[text][0] in kinds:  # so Qwen3.5's template writes them
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
