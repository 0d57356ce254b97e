"""The types of a completion request and its answer, which all protocols share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.records import Message, ToolCall

MAX_BODY = 8 << 20
"""Maximum bytes in one request."""
MAX_MESSAGES = 4096
"""Maximum number of messages in one request, and of items in one message."""
MAX_TOOLS = 512

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
"""Reason for rejecting a request -> HTTP status. SDKs retry requests that fail with 429 or 5xx, but not with any other status in this
table."""


class RequestError(Exception):
    """The gateway rejects a request. Each protocol writes the error in its own format."""

    def __init__(self, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMessage:
    """One message in a request."""

    message: Message
    call_ids: tuple[str, ...] = ()  # ids of the calls in an assistant message
    call_id: str = ""  # id of the call whose result a tool message contains
    ok: bool = True  # whether that call succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request for one completion. Leading system messages are stored separately, because clients change them between requests."""

    model: str
    system: tuple[str, ...]
    messages: tuple[RequestMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # in the chat-completions format
    loaded: tuple[Mapping[str, Any], ...] = ()  # tools that the policy sees only in results
    max_tokens: int | None = None
    after: str = ""  # id of the earlier answer that the messages follow
    retry: bool = False  # whether the client declares a retry
    stream: bool = False
    calls: bool = True  # whether the answer may contain tool calls; if False, calls stay text
    single: bool = False  # whether the answer contains at most one call
    strict: frozenset[str] = frozenset()  # tools whose calls must match the schema to be in the answer
    stop: tuple[str, ...] = ()  # stop sequences
    forced: tuple[str, ...] = ()  # the answer must call one of these tools
    forced_by: str = ""  # the path of the option that sets `forced`
    shape: Mapping[str, Any] | None = None  # the JSON schema for the answer, unless the answer calls a tool
    options: Mapping[str, Any] = field(default_factory=dict)  # how the protocol writes the answer

    @property
    def known_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the policy may call."""
        return (*self.tools, *self.loaded)

    @property
    def chars(self) -> int:
        """Number of characters in all messages, calls and tools that the policy would see."""
        texts = sum(map(len, (*self.system, *(entry.message.content for entry in self.messages))))
        calls = [call.name + json.dumps(dict(call.arguments)) for entry in self.messages for call in entry.message.tool_calls]
        return texts + sum(map(len, calls)) + sum(len(json.dumps(tool)) for tool in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCall:
    """A tool call in an answer, with the id by which the client refers to it."""

    id: str
    call: ToolCall

    @property
    def arguments(self) -> str:
        """The arguments as JSON text."""
        return json.dumps(dict(self.call.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion. Token counts use the policy's tokenizer."""

    id: str  # without the protocol's prefix
    model: str
    text: str
    reasoning: str
    calls: tuple[AnswerCall, ...]
    cut: bool  # whether a length limit cut the completion off
    stop: str = ""  # the stop sequence that ended the completion, if any
    prompt_tokens: int
    completion_tokens: int
    created: int  # seconds since 1970


def said(role: str, content: str, calls: Sequence[ToolCall] = (), **more: Any) -> RequestMessage:
    """Returns a message for a request. `more` sets additional fields of `RequestMessage`."""
    return RequestMessage(message=Message(role=role, content=content, tool_calls=tuple(calls)), **more)


def split_system(messages: Sequence[RequestMessage]) -> tuple[tuple[str, ...], tuple[RequestMessage, ...]]:
    """Returns the contents of the leading system messages, and the remaining messages."""
    count = next((at for at, entry in enumerate(messages) if entry.message.role != "system"), len(messages))
    return tuple(entry.message.content for entry in messages[:count]), tuple(messages[count:])


def split_reasoning(text: str) -> tuple[str, str]:
    """Returns the reasoning in a completion, up to `</think>`, and the rest of the text; "" and the full text if there is no `</think>`."""
    reasoning, closed, rest = text.partition("</think>")
    return (reasoning.replace("<think>", "", 1).strip(), rest.strip()) if closed else ("", text)


def read_json(content: bytes) -> Any:
    """Returns the JSON value in a request body. Raises `RequestError` if the body is not JSON, for example because it contains NaN."""

    def reject(word: str) -> float:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(content, parse_constant=reject)
    except (ValueError, RecursionError):
        raise RequestError("invalid", "We could not parse the JSON body of your request.") from None
