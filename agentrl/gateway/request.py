"""One request of an outside agent, whatever protocol it came in, and what is answered to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.records import Message, ToolCall
from agentrl.records.fields import json_value

MAX_BODY = 8 << 20
"""Bytes of one request."""

MAX_MESSAGES = 4096
"""Messages of one request, and items of one message."""

MAX_TOOLS = 512

MAX_STOPS = (16, 1024)
"""Maximum number of stop sequences of a request, and of characters of each."""

MAX_KEY = 200
"""Maximum characters of an unknown key in an error."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Check = Callable[[Any, str], object]
"""Raises `RequestError` if the option of this name cannot have the value."""

STATUS = {
    "invalid": 400,
    "unknown_field": 400,
    "unsupported": 400,
    "context_length": 400,
    "turn_limit": 403,
    "wrong_key": 401,
    "ended": 403,
    "unknown_model": 404,
    "not_found": 404,
    "wrong_host": 403,
    "too_large": 413,
    "encoding": 415,
    "too_many": 429,
    "failed": 503,
}
"""Why a request is refused, and the status of HTTP that says so. SDKs try 429 and 5xx again, and no other of these."""


class RequestError(Exception):
    """A request that is not carried out. Each protocol says it in its own words."""

    def __init__(self, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param

    @property
    def status(self) -> int:
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMessage:
    """One message of a request. `call_ids` name the calls of an assistant's, `call_id` the call that a tool's answers."""

    message: Message
    call_ids: tuple[str, ...] = ()
    call_id: str = ""
    ok: bool = True  # of what a tool gave


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request for one completion. System messages at the head are apart: clients change them from request to request."""

    model: str
    system: tuple[str, ...]
    messages: tuple[RequestMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # in the form of chat completions
    loaded: tuple[Mapping[str, Any], ...] = ()  # tools that only results show to the policy
    max_tokens: int | None = None
    after: str = ""  # id of an answer of ours that the messages come after
    retry: bool = False  # the client says that it asks once more
    stream: bool = False
    calls: bool = True  # whether the answer may contain tool calls; if False, they stay text
    single: bool = False  # whether the answer contains at most one call
    strict: frozenset[str] = frozenset()  # tools whose calls are in the answer only if their arguments match the schema
    stop: tuple[str, ...] = ()  # the answer ends before the first of these texts
    forced: tuple[str, ...] = ()  # the answer must call one of these tools
    forced_by: str = ""  # the path of the option that sets `forced`
    shape: Mapping[str, Any] | None = None  # the JSON schema of the answer, unless it calls a tool
    options: Mapping[str, Any] = field(default_factory=dict)  # of its protocol alone, for how the answer is written

    @property
    def known_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the policy may call."""
        return (*self.tools, *self.loaded)

    @property
    def chars(self) -> int:
        """Characters of all that the policy would be shown: messages, their calls, tools."""
        texts = sum(map(len, (*self.system, *(one.message.content for one in self.messages))))
        calls = [one.name + json.dumps(dict(one.arguments)) for said in self.messages for one in said.message.tool_calls]
        return texts + sum(map(len, calls)) + sum(len(json.dumps(tool)) for tool in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCall:
    """A tool call of an answer, with the id that the client gives back."""

    id: str
    call: ToolCall

    @property
    def arguments(self) -> str:
        return json.dumps(dict(self.call.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion. Tokens are counted as the policy saw them."""

    id: str  # without the prefix that a protocol gives its ids
    model: str
    text: str
    reasoning: str
    calls: tuple[AnswerCall, ...]
    cut: bool  # by its length
    stop: str = ""  # the stop sequence that ended it
    prompt_tokens: int
    completion_tokens: int
    created: int  # seconds since 1970


def read_json(content: bytes) -> Any:
    """The JSON of a body. Raises `RequestError`."""
    try:
        return json.loads(content, parse_constant=_constant)
    except (ValueError, RecursionError):
        raise RequestError("invalid", "We could not parse the JSON body of your request.") from None


def _constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def split_reasoning(text: str) -> tuple[str, str]:
    """What a completion thinks and what it says: all up to `</think>`, and the rest."""
    thought, closed, said = text.partition("</think>")
    return (thought.replace("<think>", "", 1).strip(), said.strip()) if closed else ("", text)


def fields(body: Any, known: Collection[str], *, where: str = "") -> dict[str, Any]:
    """An object that has no other keys than the known ones; `RequestError` names the first one that is not."""
    found = mapping(body, where or "the body")
    if unknown := next((key for key in found if key not in known), None):
        name = inside(where, ascii(unknown[:MAX_KEY])[1:-1])
        raise RequestError("unknown_field", f"Unknown parameter: '{name}'.", param=name)
    return found


def inside(where: str, name: str) -> str:
    """The path of a field in the object at `where`."""
    return f"{where}.{name}" if where else name


def given(value: Any, otherwise: Any) -> Any:
    """The value of a field; `otherwise` if it is missing or null."""
    return otherwise if value is None else value


def storable(value: Any, where: str) -> Any:
    """Returns a JSON value that a record can store. Raises `RequestError`."""
    try:
        return json_value(value)
    except ValueError as error:
        raise RequestError("invalid", f"{where}: {str(error)[:300]}", param=where) from None


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError("invalid", f"{where} must be an object.", param=where)
    return value


def listed(value: Any, where: str, *, most: int = MAX_MESSAGES) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError("invalid", f"{where} must be an array.", param=where)
    if len(value) > most:
        raise RequestError("invalid", f"{where} has {len(value)} entries; at most {most} are taken.", param=where)
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError("invalid", f"{where} must be a string.", param=where)
    return value


def whole(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise RequestError("invalid", f"{where} must be a positive integer.", param=where)
    return value


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool | None):
        raise RequestError("invalid", f"{where} must be true or false.", param=where)
    return bool(value)


def within(low: float, high: float) -> Check:
    """A check for numbers from `low` to `high`."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError("invalid", f"{where} must be a number from {low:g} to {high:g}.", param=where)

    return check


def one_of(*values: str) -> Check:
    """A check for one of several strings."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise RequestError("unsupported", f"Unsupported value: {where} must be one of {', '.join(values)}.", param=where)

    return check


def integer(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("invalid", f"{where} must be an integer.", param=where)


def check_all(body: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> None:
    """Checks the fields of an object that are present and not null."""
    for name, check in checks.items():
        if body.get(name) is not None:
            check(body[name], inside(where, name))


def stops(value: Any, where: str) -> tuple[str, ...]:
    """The stop sequences, from a string or an array of strings."""
    if value is None:
        return ()
    most, chars = MAX_STOPS
    found = [value] if isinstance(value, str) else listed(value, where, most=most)
    for at, one in enumerate(found):
        here = where if isinstance(value, str) else f"{where}[{at}]"
        if not storable(text(one, here), here) or len(one) > chars:
            raise RequestError("invalid", f"{here} must have 1 to {chars} characters.", param=here)
    return tuple(found)


def choice_of(kind: Any, name: Any, tools: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The fields of `CompletionRequest` for a choice of tools. `kind`: auto, none, any, or tool, which needs a name."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if kind in ("auto", "none"):
        return {"calls": kind == "auto"}
    if kind not in ("any", "tool"):
        raise RequestError("unsupported", f"Unsupported value: this kind of {where} is not supported by this endpoint.", param=where)
    if not names or (kind == "tool" and text(name, where) not in names):
        raise RequestError("invalid", f"{where} asks for a tool that is not among the tools.", param=where)
    return {"forced": names if kind == "any" else (name,), "forced_by": where}


def call(name: Any, arguments: Any, where: str) -> ToolCall:
    """A call as a client gives it back: its arguments as an object, or as the text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError("invalid", f"{where}: the arguments are not valid JSON.", param=where) from None
    try:
        found = mapping(given(arguments, {}), f"{where}.arguments")
        return ToolCall(name=text(name, f"{where}.name"), arguments=found)
    except ValueError as error:
        raise RequestError("invalid", f"{where}: {str(error)[:300]}", param=where) from None


def said(role: str, content: str, calls: Sequence[ToolCall] = (), **more: Any) -> RequestMessage:
    return RequestMessage(message=Message(role=role, content=content, tool_calls=tuple(calls)), **more)


def function(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool in the form of chat completions, which chat templates take."""
    about = {"name": text(name, f"{where}.name"), "description": text(given(description, ""), f"{where}.description")}
    schema = storable(mapping(given(parameters, {}), f"{where}.parameters"), f"{where}.parameters")
    return {"type": "function", "function": {**storable(about, where), "parameters": schema}}


def split_system(messages: Sequence[RequestMessage]) -> tuple[tuple[str, ...], tuple[RequestMessage, ...]]:
    """The texts of the system messages at the head, and the messages after them."""
    count = next((at for at, one in enumerate(messages) if one.message.role != "system"), len(messages))
    return tuple(one.message.content for one in messages[:count]), tuple(messages[count:])


def nothing_else(body: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], where: str = "") -> None:
    """Raises `RequestError` for fields that request unsupported behaviour. `allowed`: field -> values that have no effect, as null has."""
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in values):
            path = inside(where, name)
            raise RequestError("unsupported", f"Unsupported value: this value of {path!r} is not supported by this endpoint.", param=path)
