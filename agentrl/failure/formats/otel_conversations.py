"""Builds one conversation per agent from model calls, each of which repeats the conversation so far.

A call whose input starts with a known conversation continues that conversation. Any other call starts a new conversation. Messages are
compared only by the parts that all emitters repeat, because some emitters omit the text of an answer with tool calls when they repeat the
answer.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from agentrl.failure.formats.conversations import build_trace, unique_label
from agentrl.failure.formats.files import SourceLocation
from agentrl.failure.formats.otlp import SpanKey
from agentrl.failure.formats.values import Gaps, build_message, build_origin
from agentrl.failure.trace import ImportedMessage, Trace

DEEPEST = 14
"""Maximum depth of nested agents. The messages of agents at deeper levels follow all other messages."""


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """A message and the hashes by which it is compared with other messages."""

    message: ImportedMessage
    repeat_hash: bytes  # hash of the parts that stay the same when a later call repeats the message
    full_hash: bytes

    @classmethod
    def of(cls, one: ImportedMessage) -> MessageEntry:
        """Returns a message with its hashes."""
        message = one.message
        calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
        repeated = [message.role, calls or message.content, one.call_ids, one.answers]
        return cls(one, _hash(repeated), _hash([repeated, message.content, one.reasoning]))


@dataclass(slots=True, kw_only=True)
class ModelCall:
    """One call to a model."""

    key: SpanKey
    number: int  # in reading order
    service: str
    location: SourceLocation
    parent: str = ""
    start: int = 0  # ns since 1970
    end: int = 0
    error: str = ""
    has_span: bool = False
    of_agent: bool = False  # read from the span of an agent, not of a single call
    model: str = ""
    conversation: str = ""
    agent_name: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    inputs: list[MessageEntry] = field(default_factory=list)
    outputs: list[MessageEntry] = field(default_factory=list)
    inputs_complete: bool = False  # whether attributes contain all inputs, so that events only repeat them
    outputs_complete: bool = False
    gaps: Gaps = field(default_factory=Gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpan:
    """The span of an agent."""

    key: SpanKey
    name: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpan:
    """The span of a tool call. `arguments` and `result` are None if they were not captured."""

    key: SpanKey
    name: str
    id: str
    arguments: Any
    result: str | None
    error: str  # error type; empty if the call did not fail
    start: int
    end: int


@dataclass(slots=True)
class DraftConversation:
    """A conversation under construction: messages, each with the time at which it first occurred."""

    entries: list[tuple[ImportedMessage, int]] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    label: str = ""
    before: dict[int, list[SpanKey]] = field(default_factory=dict)  # index of a result -> agents that produced it
    after: list[SpanKey] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class CallGroup:
    """Model calls that become one trace, or one trace per conversation if `lone` is true."""

    id: str
    lone: bool = False  # whether the calls have no surrounding spans, and may belong to many conversations
    calls: list[ModelCall] = field(default_factory=list)
    agents: dict[SpanKey, AgentSpan] = field(default_factory=dict)
    tools: dict[SpanKey, ToolSpan] = field(default_factory=dict)
    trace_ids: set[str] = field(default_factory=set)

    def split(self) -> list[CallGroup]:
        """Returns one group per conversation if `lone` is true, otherwise only this group."""
        if not self.lone:
            return [self]
        return [CallGroup(id=draft.calls[0].key[0], calls=draft.calls) for draft in join_calls(self.calls)]


def join_calls(calls: Iterable[ModelCall]) -> list[DraftConversation]:
    """Joins calls, which must be in chronological order, into conversations."""
    drafts: list[DraftConversation] = []
    ends: dict[bytes, DraftConversation] = {}  # hash of all messages of a conversation -> the conversation
    for call in calls:
        prefixes = [b""]
        for entry in call.inputs:
            prefixes.append(_chained_hash(prefixes[-1], entry))
        known = next((length for length in range(len(call.inputs), 0, -1) if prefixes[length] in ends), 0)
        draft = ends.pop(prefixes[known]) if known else DraftConversation()
        if not known:
            drafts.append(draft)
        draft.calls.append(call)
        draft.entries += [(entry.message, call.start) for entry in call.inputs[known:]]
        draft.entries += [(entry.message, call.end) for entry in call.outputs]
        end = prefixes[-1]
        for entry in call.outputs:
            end = _chained_hash(end, entry)
        if end:
            ends[end] = draft
    return drafts


def trace_of_calls(group: CallGroup, location: Mapping[str, str], parents: Mapping[SpanKey, str]) -> Trace:
    """Returns the trace of a group of model calls. Raises `ValueError` if no message in it has content."""
    gaps = Gaps()
    callers = _Callers(group, parents, gaps)
    calls_by_agent: dict[SpanKey | None, list[ModelCall]] = {}
    for call in group.calls:
        calls_by_agent.setdefault(call.key if call.of_agent else callers.at(call.key[0], call.parent)[0], []).append(call)
        _note_gaps(call, gaps)
    taken: dict[str, int] = {}
    drafts: dict[SpanKey | None, list[DraftConversation]] = {}
    for key, calls in calls_by_agent.items():
        drafts[key] = join_calls([call for call in calls if not call.of_agent] or calls)
        name = group.agents[key].name if key in group.agents else calls[0].agent_name
        for draft in drafts[key]:
            draft.label = unique_label(name or ("agent" if key is not None else ""), taken)
        if len(drafts[key]) > 1:
            gaps.add("how the conversations of one agent follow from one another", len(drafts[key]) - 1)
    _link_agents(group, drafts, callers, gaps)
    messages = list(_in_order(drafts))
    if not any(one.message.content for one, _ in messages):
        raise ValueError("contains no message text")
    first = group.calls[0]
    base = min((at for _, at in messages if at), default=0)
    started = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=base // 1000)).isoformat() if base else ""
    origin = build_origin(id=group.id, service=first.service, conversation=first.conversation, model=first.model, started=started)
    models = {f"model:{draft.label}": draft.calls[0].model for group in drafts.values() for draft in group if draft.label}
    timed = tuple(replace(one, at_s=(at - base) / 1e9 if at and base else None) for one, at in messages)
    tools = next((call.tools for call in group.calls if call.tools), ())
    return build_trace("otel", timed, {**location, **origin, **build_origin(**models)}, gaps, tools=[dict(tool) for tool in tools])


def _note_gaps(call: ModelCall, gaps: Gaps) -> None:
    gaps.merge_repeated(call.gaps)  # a call repeats the messages of earlier calls
    if not call.inputs:
        gaps.add("the prompt of a model call")
    if call.error:
        gaps.add(f"an answer of the model: the call failed, {call.error}")
    elif not call.outputs:
        gaps.add("an answer of the model")
    if not call.has_span:
        gaps.add("the span of a call: only log records of it exist")


class _Callers:
    """Finds the nearest agent span above a span, and the tool span of that agent that contains the span."""

    def __init__(self, group: CallGroup, parents: Mapping[SpanKey, str], gaps: Gaps) -> None:
        self._group, self._parents, self._gaps = group, parents, gaps
        self._known: dict[SpanKey, tuple[SpanKey | None, SpanKey | None]] = {}

    def above(self, key: SpanKey) -> tuple[SpanKey | None, SpanKey | None]:
        """Returns what `at` returns for the parent of a span."""
        return self.at(key[0], self._parents.get(key, ""))

    def at(self, trace_id: str, span: str) -> tuple[SpanKey | None, SpanKey | None]:
        """Returns the nearest agent span at or above a span, and that agent's tool span at or above the span; None if absent."""
        path: list[SpanKey] = []
        seen: set[SpanKey] = set()
        key = (trace_id, span)
        caller: tuple[SpanKey | None, SpanKey | None] = (None, None)
        while key[1]:
            if key in self._known:
                caller = self._known[key]
                break
            if key in seen or key not in self._parents:
                self._gaps.add("who called a span: parents form a cycle" if key in seen else "a span above others")
                break
            seen.add(key)
            path.append(key)
            if key in self._group.agents:
                break
            key = (trace_id, self._parents[key])
        for key in reversed(path):
            if key in self._group.agents:
                caller = (key, None)
            elif key in self._group.tools and caller[1] is None:
                caller = (caller[0], key)
            self._known[key] = caller
        return caller


@dataclass(slots=True)
class _Slot:
    """A tool call in a conversation, and the index of its result; None if the call has no result."""

    draft: DraftConversation
    id: str
    name: str
    arguments: Any
    answer: int | None = None
    used: bool = False


def _link_agents(group: CallGroup, drafts: Mapping[SpanKey | None, list[DraftConversation]], callers: _Callers, gaps: Gaps) -> None:
    """Assigns tool spans to tool calls, and inserts the conversations of agents below a tool span before the result of the span's call."""
    tools_by_agent: dict[SpanKey | None, list[ToolSpan]] = {}
    for tool in sorted(group.tools.values(), key=lambda tool: tool.start):
        tools_by_agent.setdefault(callers.above(tool.key)[0], []).append(tool)
    slots: dict[SpanKey, _Slot] = {}
    for agent, tools in tools_by_agent.items():
        matcher = _SlotMatcher(drafts.get(agent, []))
        for tool in tools:
            slot = matcher.match(tool)
            if slot is None:
                gaps.add("the call that a tool's span belongs to")
            else:
                slots[tool.key] = slot
                _add_result(slot, tool, gaps)
    for key in drafts:
        if key is None or key not in group.agents:
            continue
        caller, tool_key = callers.above(key)
        if caller == key or caller not in drafts:
            continue
        slot = slots.get(tool_key) if tool_key is not None else None
        if slot is not None and slot.answer is not None:
            slot.draft.before.setdefault(slot.answer, []).append(key)
        else:
            drafts[caller][-1].after.append(key)


def _add_result(slot: _Slot, tool: ToolSpan, gaps: Gaps) -> None:
    """Adds the result and the error in a tool span to the tool call that the span belongs to."""
    entries, failed = slot.draft.entries, bool(tool.error)
    if slot.answer is not None:
        one, at = entries[slot.answer]
        entries[slot.answer] = (replace(one, failed=one.failed or failed, error=one.error or tool.error), tool.end or at)
        return
    if tool.result is None:
        gaps.add("the result of a tool call")
        if not failed:
            return
    slot.answer = len(entries)
    result = build_message("tool", tool.result or "", answers=slot.id, failed=failed)
    entries.append((replace(result, error=tool.error), tool.end))


class _SlotMatcher:
    """Matches tool spans with the tool calls of one agent's conversations."""

    def __init__(self, drafts: Sequence[DraftConversation]) -> None:
        self._slots: dict[Any, deque[_Slot]] = {}
        for draft in drafts:
            for slot in _slots(draft):
                for key in (("id", slot.id), ("both", slot.name, _hash(slot.arguments)), ("name", slot.name)):
                    self._slots.setdefault(key, deque()).append(slot)

    def match(self, tool: ToolSpan) -> _Slot | None:
        """Returns the first unmatched tool call with the call id in the span.

        If the span contains no call id, returns the first unmatched call with the same tool name and arguments or, if there is none, with
        the same tool name. Returns None if no call matches.
        """
        keys: list[Any] = [("id", tool.id)] if tool.id else [("both", tool.name, _hash(tool.arguments)), ("name", tool.name)]
        for key in keys:
            waiting = self._slots.get(key, deque())
            while waiting:
                slot = waiting.popleft()
                if not slot.used:
                    slot.used = True
                    return slot
        return None


def _slots(draft: DraftConversation) -> list[_Slot]:
    slots: list[_Slot] = []
    by_id: dict[str, _Slot] = {}
    without_id: deque[_Slot] = deque()
    for index, (one, _) in enumerate(draft.entries):
        for number, call in enumerate(one.message.tool_calls):
            id = one.call_ids[number] if number < len(one.call_ids) else ""
            slot = _Slot(draft, id, call.name, dict(call.arguments))
            slots.append(slot)
            if id:
                by_id[id] = slot
            else:
                without_id.append(slot)
        if one.message.role == "tool":
            answered = by_id.get(one.answers) if one.answers else without_id.popleft() if without_id else None
            if answered is not None and answered.answer is None:
                answered.answer = index
    return slots


def _in_order(drafts: Mapping[SpanKey | None, list[DraftConversation]]) -> Iterator[tuple[ImportedMessage, int]]:
    """Yields (message, time in ns) for all messages.

    A sub-agent's messages precede the result that they produced. The conversations of agents without a caller are ordered by time.
    """
    called = {key for group in drafts.values() for draft in group for keys in (*draft.before.values(), draft.after) for key in keys}
    remaining = dict.fromkeys(drafts)

    def messages(key: SpanKey | None, depth: int) -> Iterator[tuple[ImportedMessage, int]]:
        if key not in remaining or depth > DEEPEST:
            return
        del remaining[key]
        for draft in drafts[key]:
            for index, (one, at) in enumerate(draft.entries):
                for child in draft.before.get(index, ()):
                    yield from messages(child, depth + 1)
                yield replace(one, agent=draft.label), at
            for child in draft.after:
                yield from messages(child, depth + 1)

    for key in [*(key for key in drafts if key not in called), *drafts]:  # at the end, agents that are in a cycle or nested too deeply
        yield from messages(key, 0)


def _chained_hash(before: bytes, entry: MessageEntry) -> bytes:
    return hashlib.sha256(before + entry.repeat_hash).digest()[:16]


def _hash(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:16]
