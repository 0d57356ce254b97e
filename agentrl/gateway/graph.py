"""The conversations in a session: finds the sampled turn that a request continues, based on the sampled text and the structure of the other
messages.

A request is matched to a turn by a digest of the conversation up to that turn. The digest ignores what clients change: reasoning, white
space, the order of JSON keys, call ids, leading system messages, and the number of messages into which a turn is split. If several turns
have the same digest, the call ids determine the turn. A request that matches no turn starts a new context. The new context belongs to the
conversation with the same opening. If there is no such conversation, the content of the context determines its parent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

from agentrl.gateway.request import CompletionRequest, RequestMessage, said, split_reasoning
from agentrl.gateway.tokens import Parsed
from agentrl.protocols import LiveTrajectory
from agentrl.records import Parent, ToolCall, ToolResult

MAX_CALLING = 16
"""Maximum number of turns with running calls, and of strings in one call, that are searched for a sub-agent's task."""
QUOTED = 32
"""Minimum characters in a completion that can identify the parent of a context: a context that quotes the completion becomes a child of its
turn. Half as many characters identify a sub-agent's task, or a turn of a conversation with the same opening."""
MAX_SEARCHED = (256, 16, 1 << 18)
"""Bounds on a search: maximum number of newest turns, of messages in the request, and of characters in each message."""
SAME_SYSTEM = 0.5
"""Minimum share of the longer system message's characters that must be in common lines for two system messages to count as the same."""


class End:
    """The end of a conversation: a digest of the messages before its last assistant turn, and the content of that turn.

    Clients may send one turn back as several messages. If a turn was cut off, clients may send it and the turns that continue it as one
    message. The contents of consecutive assistant messages are therefore concatenated.
    """

    __slots__ = ("_before", "_calls", "_text")

    def __init__(self, before: bytes = b"") -> None:
        self._before = before
        self._text: Any = None  # hashes of a turn; None before the first message of the turn
        self._calls: Any = None

    @property
    def digest(self) -> bytes:
        """The digest of the conversation."""
        if self._text is None:
            return self._before
        return _digest(self._before, b"assistant\0", self._text.digest(), self._calls.digest())

    def said(self, content: str, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> End:
        """Returns the end after one more message from the assistant."""
        end = End(self._before)
        end._text = blake2b(digest_size=16) if self._text is None else self._text.copy()
        end._calls = blake2b(digest_size=16) if self._calls is None else self._calls.copy()
        _, text = split_reasoning(content)
        end._text.update("".join(text.split()).encode("utf-8", "surrogatepass"))
        for name, arguments in calls:
            end._calls.update(json.dumps((name, dict(arguments)), sort_keys=True).encode() + b"\0")
        return end


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The start of a context, up to the first assistant turn: length and digest of its text, and whether more messages follow."""

    chars: int
    digest: bytes
    text: str = field(default="", compare=False)  # set only for a request; not stored
    more: bool = False

    def begins(self, other: Opening) -> bool:
        """Returns whether the other opening continues this opening, with more messages or with more text."""
        if self.chars == other.chars and self.digest == other.digest:
            return other.more
        return 0 < self.chars < other.chars and other.text[self.chars].isspace() and _text_digest(other.text[: self.chars]) == self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The start of a context: its system messages, tools and opening."""

    system: Mapping[bytes, int]  # digest -> length, for each line of the system messages
    tools: bytes  # digest
    opening: Opening

    def same_system(self, other: Context) -> bool:
        """Returns whether the system messages of the two contexts are mostly the same."""
        if self.system.keys() == other.system.keys():
            return True
        common = sum(length for line, length in self.system.items() if line in other.system)
        return common >= SAME_SYSTEM * max(sum(self.system.values()), sum(other.system.values()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTurn:
    """One sampled turn: where it is recorded, and how to recognize a request that continues it."""

    trajectory: LiveTrajectory
    turn: int
    end: End  # end of the conversation, including this turn
    context: Context
    messages: int  # number of messages in the answered request
    all_ids: tuple[str, ...]  # ids of all calls in the turn
    withheld: Mapping[str, str]  # id -> reason, for calls that the client did not receive
    tokens: int  # tokens in the context, including this turn
    ended: bool  # whether its last token ends a turn
    answer_id: str
    parsed: Parsed
    text: str  # as the client received it

    @property
    def parent(self) -> Parent:
        """The turn as the parent of another context."""
        return Parent(trajectory=self.trajectory.index, turn=self.turn)

    @property
    def calls(self) -> Sequence[ToolCall]:
        """All calls in the turn."""
        return self.trajectory.turns[self.turn].message.tool_calls

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The ids of the calls that the client received."""
        return tuple(name for name in self.all_ids if name not in self.withheld)

    def with_withheld(self, new: tuple[RequestMessage, ...]) -> tuple[RequestMessage, ...]:
        """Returns the messages after this turn, with a result added for each withheld call and all results in the order of the calls.
        Returns `new` if it contains no result or no call was withheld."""
        results = [message for message in new if message.message.role == "tool"]
        if not (results and self.withheld):
            return new
        results += [said("tool", reason, call_id=name, ok=False) for name, reason in self.withheld.items()]
        order = {name: at for at, name in enumerate(self.all_ids)}
        results.sort(key=lambda message: order.get(message.call_id, len(order)))
        return (*results, *(message for message in new if message.message.role != "tool"))

    def results(self, new: Sequence[RequestMessage]) -> list[ToolResult]:
        """Returns the messages after this turn as results: first the results of its calls, then all other messages."""
        names = dict(zip(self.all_ids, (call.name for call in self.calls), strict=True))
        tools = [message for message in new if message.message.role == "tool"]
        results = [
            ToolResult(name=names.get(tool_message.call_id, "")[:64], output=tool_message.message.content, ok=tool_message.ok)
            for tool_message in tools
        ]
        others = [message.message for message in new if message.message.role != "tool"]
        return [*results, *(ToolResult(name=other.role[:64], output=other.content, ok=True) for other in others)]

    def quoted_in(self, text: str) -> bool:
        """Returns whether a string contains the id of one of this turn's calls, or its answer if that has at least `QUOTED // 2`
        characters."""
        answer = self.parsed.answer.strip()
        return any(name in text for name in self.call_ids) or (len(answer) >= QUOTED // 2 and answer in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMatch:
    """The context that a request belongs to."""

    kind: str  # next, root, sub_agent, or restart (the same agent in a new context)
    before: SampledTurn | None = None  # the turn that the request continues with exact tokens; None means to render again
    parent: Parent | None
    new: tuple[RequestMessage, ...]  # the messages after `before`
    end: End  # end of the conversation so far
    context: Context
    system_changed: bool = False
    answers: SampledTurn | None = None  # the turn whose calls no longer run, because the program has written them as text
    aside: bool = False  # whether it may be auxiliary: it quotes its parent, or is requested without the parent's tools


@dataclass(slots=True)
class ConversationGraph:
    """All sampled turns in a session. Stores digests and ids, but no messages."""

    _by_digest: dict[bytes, list[SampledTurn]] = field(default_factory=dict)
    _by_call: dict[str, SampledTurn] = field(default_factory=dict)
    _by_answer: dict[str, SampledTurn] = field(default_factory=dict)
    _last: dict[int, SampledTurn] = field(default_factory=dict)  # trajectory -> its last turn, newest at the end
    _running: dict[SampledTurn, set[int]] = field(default_factory=dict)  # indexes of unanswered calls that no sub-agent belongs to
    _answered: dict[SampledTurn, set[int]] = field(default_factory=dict)  # the same for answered calls of the newest turns

    def locate(self, request: CompletionRequest) -> ContextMatch:
        """Returns the context to which a request belongs, in time linear in the size of the request."""
        at, turn, ends = self._last_turn(request)
        opening = _opening(request.messages) if turn is None else turn.context.opening
        context = _context(request, replace(opening, text="", more=False))
        match = partial(ContextMatch, context=context, end=ends[-1])
        if turn is not None and _continues(turn, context):
            changed = bool(context.system) and context.system.keys() != turn.context.system.keys()
            return match(kind="next", before=turn, parent=turn.parent, new=_renamed(request.messages, at, turn), system_changed=changed)
        match = partial(match, new=request.messages)
        if turn is not None:
            return match(kind="restart", parent=turn.parent)
        if (turn := self._conversation(request, opening, context)) is not None:
            answers = turn if turn.context.tools == context.tools else None
            aside = not request.tools and turn.context.tools != NO_TOOLS
            return match(kind="restart", parent=turn.parent, answers=answers, aside=aside)
        kind, parent, aside = self._origin(request, context)
        return match(kind=kind, parent=parent, aside=aside)

    def continued_turn(self, request: CompletionRequest) -> tuple[SampledTurn | None, tuple[RequestMessage, ...]]:
        """Returns the turn that a request continues with exact tokens (None if there is none) and the messages after it. Does not change
        the graph."""
        at, turn, _ = self._last_turn(request)
        if turn is None or not _continues(turn, _context(request, turn.context.opening)):
            return None, ()
        return turn, _renamed(request.messages, at, turn)

    def rejoin(self, request: CompletionRequest) -> CompletionRequest:
        """Returns the request with one message for each sampled turn, even if the client sends the turn's calls separately, each with its
        result."""
        joined: list[RequestMessage] = []
        open_turn: tuple[int, SampledTurn] | None = None  # its index in `joined`, and the turn
        for part in request.messages:
            turn = self._by_call.get(part.call_ids[0]) if part.call_ids else None
            if part.message.role == "assistant":
                if open_turn is not None and turn is open_turn[1] and joined[-1].message.role == "tool":
                    first = joined[open_turn[0]]
                    if not set(part.call_ids) & set(first.call_ids):
                        message = replace(
                            first.message,
                            content="\n".join(filter(None, (first.message.content, part.message.content))),
                            tool_calls=(*first.message.tool_calls, *part.message.tool_calls),
                        )
                        joined[open_turn[0]] = replace(first, message=message, call_ids=(*first.call_ids, *part.call_ids))
                        continue
                open_turn = None if turn is None else (len(joined), turn)
            elif part.message.role != "tool":
                open_turn = None
            joined.append(part)
        return replace(request, messages=tuple(joined)) if len(joined) < len(request.messages) else request

    def add(self, turn: SampledTurn) -> None:
        """Adds a sampled turn."""
        self._by_digest.setdefault(turn.end.digest, []).append(turn)
        self._by_answer[turn.answer_id] = turn
        self._by_call.update(dict.fromkeys(turn.call_ids, turn))
        self._last.pop(turn.trajectory.index, None)
        self._last[turn.trajectory.index] = turn
        if turn.call_ids:
            self._running[turn] = {at for at, name in enumerate(turn.all_ids) if name not in turn.withheld}

    def answered(self, turn: SampledTurn) -> None:
        """Records that the conversation continues after this turn. The turn's calls have returned, but sub-agents that they started may
        still be running."""
        if free := self._running.pop(turn, None):
            self._answered[turn] = free
            while len(self._answered) > MAX_CALLING:
                self._answered.pop(next(iter(self._answered)))

    def last(self, trajectory: LiveTrajectory) -> SampledTurn | None:
        """Returns the last turn of a trajectory; None if it has no turn."""
        return self._last.get(trajectory.index)

    def _last_turn(self, request: CompletionRequest) -> tuple[int, SampledTurn | None, tuple[End, ...]]:
        """Finds the last message that ends a sampled turn in its original conversation. Returns the number of messages up to that message,
        the turn, and all ends of the conversation."""
        start = self._by_answer.get(request.after)
        ends = conversation_ends(request.messages) if start is None else conversation_ends(request.messages, start.end, start.call_ids)
        for at in range(len(request.messages), 0, -1):
            last = request.messages[at - 1]
            if last.message.role == "assistant" and (turns := self._by_digest.get(ends[at].digest)):
                same = [turn for turn in turns if last.call_ids and set(last.call_ids) <= set(turn.call_ids)]
                return at, (same or turns)[-1], ends
        return 0, start, ends

    def _conversation(self, request: CompletionRequest, opening: Opening, context: Context) -> SampledTurn | None:
        """Returns the newest turn of the conversation that a request continues with a rewritten history.

        Such a request has the opening of an earlier context, a mostly identical system message, and more messages or quotes of that
        context. If the text after that opening is exactly an argument of a running call, the request starts a sub-agent instead, and the
        result is None.
        """
        turns, most, chars = MAX_SEARCHED
        newest = list(self._last.values())[: -turns // 4 - 1 : -1]
        same = [turn for turn in newest if turn.context.opening.begins(opening) and turn.context.same_system(context)][:most]
        if not same or self._is_argument(opening.text[same[0].context.opening.chars :].strip()):
            return None
        texts = [message.message.content[:chars] for message in request.messages[-most:]]
        quoted = (turn for turn in same if any(turn.quoted_in(text) for text in texts) or _any_task_in(turn, texts))
        longer = (turn for turn in same if len(request.messages) > turn.messages or opening.chars > turn.context.opening.chars)
        return next(quoted, None) or next(longer, None)

    def _is_argument(self, text: str) -> bool:
        """Whether a string equals an argument of a running call, which passes this argument to a sub-agent."""
        running = islice(reversed(self._running.items()), MAX_CALLING)
        return bool(text) and any(text in _strings(turn.calls[at].arguments) for turn, free in running for at in free)

    def _origin(self, request: CompletionRequest, context: Context) -> tuple[str, Parent | None, bool]:
        """Returns the kind of a new context, its parent if it has one, and whether it may be auxiliary (`ContextMatch.aside`)."""
        _, most, chars = MAX_SEARCHED
        texts = [message.message.content[:chars] for message in request.messages if message.message.role != "assistant"][:most]
        if (caller := self._calling(texts) or self._started(texts, bool(request.tools))) is not None:
            return "sub_agent", caller, False
        names = (name for message in reversed(request.messages) for name in message.call_ids if name in self._by_call)
        if (name := next(names, None)) is not None:
            return "restart", self._by_call[name].parent, False
        if (turn := self._quoted(texts)) is not None:
            aside = not request.tools and (turn.context.tools != NO_TOOLS or not turn.context.same_system(context))
            return "restart", turn.parent, aside
        if request.tools and not self._repeats_root(request, context) and (caller := self._calling(None)) is not None:
            return "sub_agent", caller, False
        return "root", None, False

    def _repeats_root(self, request: CompletionRequest, context: Context) -> bool:
        """Whether this request has already started a context without a parent, as happens if the answer was not used or the program wants
        several answers."""
        if any(message.message.role == "assistant" for message in request.messages):
            return False
        newest = islice(reversed(self._last.values()), MAX_SEARCHED[0])
        return any(turn.trajectory.parent is None and turn.context == context for turn in newest)

    def _calling(self, texts: Sequence[str] | None) -> Parent | None:
        """Returns the first running call with an argument that occurs in one of `texts`, or any running call if `texts` is None. Each call
        is returned only once, because it starts only one sub-agent. Returns None if there is no such call.

        A text that quotes the calling turn, such as a request for a title, is not a sub-agent's task.
        """
        for turn, free in islice(reversed(self._running.items()), MAX_CALLING):
            tasks = None if texts is None else [text for text in texts if not turn.quoted_in(text)]
            for index in sorted(free):
                if tasks is None or _task_in(turn.calls[index], tasks):
                    free.discard(index)
                    return Parent(trajectory=turn.trajectory.index, turn=turn.turn, call=index)
        return None

    def _started(self, texts: Sequence[str], tools: bool) -> Parent | None:
        """Returns a call whose result was an immediate reference to a sub-agent, if a message in the request is that sub-agent's task;
        otherwise None.

        Programs add reminders before or after the task. A message with such additions counts only in a request with tools, because the
        prompt for a title quotes the task too.
        """
        messages = {text.strip() for text in texts}
        for turn, free in reversed(self._answered.items()):
            for index in sorted(free):
                tasks = [text for text in _strings(turn.calls[index].arguments)[:MAX_CALLING] if len(text) >= QUOTED // 2]
                if any(task in messages or (tools and any(_at_an_end(task, text) for text in messages)) for task in tasks):
                    free.discard(index)
                    return Parent(trajectory=turn.trajectory.index, turn=turn.turn, call=index)
        return None

    def _quoted(self, texts: Sequence[str]) -> SampledTurn | None:
        """Returns the turn with the longest context among the turns that `texts` quote; None if they quote no turn. Texts that quote a turn
        summarize or discuss its conversation."""
        newest = list(self._last.values())[-MAX_SEARCHED[0] :]
        for turn in sorted(newest, key=lambda turn: turn.tokens, reverse=True):
            answer = turn.parsed.answer.strip()
            if len(answer) >= QUOTED and any(answer in text for text in texts):
                return turn
        return None


def conversation_ends(messages: Iterable[RequestMessage], start: End | None = None, call_ids: Sequence[str] = ()) -> tuple[End, ...]:
    """Returns n + 1 ends for n messages: the start, and the end of the conversation after each message. The ends do not depend on what
    clients change between requests.

    `start` and `call_ids` belong to the turn that the messages follow.
    """
    ends = [start or End()]
    calls = {name: at for at, name in enumerate(call_ids)}  # call ids in the last turn
    in_turn = bool(call_ids)  # whether the last message is from the assistant
    for part in messages:
        message = part.message
        if message.role == "assistant":
            ends.append(ends[-1].said(message.content, [(call.name, call.arguments) for call in message.tool_calls]))
            calls = calls if in_turn else {}
            for name in part.call_ids:
                calls.setdefault(name, len(calls))
        else:
            head = f"{message.role}\0{calls.get(part.call_id, '')}\0{len(message.content)}\0"
            ends.append(End(_digest(ends[-1].digest, head.encode(), message.content.encode("utf-8", "surrogatepass"))))
        in_turn = message.role == "assistant"
    return tuple(ends)


def _context(request: CompletionRequest, opening: Opening) -> Context:
    lines = {line.strip() for text in request.system for line in text.splitlines()} - {""}
    tools = sorted(request.tools, key=lambda tool: str(tool["function"]["name"]))
    return Context(
        system={_text_digest(line): len(line) for line in lines}, tools=_digest(json.dumps(tools, sort_keys=True).encode()), opening=opening
    )


def _continues(turn: SampledTurn, context: Context) -> bool:
    """Whether a request with this context can continue a turn with exact tokens."""
    return turn.context.tools == context.tools and (not context.system or turn.context.same_system(context))


def _opening(messages: Sequence[RequestMessage]) -> Opening:
    count = next((at for at, each in enumerate(messages) if each.message.role in ("assistant", "tool")), len(messages))
    text = "\n".join(message.message.content for message in messages[:count] if message.message.role == "user")
    return Opening(chars=len(text), digest=_text_digest(text), text=text, more=count < len(messages))


def _renamed(messages: Sequence[RequestMessage], at: int, turn: SampledTurn) -> tuple[RequestMessage, ...]:
    """Returns the messages after a sampled turn, with the original ids of its calls if the client uses different ids."""
    first = next((index for index in range(at, 0, -1) if messages[index - 1].message.role != "assistant"), 0)
    client_ids = tuple(name for message in messages[first:at] for name in message.call_ids)
    ids = turn.call_ids if len(client_ids) == len(turn.call_ids) else client_ids
    names = dict(zip(client_ids, ids, strict=True)) if set(client_ids) != set(ids) else {}
    return tuple(replace(message, call_id=names.get(message.call_id, message.call_id)) for message in messages[at:])


def _text_digest(text: str) -> bytes:
    return _digest(text.encode("utf-8", "surrogatepass"))


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


NO_TOOLS = _digest(json.dumps([]).encode())


def _any_task_in(turn: SampledTurn, texts: Sequence[str]) -> bool:
    return any(_task_in(call, texts) for call in turn.calls[:MAX_CALLING])


def _task_in(call: ToolCall, texts: Sequence[str]) -> bool:
    """Whether one of `texts` contains a string from the call's arguments, such as a sub-agent's task."""
    tasks = [task for task in _strings(call.arguments) if len(task) >= QUOTED // 2]
    return any(task in text for task in tasks[:MAX_CALLING] for text in texts)


def _at_an_end(task: str, text: str) -> bool:
    """Whether `task` forms the first or the last lines of `text`."""
    return text.startswith(task + "\n") or text.endswith("\n" + task)


def _strings(value: Any) -> list[str]:
    """Returns all strings in a JSON value except keys, without surrounding white space."""
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []
