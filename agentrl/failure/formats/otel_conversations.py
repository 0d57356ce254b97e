"""One conversation for each agent from model calls that each repeat the conversation before them.

A call whose input begins with all that is known of a conversation goes on with it; any other begins a new one. Messages are compared by
what emitters repeat faithfully: some leave out the text of an answer that calls tools when they tell it again.
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
"""Levels of agents that are told inside one another; deeper ones are told after the others."""


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """A message, with hashes of what it is."""

    spoken: ImportedMessage
    repeat_hash: bytes  # what stays the same when a later call repeats it
    full_hash: bytes

    @classmethod
    def of(cls, one: ImportedMessage) -> MessageEntry:
        told = one.message
        calls = [[made.name, dict(made.arguments)] for made in told.tool_calls]
        same = [told.role, calls or told.content, one.call_ids, one.answers]
        return cls(one, _hash(same), _hash([same, told.content, one.reasoning]))


@dataclass(slots=True, kw_only=True)
class ModelCall:
    """One call of a model."""

    key: SpanKey
    number: int  # in the order of reading
    service: str
    place: SourceLocation
    parent: str = ""
    start: int = 0  # ns since 1970
    end: int = 0
    error: str = ""
    has_span: bool = False
    of_agent: bool = False  # told by the span of a whole agent
    model: str = ""
    conversation: str = ""
    agent_name: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    inputs: list[MessageEntry] = field(default_factory=list)
    outputs: list[MessageEntry] = field(default_factory=list)
    whole_inputs: bool = False  # attributes have all of them, so events repeat them
    whole_outputs: bool = False
    gaps: Gaps = field(default_factory=Gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpan:
    """The span of an agent at work."""

    key: SpanKey
    name: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpan:
    """The span of a tool at work. `arguments` and `result` are None where they were not told."""

    key: SpanKey
    name: str
    id: str
    arguments: Any
    result: str | None
    failed: bool
    error: str  # its type; empty where it did not fail
    start: int
    end: int


@dataclass(slots=True)
class DraftConversation:
    """One conversation as far as it is put together: messages with the time they were first told at."""

    entries: list[tuple[ImportedMessage, int]] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    label: str = ""
    before: dict[int, list[SpanKey]] = field(default_factory=dict)  # place of an answer -> agents whose work it came of
    after: list[SpanKey] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TraceCalls:
    """Calls that become one trace."""

    id: str
    lone: bool = False  # calls without anything around them, perhaps of many conversations
    calls: list[ModelCall] = field(default_factory=list)
    agents: dict[SpanKey, AgentSpan] = field(default_factory=dict)
    runs: dict[SpanKey, ToolSpan] = field(default_factory=dict)
    trace_ids: set[str] = field(default_factory=set)

    def parts(self) -> list[TraceCalls]:
        """Lone calls told apart by conversation; any other unit is one."""
        if not self.lone:
            return [self]
        return [TraceCalls(id=draft.calls[0].key[0], calls=draft.calls) for draft in join_calls(self.calls)]


def join_calls(calls: Iterable[ModelCall]) -> list[DraftConversation]:
    """The conversations of calls in the order of time."""
    drafts: list[DraftConversation] = []
    ends: dict[bytes, DraftConversation] = {}  # hash of all that is known of a conversation -> it
    for call in calls:
        prefixes = [b""]
        for entry in call.inputs:
            prefixes.append(_next(prefixes[-1], entry))
        known = next((length for length in range(len(call.inputs), 0, -1) if prefixes[length] in ends), 0)
        draft = ends.pop(prefixes[known]) if known else DraftConversation()
        if not known:
            drafts.append(draft)
        draft.calls.append(call)
        draft.entries += [(entry.spoken, call.start) for entry in call.inputs[known:]]
        draft.entries += [(entry.spoken, call.end) for entry in call.outputs]
        end = prefixes[-1]
        for entry in call.outputs:
            end = _next(end, entry)
        if end:
            ends[end] = draft
    return drafts


def trace_of_calls(unit: TraceCalls, where: Mapping[str, str], parents: Mapping[SpanKey, str]) -> Trace:
    """The trace of a unit. Raises `ValueError` where nothing of what was said was told."""
    gaps = Gaps()
    above = _Above(unit, parents, gaps)
    work: dict[SpanKey | None, list[ModelCall]] = {}
    for call in unit.calls:
        work.setdefault(call.key if call.of_agent else above.at(call.key[0], call.parent)[0], []).append(call)
        _note(call, gaps)
    taken: dict[str, int] = {}
    drafts: dict[SpanKey | None, list[DraftConversation]] = {}
    for key, calls in work.items():
        inner = [call for call in calls if not call.of_agent]
        drafts[key] = join_calls(inner or calls)
        name = unit.agents[key].name if key in unit.agents else calls[0].agent_name
        for draft in drafts[key]:
            draft.label = unique_label(name or ("agent" if key is not None else ""), taken)
        if len(drafts[key]) > 1:
            gaps.add("how the conversations of one agent follow from one another", len(drafts[key]) - 1)
    _hang_together(unit, drafts, above, gaps)
    said = list(_told(drafts))
    if not any(one.message.content for one, _ in said):
        raise ValueError("tells no contents of messages")
    first = unit.calls[0]
    base = min((at for _, at in said if at), default=0)
    known = build_origin(id=unit.id, service=first.service, conversation=first.conversation, model=first.model, started=_iso(base))
    models = {f"model:{draft.label}": draft.calls[0].model for some in drafts.values() for draft in some if draft.label}
    timed = tuple(replace(one, at_s=(at - base) / 1e9 if at and base else None) for one, at in said)
    offered = next((call.tools for call in unit.calls if call.tools), ())
    return build_trace("otel", timed, {**where, **known, **build_origin(**models)}, gaps, tools=[dict(tool) for tool in offered])


def _note(call: ModelCall, gaps: Gaps) -> None:
    """What a call does not tell."""
    gaps.same_as(call.gaps)  # a call repeats the messages of those before it
    if not call.inputs:
        gaps.add("what a call of the model was asked")
    if call.error:
        gaps.add(f"an answer of the model: the call failed, {call.error}")
    elif not call.outputs:
        gaps.add("an answer of the model")
    if not call.has_span:
        gaps.add("the span of a call: only records of it are there")


class _Above:
    """What stands above a span: the nearest agent, and the tool that this agent had called there."""

    def __init__(self, unit: TraceCalls, parents: Mapping[SpanKey, str], gaps: Gaps) -> None:
        self._unit, self._parents, self._gaps = unit, parents, gaps
        self._known: dict[SpanKey, tuple[SpanKey | None, SpanKey | None]] = {}

    def caller(self, key: SpanKey) -> tuple[SpanKey | None, SpanKey | None]:
        """(agent, tool) above a span; the tool is the one that this agent called."""
        return self.at(key[0], self._parents.get(key, ""))

    def at(self, trace_id: str, span: str) -> tuple[SpanKey | None, SpanKey | None]:
        """The same at or above a span."""
        path: list[SpanKey] = []
        met: set[SpanKey] = set()
        key = (trace_id, span)
        found: tuple[SpanKey | None, SpanKey | None] = (None, None)
        while key[1]:
            if key in self._known:
                found = self._known[key]
                break
            if key in met or key not in self._parents:
                self._gaps.add("who called a span: parents form a cycle" if key in met else "a span above others")
                break
            met.add(key)
            path.append(key)
            if key in self._unit.agents:
                break
            key = (trace_id, self._parents[key])
        for one in reversed(path):
            if one in self._unit.agents:
                found = (one, None)
            elif one in self._unit.runs and found[1] is None:
                found = (found[0], one)
            self._known[one] = found
        return found


@dataclass(slots=True)
class _Slot:
    """A tool call in a conversation, and where its answer stands."""

    draft: DraftConversation
    id: str
    name: str
    arguments: Any
    answer: int | None = None
    used: bool = False


def _hang_together(unit: TraceCalls, drafts: Mapping[SpanKey | None, list[DraftConversation]], above: _Above, gaps: Gaps) -> None:
    """Finds the call of each tool's span, and puts the agents that worked for it before its answer."""
    runs: dict[SpanKey | None, list[ToolSpan]] = {}
    for run in sorted(unit.runs.values(), key=lambda run: run.start):
        runs.setdefault(above.caller(run.key)[0], []).append(run)
    slots: dict[SpanKey, _Slot] = {}
    for key, some in runs.items():
        finder = _Finder(drafts.get(key, []))
        for run in some:
            slot = finder.find(run)
            if slot is None:
                gaps.add("the call that a tool's span is of")
            else:
                slots[run.key] = slot
                _answered(slot, run, gaps)
    for key in drafts:
        if key is None or key not in unit.agents:
            continue
        caller, tool = above.caller(key)
        if caller == key or caller not in drafts:
            continue
        slot = slots.get(tool) if tool is not None else None
        if slot is not None and slot.answer is not None:
            slot.draft.before.setdefault(slot.answer, []).append(key)
        else:
            drafts[caller][-1].after.append(key)


def _answered(slot: _Slot, run: ToolSpan, gaps: Gaps) -> None:
    """Takes over what a tool's span says of its call's answer."""
    entries = slot.draft.entries
    if slot.answer is not None:
        one, at = entries[slot.answer]
        entries[slot.answer] = (replace(one, failed=one.failed or run.failed, error=one.error or run.error), run.end or at)
    elif run.result is not None:
        slot.answer = len(entries)
        entries.append((replace(build_message("tool", run.result, answers=slot.id, failed=run.failed), error=run.error), run.end))
    else:
        gaps.add("the answer of a tool call")
        if run.failed:  # that it failed is known, and of what
            slot.answer = len(entries)
            entries.append((replace(build_message("tool", "", answers=slot.id, failed=True), error=run.error), run.end))


class _Finder:
    """The calls of one agent's conversations, by what a tool's span may say of them."""

    def __init__(self, drafts: Sequence[DraftConversation]) -> None:
        self._by: dict[Any, deque[_Slot]] = {}
        for draft in drafts:
            for slot in _slots(draft):
                for name in (("id", slot.id), ("both", slot.name, _hash(slot.arguments)), ("name", slot.name)):
                    self._by.setdefault(name, deque()).append(slot)

    def find(self, run: ToolSpan) -> _Slot | None:
        """The first call not found before that the span can be of: by its id, else by name and arguments, else by name."""
        names: list[Any] = [("id", run.id)] if run.id else [("both", run.name, _hash(run.arguments)), ("name", run.name)]
        for name in names:
            waiting = self._by.get(name, deque())
            while waiting:
                slot = waiting.popleft()
                if not slot.used:
                    slot.used = True
                    return slot
        return None


def _slots(draft: DraftConversation) -> list[_Slot]:
    made: list[_Slot] = []
    by_id: dict[str, _Slot] = {}
    unnamed: deque[_Slot] = deque()
    for place, (one, _) in enumerate(draft.entries):
        for number, call in enumerate(one.message.tool_calls):
            id = one.call_ids[number] if number < len(one.call_ids) else ""
            slot = _Slot(draft, id, call.name, dict(call.arguments))
            made.append(slot)
            if id:
                by_id[id] = slot
            else:
                unnamed.append(slot)
        if one.message.role == "tool":
            answered = by_id.get(one.answers) if one.answers else unnamed.popleft() if unnamed else None
            if answered is not None and answered.answer is None:
                answered.answer = place
    return made


def _told(drafts: Mapping[SpanKey | None, list[DraftConversation]]) -> Iterator[tuple[ImportedMessage, int]]:
    """All that was said, each agent's words before the answer that came of them; who nobody called in the order of time."""
    inside = {key for some in drafts.values() for draft in some for keys in (*draft.before.values(), draft.after) for key in keys}
    left = dict.fromkeys(drafts)
    order = [key for key in drafts if key not in inside]

    def tell(key: SpanKey | None, depth: int) -> Iterator[tuple[ImportedMessage, int]]:
        if key not in left or depth > DEEPEST:
            return
        del left[key]
        for draft in drafts[key]:
            for place, (one, at) in enumerate(draft.entries):
                for inner in draft.before.get(place, ()):
                    yield from tell(inner, depth + 1)
                yield replace(one, agent=draft.label), at
            for inner in draft.after:
                yield from tell(inner, depth + 1)

    for key in order:
        yield from tell(key, 0)
    for key in drafts:  # those that are left: agents that call each other in a circle, or deeper than is told
        yield from tell(key, 0)


def _iso(at: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at // 1000)).isoformat() if at else ""


def _next(before: bytes, entry: MessageEntry) -> bytes:
    return hashlib.sha256(before + entry.repeat_hash).digest()[:16]


def _hash(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:16]
