"""The exact tokens of a conversation that an outside program leads: the opening once, then what comes between two completions.

The chat format is the run's (`agentrl.agent.ChatFormat` in a recipe); the gateway needs no more of it than `Chat` names.
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
    """A completion as a message, and what was wrong with its tool calls."""

    @property
    def message(self) -> Message: ...

    @property
    def errors(self) -> tuple[str, ...]: ...

    @property
    def answer(self) -> str:
        """The message without what was thought."""
        ...

    @property
    def call_ids(self) -> tuple[str, ...]:
        """What the model calls each of the message's tool calls; empty where its form has no ids."""
        ...


class Frame(Protocol):
    """The text around the arguments of a call of one tool, the style of the arguments, and the text between two calls."""

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def style(self) -> str: ...

    @property
    def between(self) -> str: ...

    @property
    def excludes(self) -> tuple[str, ...]: ...


class Chat(Protocol):
    """The part of a chat format that the gateway needs."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def exact(self) -> bool:
        """Whether a conversation grows by deltas alone."""
        ...

    def opening(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> tuple[int, ...]: ...

    def tool_delta(self, outputs: Sequence[str], after: Any = None) -> tuple[int, ...]: ...

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, including control tokens, without the token that ends it."""
        ...

    def parse(self, token_ids: Sequence[int], schemas: Sequence[Mapping[str, Any]] = (), *, calls: bool = True) -> Parsed: ...

    def argument_errors(self, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """The errors in the arguments of a call of the tool with this schema; empty if there are none."""
        ...

    def frame(self, name: str) -> Frame | None:
        """The frame of a call of the tool with this name; None if guided decoding cannot enforce the policy's form of calls."""
        ...

    @property
    def thinks_first(self) -> bool:
        """Whether a completion starts inside a reasoning block."""
        ...

    def escape_message(self, message: Message) -> Message: ...

    def escape_value(self, value: Any) -> Any: ...


class NotAppended(Exception):
    """The chat template does not put these messages after a completion without changing what came before."""


class ConversationTokens:
    """Messages of a program as tokens. Everything it says is hostile: no text of it becomes a control token."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._stops = frozenset(chat.stop_token_ids)
        self._asked = (Message(role="user", content="-"),)
        self._before = self._open(self._asked, ())
        self._ends: dict[tuple[object, ...], int] = {}  # by roles and calls: how many turns end in messages of these

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Ids of a whole context, up to where the completion begins. Raises `RequestError` for what the template does not take."""
        clean = [self.chat.escape_message(one) for one in messages]
        ids = self._open(clean, [self.chat.escape_value(one) for one in tools])
        self._check(ids, messages, tools)
        return ids

    def delta(self, new: Sequence[RequestMessage], after: Parsed, call_ids: Sequence[str], *, ended: bool) -> tuple[int, ...]:
        """Ids between a completion and the next one.

        Args:
            after: the completion, whose calls the client knows by `call_ids`.
            ended: whether its last token is one that ends a turn; else such a token comes first.

        Raises:
            NotAppended: the context has to be rendered anew.
            Refused: the template does not take these messages.
        """
        if not self.chat.exact:
            raise NotAppended
        answers = {one.call_id: one.message.content for one in new if one.message.role == "tool"}
        if ended and call_ids and len(answers) == len(new) and set(answers) == set(call_ids):
            return self.chat.tool_delta([answers[name] for name in call_ids], after)
        if answers and any(after.call_ids):  # results beside a word of the user's would come under other ids than the model gave
            raise NotAppended
        calls = after.message.tool_calls if answers else ()
        turn = [*self._asked, Message(role="assistant", content="-", tool_calls=calls)]
        messages = [one.message for one in new]
        whole = self._open([self.chat.escape_message(one) for one in (*turn, *messages)], ())
        if whole[: len(self._before)] != self._before:
            raise NotAppended
        self._check(whole, [*turn, *messages], ())
        own = self._count(self._open([self.chat.escape_message(one) for one in turn], ())) - self._count(self._before)
        ends = [at for at in range(len(self._before), len(whole)) if whole[at] in self._stops]
        if not 0 < own <= len(ends):
            raise NotAppended
        end = ends[own - 1]
        return whole[end + 1 if ended else end :]

    def up_to(self, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str]:
        """The number of tokens up to the one that completes a stop sequence, and that sequence; else all tokens and an empty text."""

        def reached(count: int) -> bool:
            text = self.chat.text(ids[:count])
            return any(one in text for one in stops)

        if not stops or not reached(len(ids)):
            return len(ids), ""
        count = 1 + bisect_left(range(1, len(ids)), True, key=reached)
        return count, until(self.chat.text(ids[:count]), stops)[1]

    def _open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Changes a system message in mid-conversation to a user message if the template does not accept one there."""
        head = next((at for at, one in enumerate(messages) if one.role != "system"), len(messages))
        late = {at for at, one in enumerate(messages) if one.role == "system" and at > head}
        try:
            return self.chat.opening(messages, tools)
        except UserError as error:
            if late:
                return self._open([replace(one, role="user") if at in late else one for at, one in enumerate(messages)], tools)
            raise RequestError("invalid", f"The policy's chat template does not take these messages: {error.message[:300]}") from None

    def _check(self, ids: tuple[int, ...], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """A tokenizer may find the end of a turn in letters that it holds to be the same; then nothing of it is taken."""
        roles = (*((one.role, len(one.tool_calls)) for one in messages), "tools" if tools else "")
        if roles not in self._ends:
            call = ToolCall(name="a", arguments={})
            plain = [Message(role=one.role, content="-", tool_calls=(call,) * len(one.tool_calls)) for one in messages]
            named = [{"type": "function", "function": {"name": "a", "description": "", "parameters": {}}}] if tools else []
            self._ends[roles] = self._count(self._open(plain, named))
            if len(self._ends) > 256:
                self._ends.pop(next(iter(self._ends)))
        if self._count(ids) != self._ends[roles]:
            raise RequestError("invalid", "A message reads as control tokens of the model.")

    def _count(self, ids: Sequence[int]) -> int:
        return sum(map(self._stops.__contains__, ids))


def until(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the stop sequence that ends first, and that sequence; else the full text and an empty text."""
    found = [(text.find(one) + len(one), -len(one), one) for one in stops if one in text]
    if not found:
        return text, ""
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def stopped(completion: Completion, count: int) -> Completion:
    """The first tokens of a completion. The stop depends only on these tokens, so their sampling distribution does not change."""
    return Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        versions=tuple(replace(one, end=min(one.end, count)) for one in completion.versions if one.start < count),
        finish_reason="stop",
        supports=None if completion.supports is None else Supports.from_rows(completion.supports.rows[:count]),
    )
