"""The exact tokens of a conversation with an external program: first the opening, then the tokens between consecutive completions.

`Chat` is the part of the run's chat format (`agentrl.agent.ChatFormat`) that the gateway needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agentrl.errors import UserError
from agentrl.gateway.request import RequestError, RequestMessage
from agentrl.records import Completion, Message, ToolCall
from agentrl.records.sampling import Supports


class Parsed(Protocol):
    """A completion parsed into a message, and the errors in its tool calls."""

    @property
    def message(self) -> Message:
        """The message."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors of invalid tool calls."""

    @property
    def answer(self) -> str:
        """The message without the reasoning."""

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The ids that the model gave the message's tool calls; empty if the model's form of calls has no ids."""


class Frame(Protocol):
    """The text around the arguments of a call, as guided decoding enforces it (`agentrl.agent.forms.Frame`)."""

    @property
    def begin(self) -> str:
        """Text before the arguments."""

    @property
    def end(self) -> str:
        """Text after the arguments."""

    @property
    def style(self) -> str:
        """The `style` of xgrammar's `json_schema` format for the arguments."""

    @property
    def between(self) -> str:
        """Text between two calls."""

    @property
    def excludes(self) -> tuple[str, ...]:
        """Strings that no argument may contain."""


class Chat(Protocol):
    """The part of a chat format that the gateway needs. See `agentrl.agent.ChatFormat`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""

    @property
    def exact(self) -> bool:
        """Whether messages can be appended to a conversation without changing earlier tokens."""

    @property
    def thinks_first(self) -> bool:
        """Whether a completion starts inside a reasoning block."""

    def opening(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns the token ids of a context, up to the start of the completion."""

    def tool_delta(self, outputs: Sequence[str], after: Any = None) -> tuple[int, ...]:
        """Returns the token ids between two completions, which contain the tool outputs."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a completion, with control tokens but without the token that ends it."""

    def parse(self, token_ids: Sequence[int], schemas: Sequence[Mapping[str, Any]] = (), *, calls: bool = True) -> Parsed:
        """Parses a completion into a message."""

    def argument_errors(self, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """Returns the errors in the arguments of a call; empty if there are none."""

    def frame(self, name: str) -> Frame | None:
        """Returns the frame for a call to this tool; None if guided decoding cannot enforce the policy's form of calls."""

    def escape_message(self, message: Message) -> Message:
        """Returns the message with control tokens escaped."""

    def escape_value(self, value: Any) -> Any:
        """Returns the JSON value with control tokens escaped."""


class NotAppended(Exception):
    """The chat template cannot append these messages to a completion without changing earlier tokens."""


class ConversationTokens:
    """Converts messages from a program to tokens. The messages are untrusted: no string in them becomes a control token."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._stops = frozenset(chat.stop_token_ids)
        self._user = (Message(role="user", content="-"),)
        self._before = self._open(self._user, ())
        self._ends: dict[tuple[object, ...], int] = {}  # (role and number of calls of each message) -> number of end tokens

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns the token ids of a context, up to the start of the completion. Raises `RequestError` if the template rejects the
        messages, or if they contain control tokens."""
        escaped = [self.chat.escape_message(message) for message in messages]
        ids = self._open(escaped, [self.chat.escape_value(tool) for tool in tools])
        self._check(ids, messages, tools)
        return ids

    def delta(self, new: Sequence[RequestMessage], after: Parsed, call_ids: Sequence[str], *, ended: bool) -> tuple[int, ...]:
        """Returns the token ids between a completion and the next completion.

        Args:
            after: the completion. The client identifies the calls in the completion by `call_ids`.
            ended: whether the last token of the completion ends a turn. If it does not, the returned ids start with a token that ends the
                turn.

        Raises:
            NotAppended: the context must be rendered again.
            RequestError: the template rejects these messages, or they contain control tokens.
        """
        if not self.chat.exact:
            raise NotAppended
        answers = {entry.call_id: entry.message.content for entry in new if entry.message.role == "tool"}
        if ended and call_ids and len(answers) == len(new) and set(answers) == set(call_ids):
            return self.chat.tool_delta([answers[name] for name in call_ids], after)
        if answers and any(after.call_ids):  # next to a user message, results would have ids other than the model's
            raise NotAppended
        calls = after.message.tool_calls if answers else ()
        turn = [*self._user, Message(role="assistant", content="-", tool_calls=calls)]
        messages = [entry.message for entry in new]
        full = self._open([self.chat.escape_message(message) for message in (*turn, *messages)], ())
        if full[: len(self._before)] != self._before:
            raise NotAppended
        self._check(full, [*turn, *messages], ())
        own = self._count(self._open([self.chat.escape_message(message) for message in turn], ())) - self._count(self._before)
        ends = [at for at in range(len(self._before), len(full)) if full[at] in self._stops]
        if not 0 < own <= len(ends):
            raise NotAppended
        end = ends[own - 1]
        return full[end + 1 if ended else end :]

    def up_to(self, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str]:
        """Returns the number of tokens up to the end of a stop sequence, and that sequence; the number of all tokens and "" if there is
        none."""

        def reached(count: int) -> bool:
            text = self.chat.text(ids[:count])
            return any(stop in text for stop in stops)

        if not stops or not reached(len(ids)):
            return len(ids), ""
        count = 1 + bisect_left(range(1, len(ids)), True, key=reached)
        return count, until(self.chat.text(ids[:count]), stops)[1]

    def _open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns the token ids of a context. Changes later system messages to user messages if the template rejects them. Raises
        `RequestError` if it still rejects the messages."""
        head = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
        late = {at for at, message in enumerate(messages) if message.role == "system" and at > head}
        try:
            return self.chat.opening(messages, tools)
        except UserError as error:
            if late:
                changed = [replace(message, role="user") if at in late else message for at, message in enumerate(messages)]
                return self._open(changed, tools)
            raise RequestError("invalid", f"The policy's chat template rejects these messages: {error.message[:300]}") from None

    def _check(self, ids: tuple[int, ...], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises `RequestError` if the tokenizer normalizes characters in the messages to additional end-of-turn tokens."""
        roles = (*((message.role, len(message.tool_calls)) for message in messages), "tools" if tools else "")
        if roles not in self._ends:
            call = ToolCall(name="a", arguments={})
            plain = [Message(role=message.role, content="-", tool_calls=(call,) * len(message.tool_calls)) for message in messages]
            named = [{"type": "function", "function": {"name": "a", "description": "", "parameters": {}}}] if tools else []
            self._ends[roles] = self._count(self._open(plain, named))
            if len(self._ends) > 256:
                self._ends.pop(next(iter(self._ends)))
        if self._count(ids) != self._ends[roles]:
            raise RequestError("invalid", "A message contains control tokens of the model.")

    def _count(self, ids: Sequence[int]) -> int:
        return sum(map(self._stops.__contains__, ids))


def until(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Returns the text before the stop sequence that ends first, and that sequence; the full text and "" if there is none."""
    matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, ""
    end, _, stop = min(matches)
    return text[: end - len(stop)], stop


def stopped(completion: Completion, count: int) -> Completion:
    """Returns the first `count` tokens of a completion. The stop depends only on these tokens, so their sampling distribution does not
    change."""
    return Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        versions=tuple(replace(span, end=min(span.end, count)) for span in completion.versions if span.start < count),
        finish_reason="stop",
        supports=None if completion.supports is None else Supports.from_rows(completion.supports.rows[:count]),
    )
