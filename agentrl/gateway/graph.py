"""The conversations of a session: finds the completion that a request continues, by the sampled text and the structure of the rest.

A node is one sampled turn. A request finds it by a digest of the conversation up to it. The digest ignores what clients change: reasoning,
white space, the order of JSON keys, ids of calls, system messages at the head, and the number of messages into which a turn is split. If
nodes have the same digest, the ids decide. A request that matches no conversation starts another context. It continues the conversation
with the same opening; if there is none, its content determines its parent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

from agentrl.gateway.request import CompletionRequest, RequestMessage, split_reasoning
from agentrl.gateway.tokens import Parsed
from agentrl.protocols import LiveTrajectory
from agentrl.records import Parent, ToolCall

MAX_CALLING = 16
"""Turns with calls that are running, and texts of one call, in which the task of a sub-agent is looked for."""

QUOTED = 32
"""Characters of a completion that another context must hold whole, to be taken for one that goes on from it."""

MAX_SEARCHED = (256, 16, 1 << 18)
"""Newest turns whose words are looked for in another context, its texts that are looked at, and characters of each: time is bounded."""

SAME_SYSTEM = 0.5
"""Share of its characters that the longer of two system messages must have in common with the other, line by line, to be the same."""


class End:
    """The end of a conversation: a digest of the messages before its last assistant turn, and the content of that turn.

    Clients may send one turn back as several messages, and several turns, after one that was cut, as one message. So the contents of
    consecutive assistant messages are concatenated.
    """

    __slots__ = ("_before", "_calls", "_words")

    def __init__(self, before: bytes = b"") -> None:
        self._before = before
        self._words: Any = None  # hashes, of a turn
        self._calls: Any = None

    @property
    def digest(self) -> bytes:
        if self._words is None:
            return self._before
        return _digest(self._before, b"assistant\0", self._words.digest(), self._calls.digest())

    def said(self, content: str, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> End:
        """The end after another message of the assistant."""
        end = End(self._before)
        end._words = blake2b(digest_size=16) if self._words is None else self._words.copy()
        end._calls = blake2b(digest_size=16) if self._calls is None else self._calls.copy()
        _, words = split_reasoning(content)
        end._words.update("".join(words.split()).encode("utf-8", "surrogatepass"))
        for name, arguments in calls:
            end._calls.update(json.dumps((name, dict(arguments)), sort_keys=True).encode() + b"\0")
        return end


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The start of a context, up to the first assistant turn: characters and digest of its text, and whether more follows."""

    chars: int
    digest: bytes
    text: str = field(default="", compare=False)  # only for a request; not kept
    more: bool = False

    def begins(self, other: Opening) -> bool:
        """Whether the other opening continues this one, with more messages or with more text."""
        if self.chars == other.chars and self.digest == other.digest:
            return other.more
        return 0 < self.chars < other.chars and other.text[self.chars].isspace() and _text_digest(other.text[: self.chars]) == self.digest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTurn:
    """One sampled turn: where it is recorded, and what a request that goes on from it looks like."""

    line: LiveTrajectory
    turn: int
    end: End  # of the conversation, including this turn
    opening: Opening  # of its context
    messages: int  # of the request that it answers
    system: frozenset[bytes]  # the lines of the system messages, and their lengths
    lengths: Mapping[bytes, int]
    tools: bytes
    all_ids: tuple[str, ...]  # of all its calls
    withheld: Mapping[str, str]  # why a call was not given to the client, by its id
    tokens: int  # of the context, this turn included
    ended: bool  # by its last token
    answer_id: str
    parsed: Parsed
    text: str  # as the client has it

    @property
    def parent(self) -> Parent:
        return Parent(trajectory=self.line.index, turn=self.turn)

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The ids of the calls that the client received."""
        return tuple(one for one in self.all_ids if one not in self.withheld)

    def tells_calls(self, texts: Sequence[str]) -> bool:
        """Whether one of the texts contains a string from a call's arguments."""
        return any(_told(call, texts) for call in self.line.turns[self.turn].message.tool_calls[:MAX_CALLING])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMatch:
    """Where a request belongs.

    `before` is the turn that it goes on from with exact tokens, None: its context is rendered anew. `new` are the messages that come
    after that. `kind`: next, root, sub_agent or restart, the last being the same agent in a context of its own.
    """

    kind: str
    before: SampledTurn | None
    parent: Parent | None
    new: tuple[RequestMessage, ...]
    end: End  # of the conversation so far
    opening: Opening
    system: frozenset[bytes]
    lengths: Mapping[bytes, int]
    tools: bytes
    system_changed: bool = False
    answers: SampledTurn | None = None  # the turn whose calls no longer run, because the program has written them as text
    aside: bool = False  # whether it may be auxiliary: it quotes its parent, or is requested without the parent's tools


@dataclass(slots=True)
class ConversationGraph:
    """All nodes of a session. Holds digests and ids, never a message."""

    _by_digest: dict[bytes, list[SampledTurn]] = field(default_factory=dict)
    _by_call: dict[str, SampledTurn] = field(default_factory=dict)
    _by_answer: dict[str, SampledTurn] = field(default_factory=dict)
    _last: dict[int, SampledTurn] = field(default_factory=dict)  # by trajectory
    _waiting: dict[SampledTurn, set[int]] = field(
        default_factory=dict
    )  # its calls that nothing has answered, and no sub-agent has begun at
    _answered: dict[SampledTurn, set[int]] = field(default_factory=dict)  # those that were answered first, of the newest turns

    def locate(self, asked: CompletionRequest) -> ContextMatch:
        """Where a request belongs. Takes time in proportion to its size."""
        system, lengths = _lines(asked.system)
        tools = _tools_digest(asked)
        at, node, ends = self._found(asked)
        opening = _opening(asked.messages) if node is None else node.opening
        kept = replace(opening, text="", more=False)
        known: dict[str, Any] = {"system": system, "lengths": lengths, "tools": tools, "end": ends[-1], "opening": kept}
        if node is not None and node.tools == tools and (not system or alike(node, system, lengths)):
            changed = bool(system) and system != node.system
            new = _renamed(asked.messages, at, node)
            return ContextMatch(kind="next", before=node, parent=node.parent, new=new, system_changed=changed, **known)
        known |= {"before": None, "new": asked.messages}
        if node is not None:
            return ContextMatch(kind="restart", parent=node.parent, **known)
        if (node := self._conversation(asked, opening, system, lengths)) is not None:
            goes_on, aside = node.tools == tools, not asked.tools and node.tools != NO_TOOLS
            return ContextMatch(kind="restart", parent=node.parent, answers=node if goes_on else None, aside=aside, **known)
        kind, parent, aside = self._origin(asked, known)
        return ContextMatch(kind=kind, parent=parent, aside=aside, **known)

    def goes_on(self, asked: CompletionRequest) -> tuple[SampledTurn | None, tuple[RequestMessage, ...]]:
        """The turn that a request continues with exact tokens, and the messages after it. Does not change the graph."""
        system, lengths = _lines(asked.system)
        tools = _tools_digest(asked)
        at, node, _ = self._found(asked)
        if node is None or node.tools != tools or (system and not alike(node, system, lengths)):
            return None, ()
        return node, _renamed(asked.messages, at, node)

    def rejoin(self, asked: CompletionRequest) -> CompletionRequest:
        """The request with sampled turns joined again, if the client sends their calls one by one, each with its result."""
        made: list[RequestMessage] = []
        turn: tuple[int, SampledTurn] | None = None  # its index in `made`, and the turn
        for one in asked.messages:
            node = self._by_call.get(one.call_ids[0]) if one.call_ids else None
            if one.message.role == "assistant":
                if turn is not None and node is turn[1] and made[-1].message.role == "tool" and _adds(made[turn[0]], one):
                    first = made[turn[0]]
                    message = replace(
                        first.message,
                        content="\n".join(filter(None, (first.message.content, one.message.content))),
                        tool_calls=(*first.message.tool_calls, *one.message.tool_calls),
                    )
                    made[turn[0]] = replace(first, message=message, call_ids=(*first.call_ids, *one.call_ids))
                    continue
                turn = None if node is None else (len(made), node)
            elif one.message.role != "tool":
                turn = None
            made.append(one)
        return replace(asked, messages=tuple(made)) if len(made) < len(asked.messages) else asked

    def add(self, node: SampledTurn) -> None:
        self._by_digest.setdefault(node.end.digest, []).append(node)
        self._by_answer[node.answer_id] = node
        self._by_call.update(dict.fromkeys(node.call_ids, node))
        self._last.pop(node.line.index, None)  # the newest stand at the end
        self._last[node.line.index] = node
        if node.call_ids:
            self._waiting[node] = {at for at, name in enumerate(node.all_ids) if name not in node.withheld}

    def answered(self, node: SampledTurn) -> None:
        """The conversation goes on after this turn: none of its calls is running any more, but for what they started to go on beside it."""
        if free := self._waiting.pop(node, None):
            self._answered[node] = free
            while len(self._answered) > MAX_CALLING:
                self._answered.pop(next(iter(self._answered)))

    def last(self, line: LiveTrajectory) -> SampledTurn | None:
        return self._last.get(line.index)

    def _found(self, asked: CompletionRequest) -> tuple[int, SampledTurn | None, tuple[End, ...]]:
        """The index of the last message that ends a sampled turn in its original conversation, and that turn."""
        start = self._by_answer.get(asked.after)
        ends = conversation_ends(asked.messages) if start is None else conversation_ends(asked.messages, start.end, start.call_ids)
        for at in range(len(asked.messages), 0, -1):
            one = asked.messages[at - 1]
            if one.message.role == "assistant" and (nodes := self._by_digest.get(ends[at].digest)):
                same = [node for node in nodes if one.call_ids and set(one.call_ids) <= set(node.call_ids)]
                return at, (same or nodes)[-1], ends
        return 0, start, ends

    def _conversation(
        self, asked: CompletionRequest, opening: Opening, system: frozenset[bytes], lengths: Mapping[bytes, int]
    ) -> SampledTurn | None:
        """The newest turn of the conversation that a request continues with a rewritten history.

        Such a request has the opening of an earlier context, a mostly identical system message, and more messages or words of that context.
        If the text after that opening is exactly an argument of a running call, the request starts a sub-agent instead.
        """
        nodes, most, chars = MAX_SEARCHED
        newest = list(self._last.values())[: -nodes // 4 - 1 : -1]
        begun = {one.opening: one.opening.begins(opening) for one in newest}
        same = [one for one in newest if begun[one.opening] and alike(one, system, lengths)][:most]
        if not same or self._hands_on(opening.text[same[0].opening.chars :].strip()):
            return None
        texts = [one.message.content[:chars] for one in asked.messages[-most:]]
        told = (one for one in same if any(_tells_of(one, text) for text in texts) or one.tells_calls(texts))
        longer = (one for one in same if len(asked.messages) > one.messages or opening.chars > one.opening.chars)
        return next(told, None) or next(longer, None)

    def _hands_on(self, text: str) -> bool:
        """Whether a text is exactly an argument of a running call, which passes it to a sub-agent."""
        running = islice(reversed(self._waiting.items()), MAX_CALLING)
        return bool(text) and any(
            text in _strings(node.line.turns[node.turn].message.tool_calls[at].arguments) for node, free in running for at in free
        )

    def _origin(self, asked: CompletionRequest, known: Mapping[str, Any]) -> tuple[str, Parent | None, bool]:
        """The kind of an unknown context, its parent if it has one, and whether it may be auxiliary (`ContextMatch.aside`).

        `known`: fields of its `ContextMatch`.
        """
        _, most, chars = MAX_SEARCHED
        texts = [one.message.content[:chars] for one in asked.messages if one.message.role != "assistant"][:most]
        if (called := self._calling(texts) or self._started(texts, bool(asked.tools))) is not None:
            return "sub_agent", called, False
        if node := next((self._by_call[name] for one in reversed(asked.messages) for name in one.call_ids if name in self._by_call), None):
            return "restart", node.parent, False
        if (node := self._quoted(texts)) is not None:
            with_tools = node.tools != NO_TOOLS
            return "restart", node.parent, not asked.tools and (with_tools or not alike(node, known["system"], known["lengths"]))
        if asked.tools and not self._repeats_root(asked, known) and (called := self._calling(None)) is not None:
            return "sub_agent", called, False
        return "root", None, False

    def _repeats_root(self, asked: CompletionRequest, known: Mapping[str, Any]) -> bool:
        """Whether this request has already started a context without a parent: its answer was not used, or the program wants several."""
        if any(one.message.role == "assistant" for one in asked.messages):
            return False
        about = [known[name] for name in ("opening", "system", "tools")]
        newest = islice(reversed(self._last.values()), MAX_SEARCHED[0])
        return any(one.line.parent is None and [one.opening, one.system, one.tools] == about for one in newest)

    def _calling(self, texts: Sequence[str] | None) -> Parent | None:
        """The call that is running and holds one of the texts; without texts, the first one that is running. It begins one sub-agent.

        A text that quotes the turn itself, as one that asks for a title does, tells of the conversation, and is nobody's task.
        """
        for node, free in islice(reversed(self._waiting.items()), MAX_CALLING):
            calls = node.line.turns[node.turn].message.tool_calls
            tasks = None if texts is None else [text for text in texts if not _tells_of(node, text)]
            for index in sorted(free):
                if tasks is None or _told(calls[index], tasks):
                    free.discard(index)
                    return Parent(trajectory=node.line.index, turn=node.turn, call=index)
        return None

    def _started(self, texts: Sequence[str], tools: bool) -> Parent | None:
        """A call that was answered at once, with no more than the name of a sub-agent, whose task is a message here.

        Programs put reminders before or after the task. Such a message counts only in a request with tools: a title's quotes the task too.
        """
        messages = {text.strip() for text in texts}
        for node, free in reversed(self._answered.items()):
            calls = node.line.turns[node.turn].message.tool_calls
            for index in sorted(free):
                tasks = [word for word in _strings(calls[index].arguments)[:MAX_CALLING] if len(word) >= QUOTED // 2]
                if any(task in messages or (tools and any(_at_an_end(task, text) for text in messages)) for task in tasks):
                    free.discard(index)
                    return Parent(trajectory=node.line.index, turn=node.turn, call=index)
        return None

    def _quoted(self, texts: Sequence[str]) -> SampledTurn | None:
        """A turn whose words are quoted, of those the one with the longest context: it was summed up, or is told of."""
        newest = list(self._last.values())[-MAX_SEARCHED[0] :]
        for node in sorted(newest, key=lambda one: one.tokens, reverse=True):
            words = node.parsed.answer.strip()
            if len(words) >= QUOTED and any(words in text for text in texts):
                return node
        return None


def conversation_ends(messages: Iterable[RequestMessage], start: End | None = None, call_ids: Sequence[str] = ()) -> tuple[End, ...]:
    """[n + 1] ends of the conversation up to each message, in the form that does not change on the way through a client.

    `start` and `call_ids` are those of the turn that the messages come after.
    """
    ends = [start or End()]
    calls = {name: at for at, name in enumerate(call_ids)}  # of the last turn
    spoken = bool(call_ids)  # the last message is the assistant's
    for one in messages:
        message = one.message
        if message.role == "assistant":
            ends.append(ends[-1].said(message.content, [(call.name, call.arguments) for call in message.tool_calls]))
            calls = calls if spoken else {}
            for name in one.call_ids:
                calls.setdefault(name, len(calls))
        else:
            head = f"{message.role}\0{calls.get(one.call_id, '')}\0{len(message.content)}\0"
            ends.append(End(_digest(ends[-1].digest, head.encode(), message.content.encode("utf-8", "surrogatepass"))))
        spoken = message.role == "assistant"
    return tuple(ends)


def _opening(messages: Sequence[RequestMessage]) -> Opening:
    count = next((at for at, one in enumerate(messages) if one.message.role in ("assistant", "tool")), len(messages))
    text = "\n".join(one.message.content for one in messages[:count] if one.message.role == "user")
    return Opening(chars=len(text), digest=_text_digest(text), text=text, more=count < len(messages))


def _adds(turn: RequestMessage, more: RequestMessage) -> bool:
    """Whether the second message has only calls that the first one does not have."""
    return not set(more.call_ids) & set(turn.call_ids)


def _renamed(messages: Sequence[RequestMessage], at: int, node: SampledTurn) -> tuple[RequestMessage, ...]:
    """The messages after a sampled turn, with the original ids of its calls if the client uses other ids."""
    first = next((place for place in range(at, 0, -1) if messages[place - 1].message.role != "assistant"), 0)
    theirs = tuple(name for one in messages[first:at] for name in one.call_ids)
    ours = node.call_ids if len(theirs) == len(node.call_ids) else theirs
    names = dict(zip(theirs, ours, strict=True)) if set(theirs) != set(ours) else {}
    return tuple(replace(one, call_id=names[one.call_id]) if one.call_id in names else one for one in messages[at:])


def _text_digest(text: str) -> bytes:
    return _digest(text.encode("utf-8", "surrogatepass"))


def _digest(*parts: bytes) -> bytes:
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


NO_TOOLS = _digest(json.dumps([]).encode())


def _lines(texts: Sequence[str]) -> tuple[frozenset[bytes], dict[bytes, int]]:
    lines = {line.strip() for text in texts for line in text.splitlines()} - {""}
    lengths = {_digest(line.encode("utf-8", "surrogatepass")): len(line) for line in lines}
    return frozenset(lengths), lengths


def alike(node: SampledTurn, system: frozenset[bytes], lengths: Mapping[bytes, int]) -> bool:
    if system == node.system:
        return True
    common = sum(lengths[line] for line in system & node.system)
    return common >= SAME_SYSTEM * max(sum(lengths.values()), sum(node.lengths.values()))


def _tools_digest(asked: CompletionRequest) -> bytes:
    return _digest(json.dumps(sorted(asked.tools, key=_tool_name), sort_keys=True).encode())


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _tells_of(node: SampledTurn, text: str) -> bool:
    words = node.parsed.answer.strip()
    return any(name in text for name in node.call_ids) or (len(words) >= QUOTED // 2 and words in text)


def _told(call: ToolCall, texts: Sequence[str]) -> bool:
    """Whether one of the texts holds a text of the call's arguments: the task that a sub-agent is given."""
    words = [word for word in _strings(call.arguments) if len(word) >= QUOTED // 2]
    return any(word in text for word in words[:MAX_CALLING] for text in texts)


def _at_an_end(words: str, text: str) -> bool:
    """Whether `text` starts or ends with `words` as separate lines."""
    return text.startswith(words + "\n") or text.endswith("\n" + words)


def _strings(value: Any) -> list[str]:
    """All texts in a call's arguments."""
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, Mapping):
        return [text for one in value.values() for text in _strings(one)]
    return [text for one in value for text in _strings(one)] if isinstance(value, list | tuple) else []
