"""The conversations of a session: which completion a request goes on from, told by what was sampled here and by the structure of the rest.

A node is one sampled turn. It is found again by a digest of the conversation up to it, in which nothing counts that clients change:
reasoning, the order of JSON keys, ids of calls, system messages at the head. Among nodes with the same digest the ids decide. A request
whose conversation is none of ours is the beginning of another context, and where it comes from is told by what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

from agentrl.gateway.asked import Asked, Said, split_reasoning
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One sampled turn: where it is recorded, and what a request that goes on from it looks like."""

    line: LiveTrajectory
    turn: int
    digest: bytes  # of the conversation, this turn included
    system: frozenset[bytes]  # the lines of the system messages, and their lengths
    lengths: Mapping[bytes, int]
    tools: bytes
    call_ids: tuple[str, ...]
    tokens: int  # of the context, this turn included
    ended: bool  # by its last token
    answer_id: str
    parsed: Parsed

    @property
    def parent(self) -> Parent:
        return Parent(trajectory=self.line.index, turn=self.turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request belongs.

    `before` is the turn that it goes on from with exact tokens, None: its context is rendered anew. `new` are the messages that come
    after that. `kind`: next, root, sub_agent or restart, the last being the same agent in a context of its own.
    """

    kind: str
    before: Node | None
    parent: Parent | None
    new: tuple[Said, ...]
    digests: tuple[bytes, ...]  # of the conversation up to each message
    system: frozenset[bytes]
    lengths: Mapping[bytes, int]
    tools: bytes
    system_changed: bool = False
    quotes: bool = False  # whether it is tied to its parent by words alone, which its texts quote


@dataclass(slots=True)
class Graph:
    """All nodes of a session. Holds digests and ids, never a message."""

    _by_digest: dict[bytes, list[Node]] = field(default_factory=dict)
    _by_call: dict[str, Node] = field(default_factory=dict)
    _by_answer: dict[str, Node] = field(default_factory=dict)
    _last: dict[int, Node] = field(default_factory=dict)  # by trajectory
    _waiting: dict[Node, set[int]] = field(default_factory=dict)  # its calls that nothing has answered, and no sub-agent has begun at
    _answered: dict[Node, set[int]] = field(default_factory=dict)  # those that were answered first, of the newest turns

    def place(self, asked: Asked) -> Place:
        """Where a request belongs. Takes time in proportion to its size."""
        system, lengths = _lines(asked.system)
        tools = _digest(json.dumps(sorted(asked.tools, key=_tool_name), sort_keys=True).encode())
        found: dict[str, Any] = {"system": system, "lengths": lengths, "tools": tools}
        start = self._by_answer.get(asked.after)
        digests = chain(asked.messages) if start is None else chain(asked.messages, start.digest, start.call_ids)
        at, node = self._longest(asked, digests, start)
        if node is not None and node.tools == tools:
            same = _alike(node, system, lengths)
            if same or not system:
                new, changed = asked.messages[at:], system != node.system
                return Place(
                    kind="next", before=node, parent=node.parent, new=new, digests=digests, system_changed=changed and bool(system), **found
                )
        kind, parent, quotes = ("restart", node.parent, False) if node is not None else self._origin(asked)
        return Place(kind=kind, before=None, parent=parent, new=asked.messages, digests=digests, quotes=quotes, **found)

    def add(self, node: Node, *, calls: int) -> None:
        self._by_digest.setdefault(node.digest, []).append(node)
        self._by_answer[node.answer_id] = node
        self._by_call.update(dict.fromkeys(node.call_ids, node))
        self._last.pop(node.line.index, None)  # the newest stand at the end
        self._last[node.line.index] = node
        if calls:
            self._waiting[node] = set(range(calls))

    def knows(self, answer_id: str) -> bool:
        return answer_id in self._by_answer

    def answered(self, node: Node) -> None:
        """The conversation goes on after this turn: none of its calls is running any more, but for what they started to go on beside it."""
        if free := self._waiting.pop(node, None):
            self._answered[node] = free
            while len(self._answered) > MAX_CALLING:
                self._answered.pop(next(iter(self._answered)))

    def last(self, line: LiveTrajectory) -> Node | None:
        return self._last.get(line.index)

    def _longest(self, asked: Asked, digests: Sequence[bytes], start: Node | None) -> tuple[int, Node | None]:
        """The last message of the request that is a turn of ours in the conversation it was sampled in: its place, and the turn."""
        for at in range(len(asked.messages), 0, -1):
            one = asked.messages[at - 1]
            if one.message.role == "assistant" and (nodes := self._by_digest.get(digests[at])):
                same = [node for node in nodes if node.call_ids and node.call_ids == one.call_ids]
                return at, (same or nodes)[-1]
        return 0, start

    def _origin(self, asked: Asked) -> tuple[str, Parent | None, bool]:
        """Where a context comes from that is none of ours: a call that is running, or a completion that it holds; whether as words."""
        _, most, chars = MAX_SEARCHED
        texts = [one.message.content[:chars] for one in asked.messages if one.message.role != "assistant"][:most]
        if (called := self._calling(texts) or self._started(texts)) is not None:
            return "sub_agent", called, False
        if node := next((self._by_call[name] for one in reversed(asked.messages) for name in one.call_ids if name in self._by_call), None):
            return "restart", node.parent, False
        if (node := self._quoted(texts)) is not None:
            return "restart", node.parent, True
        if asked.tools and (called := self._calling(None)) is not None:
            return "sub_agent", called, False
        return "root", None, False

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

    def _started(self, texts: Sequence[str]) -> Parent | None:
        """A call that was answered at once, with no more than the name of a sub-agent, whose task is the whole of a message here."""
        whole = {text.strip() for text in texts}
        for node, free in reversed(self._answered.items()):
            calls = node.line.turns[node.turn].message.tool_calls
            for index in sorted(free):
                if whole & {word for word in _strings(calls[index].arguments)[:MAX_CALLING] if len(word) >= QUOTED // 2}:
                    free.discard(index)
                    return Parent(trajectory=node.line.index, turn=node.turn, call=index)
        return None

    def _quoted(self, texts: Sequence[str]) -> Node | None:
        """A turn whose words are quoted, of those the one with the longest context: it was summed up, or is told of."""
        newest = list(self._last.values())[-MAX_SEARCHED[0] :]
        for node in sorted(newest, key=lambda one: one.tokens, reverse=True):
            words = node.parsed.answer.strip()
            if len(words) >= QUOTED and any(words in text for text in texts):
                return node
        return None


def chain(messages: Iterable[Said], start: bytes = b"", call_ids: Sequence[str] = ()) -> tuple[bytes, ...]:
    """[n + 1] digests of the conversation up to each message, in the form that does not change on the way through a client.

    `start` and `call_ids` are those of the turn that the messages come after.
    """
    digests = [start]
    calls = {name: at for at, name in enumerate(call_ids)}  # of the last turn
    for one in messages:
        message = one.message
        if message.role == "assistant":
            digests.append(turn_digest(digests[-1], message.content, [(c.name, c.arguments) for c in message.tool_calls]))
            calls = {name: at for at, name in enumerate(one.call_ids)}
        else:
            head = f"{message.role}\0{calls.get(one.call_id, '')}\0{len(message.content)}\0"
            digests.append(_digest(digests[-1], head.encode(), message.content.encode("utf-8", "surrogatepass")))
    return tuple(digests)


def turn_digest(before: bytes, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> bytes:
    """Of a conversation that ends in a turn of the assistant."""
    _, words = split_reasoning(content)
    asked = json.dumps([(name, dict(arguments)) for name, arguments in calls], sort_keys=True)
    return _digest(before, b"assistant\0", words.strip().encode("utf-8", "surrogatepass"), b"\0", asked.encode())


def _digest(*parts: bytes) -> bytes:
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


def _lines(texts: Sequence[str]) -> tuple[frozenset[bytes], dict[bytes, int]]:
    lines = {line.strip() for text in texts for line in text.splitlines()} - {""}
    lengths = {_digest(line.encode("utf-8", "surrogatepass")): len(line) for line in lines}
    return frozenset(lengths), lengths


def _alike(node: Node, system: frozenset[bytes], lengths: Mapping[bytes, int]) -> bool:
    if system == node.system:
        return True
    common = sum(lengths[line] for line in system & node.system)
    return common >= SAME_SYSTEM * max(sum(lengths.values()), sum(node.lengths.values()))


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _tells_of(node: Node, text: str) -> bool:
    words = node.parsed.answer.strip()
    return any(name in text for name in node.call_ids) or (len(words) >= QUOTED // 2 and words in text)


def _told(call: ToolCall, texts: Sequence[str]) -> bool:
    """Whether one of the texts holds a text of the call's arguments: the task that a sub-agent is given."""
    words = [word for word in _strings(call.arguments) if len(word) >= QUOTED // 2]
    return any(word in text for word in words[:MAX_CALLING] for text in texts)


def _strings(value: Any) -> list[str]:
    """All texts in a call's arguments."""
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, Mapping):
        return [text for one in value.values() for text in _strings(one)]
    return [text for one in value for text in _strings(one)] if isinstance(value, list | tuple) else []
