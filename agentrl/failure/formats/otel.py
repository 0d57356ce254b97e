"""OpenTelemetry's conventions for generative AI, all of them still in development: model calls as spans, agents and tools around them.

Reads three forms of https://github.com/open-telemetry/semantic-conventions, docs/gen-ai: the form up to v1.27 (all messages in one
attribute), the form up to v1.36 (an event for each message, on the span or as a log record), and the newer one (`gen_ai.input.messages` and
`gen_ai.output.messages` with their parts, on spans, events or the one log record of a call). `otel_numbered` reads the forms of other
conventions. Every call repeats the conversation before it;
`otel_lines` joins them into one conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats import openai, otel_indexed
from agentrl.failure.formats.files import Document, UnreadableDocument
from agentrl.failure.formats.otel_conversations import AgentSpan, MessageEntry, ModelCall, ToolSpan, TraceCalls, trace_of_calls
from agentrl.failure.formats.otlp import Event, Span, SpanKey, entries
from agentrl.failure.formats.values import (
    Gaps,
    as_objects,
    as_string,
    as_text,
    build_message,
    build_tool_call,
    decode_json,
    printable_label,
    tool_schemas,
    type_name,
)
from agentrl.failure.trace import ImportedMessage, Trace

MOST_SPANS = 250_000
"""Spans of all kinds in one reading, and log records."""
MOST_MESSAGES = 5_000_000
"""Messages of all calls together, each as often as a call repeats it."""
MOST_CHARS = 512 << 20
"""Characters of all that was said, each message once."""

DETAILS = "gen_ai.client.inference.operation.details"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_MESSAGE_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE = "gen_ai.choice"
_CALLS = ("chat", "generate_content", "text_completion")
_INPUT, _OUTPUT, _SYSTEM = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"
_PROMPT, _COMPLETION = "gen_ai.prompt", "gen_ai.completion"
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.response.model", "llm.request.model", "llm.model_name")
_CONVERSATION = ("gen_ai.conversation.id", "session.id")
_WHOLE = ("gen_ai.content.prompt", "gen_ai.content.completion")  # events with all messages, up to v1.27
_SPOKEN = (_INPUT, _OUTPUT, _PROMPT, _COMPLETION)
_STRUCTURED = ("message", "tool_calls", "index")  # which attributes can only hold as JSON text
_OF_A_MESSAGE = ("role", "content", "id", "tool_calls", "name", "index", "message", "finish_reason")


@dataclass(slots=True)
class SpanCollector:
    """The spans of one reading: those of a conversation may lie in several files, and its messages in others."""

    calls: dict[SpanKey, ModelCall] = field(default_factory=dict)
    agents: dict[SpanKey, AgentSpan] = field(default_factory=dict)
    runs: dict[SpanKey, ToolSpan] = field(default_factory=dict)
    parents: dict[SpanKey, str] = field(default_factory=dict)
    seen: dict[bytes, MessageEntry] = field(default_factory=dict)  # every message once
    heard: set[tuple[SpanKey, str, int, bytes]] = field(default_factory=set)  # records, which an exporter may send twice
    records: int = 0
    messages: int = 0
    chars: int = 0

    def add(self, document: Document) -> Iterator[UnreadableDocument]:
        """Takes an export in; what of it is no span or record is told. Raises `UserError` where it gets too much."""
        for one in entries(document):
            if isinstance(one, UnreadableDocument):
                yield one
                continue
            self.records += 1
            if self.records > MOST_SPANS:
                fix = "keep only spans of generative AI and those above them, or import the files one by one"
                raise UserError(f"{document.location.path} and what came before hold more than {MOST_SPANS} spans and records", fix=fix)
            try:
                if isinstance(one, Span):
                    self._span(one)
                else:
                    self._event(one)
            except UserError:
                raise
            except (ValueError, RecursionError) as error:
                what = "span" if isinstance(one, Span) else "record of span"
                yield one.place.error(error, where=f"{what} {printable_label(one.key[1])}", fix="export it again; other spans are read")

    def traces(self) -> Iterator[Trace | UnreadableDocument]:
        """What the spans tell, conversation by conversation, in the order of their beginning."""
        for unit in self._units():
            place = unit.calls[0].place
            where = f"trace {printable_label(unit.id)}"
            try:
                yield trace_of_calls(unit, {"file": place.name, **({"place": place.position} if place.position else {})}, self.parents)
            except (ValueError, RecursionError) as error:
                yield place.error(error, where=where, fix=f"let the emitter write messages ({CAPTURE}=true) and their spans")

    def _units(self) -> list[TraceCalls]:
        """What belongs together: by the conversation's id, else by the trace's. Lone calls of one service are told apart later."""
        counts: dict[str, int] = {}
        for key in (*self.calls, *self.agents, *self.runs):
            counts[key[0]] = counts.get(key[0], 0) + 1
        conversations = {key[0]: one.conversation for key, one in self.calls.items() if one.conversation}
        found: dict[tuple[str, str], TraceCalls] = {}
        for key, one in sorted(self.calls.items(), key=lambda item: (item[1].start, item[1].number)):
            conversation = conversations.get(key[0], "")
            lone = not conversation and counts[key[0]] == 1 and not one.parent
            name = ("calls of", one.service) if lone else ("conversation", conversation) if conversation else ("trace", key[0])
            unit = found.setdefault(name, TraceCalls(id=conversation or key[0], lone=lone))
            unit.calls.append(one)
            unit.trace_ids.add(key[0])
        by_trace = {trace_id: unit for unit in found.values() for trace_id in unit.trace_ids}
        for key, agent in self.agents.items():
            if key[0] in by_trace:
                by_trace[key[0]].agents[key] = agent
        for key, run in self.runs.items():
            if key[0] in by_trace:
                by_trace[key[0]].runs[key] = run
        return [part for unit in found.values() for part in unit.parts()]

    def _span(self, span: Span) -> None:
        if span.key in self.parents:
            if span.parent != self.parents[span.key]:
                raise ValueError("is there twice, with another parent; the first is kept")
            return
        self.parents[span.key] = span.parent
        attributes = span.attributes
        operation = attributes.get("gen_ai.operation.name")
        if operation == "execute_tool":
            self.runs[span.key] = _run(span)
        elif attributes.get("openinference.span.kind") == "TOOL":
            self.runs[span.key] = _run_of_openinference(span)
        elif operation in ("invoke_agent", "create_agent") or attributes.get("openinference.span.kind") == "AGENT":
            name = printable_label(attributes.get("gen_ai.agent.name") or attributes.get("agent.name"))
            self.agents[span.key] = AgentSpan(key=span.key, name=name, start=span.start)
        spoken_there = any(name in attributes for name in _SPOKEN) or otel_indexed.has_messages(attributes)
        if operation not in _CALLS and not spoken_there:
            return
        one = self._call(span)
        one.parent, one.start, one.end, one.error, one.has_span = span.parent, span.start, span.end, span.error, True
        one.of_agent = operation == "invoke_agent" or attributes.get("openinference.span.kind") == "AGENT"
        self._take(one, attributes)

    def _call(self, of: Span | Event) -> ModelCall:
        if of.key not in self.calls:
            self.calls[of.key] = ModelCall(key=of.key, number=len(self.calls), service=of.service, place=of.place)
        return self.calls[of.key]

    def _event(self, event: Event) -> None:
        if event.name in (DETAILS, *_WHOLE):
            one = self._call(event)
            told = {key: value for key, value in _fields(event).items() if key.startswith("gen_ai.")}
            self._take(one, told)
        elif event.name in _MESSAGE_EVENTS or event.name == _CHOICE:
            one = self._call(event)
            self._message_event(one, event)
        else:
            return
        if not one.has_span:
            one.start = min(filter(None, (one.start, event.at)), default=0)
            one.end = max(one.end, event.at)

    def _message_event(self, one: ModelCall, event: Event) -> None:
        """A message in the form up to v1.36: that of a chat completion, with the role in the event's name."""
        fields = ((key, value) for key, value in _fields(event).items() if not key.startswith("gen_ai."))
        body = {key: decode_json(value) if key in _STRUCTURED else value for key, value in fields}
        if event.name == _CHOICE:
            if body.get("index") not in (None, 0, "0"):
                one.gaps.add("choices besides the first")
                return
            told = body.get("message")
            if not isinstance(told, dict):
                told = {"content": told} if isinstance(told, str) else {key: body[key] for key in ("content", "tool_calls") if key in body}
            message, into, whole = {"role": "assistant", **told}, one.outputs, one.whole_outputs
        else:
            kept = {key: value for key, value in body.items() if key not in ("index", "message", "finish_reason")}
            message, into, whole = {"role": _MESSAGE_EVENTS[event.name], **kept}, one.inputs, one.whole_inputs
        if whole:  # attributes have the same messages
            return
        message["tool_call_id"] = message.pop("id", None) if message["role"] == "tool" else None
        entry = self._kept(openai.parse_message(message, event.name, one.gaps))
        again = (event.key, event.name, event.at, entry.full_hash)
        if not event.at or again not in self.heard:
            self.heard.add(again)
            into.append(entry)

    def _take(self, one: ModelCall, attributes: Mapping[str, Any]) -> None:
        """Takes over what the attributes of a call's span, or of its record, say."""
        one.model = one.model or _first_label(attributes, _MODEL)
        one.conversation = one.conversation or _first_label(attributes, _CONVERSATION)
        one.agent_name = one.agent_name or _first_label(attributes, ("gen_ai.agent.name", "agent.name"))
        if not one.inputs:
            told = [*_instructions(attributes.get(_SYSTEM), one.gaps), *_messages(attributes, _INPUT, one.gaps)]
            told = told or list(_plain(attributes, _PROMPT, "user", one.gaps))
            told = told or list(otel_indexed.messages(attributes, otel_indexed.PROMPTS, "user", one.gaps, _message))
            one.inputs, one.whole_inputs = [self._kept(message) for message in told], bool(told)
        if not one.outputs:
            said = list(_messages(attributes, _OUTPUT, one.gaps)) or list(_plain(attributes, _COMPLETION, "assistant", one.gaps))
            said = said or list(otel_indexed.messages(attributes, otel_indexed.COMPLETIONS, "assistant", one.gaps, _message))
            if len(said) > 1 and all(message.message.role == "assistant" for message in said):
                one.gaps.add("choices besides the first", len(said) - 1)
                said = said[:1]
            one.outputs, one.whole_outputs = [self._kept(message) for message in said], bool(said)
        if not one.tools and "gen_ai.tool.definitions" in attributes:
            one.tools = tool_schemas(decode_json(attributes["gen_ai.tool.definitions"]), one.gaps)
        elif not one.tools:
            one.tools = tool_schemas(otel_indexed.definitions(attributes, one.gaps), one.gaps)

    def _kept(self, message: ImportedMessage) -> MessageEntry:
        """The one entry of this message."""
        self.messages += 1
        entry = MessageEntry.of(message)
        if entry.full_hash not in self.seen:
            self.seen[entry.full_hash] = entry
            self.chars += len(message.message.content) + len(message.reasoning)
        if self.messages > MOST_MESSAGES or self.chars > MOST_CHARS:
            raise UserError("the spans hold more messages than can be read at once", fix="import the files one by one")
        return self.seen[entry.full_hash]


def _run(span: Span) -> ToolSpan:
    attributes = span.attributes
    arguments = attributes.get("gen_ai.tool.call.arguments")
    result = attributes.get("gen_ai.tool.call.result")
    return ToolSpan(
        key=span.key,
        name=printable_label(attributes.get("gen_ai.tool.name")),
        id=as_string(attributes.get("gen_ai.tool.call.id"), "gen_ai.tool.call.id"),
        arguments=None if arguments is None else decode_json(arguments),
        result=None if result is None else as_text(result, "gen_ai.tool.call.result"),
        failed=bool(span.error),
        error=span.error,
        start=span.start,
        end=span.end,
    )


def _run_of_openinference(span: Span) -> ToolSpan:
    attributes = span.attributes
    arguments = decode_json(attributes.get("tool.parameters", attributes.get("input.value")))
    result = attributes.get("output.value")
    return ToolSpan(
        key=span.key,
        name=printable_label(attributes.get("tool.name")),
        id=as_string(attributes.get("tool_call.id"), "tool_call.id"),
        arguments=arguments if isinstance(arguments, dict) else None,
        result=None if result is None else as_text(result, "output.value"),
        failed=bool(span.error),
        error=span.error,
        start=span.start,
        end=span.end,
    )


def _first_label(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of some attributes that is set."""
    return printable_label(next((attributes[key] for key in keys if attributes.get(key)), None))


def _fields(event: Event) -> dict[str, Any]:
    """The content of an event, from its body, its attributes, or the attribute that holds all of it as JSON."""
    found: dict[str, Any] = {}
    for told in (event.body, event.attributes.get("gen_ai.event.content")):
        value = decode_json(told)
        found |= value if isinstance(value, dict) else {"content": told} if isinstance(told, str) else {}
    return found | {key: value for key, value in event.attributes.items() if key in _OF_A_MESSAGE or key.startswith("gen_ai.")}


def _plain(attributes: Mapping[str, Any], name: str, role: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """The messages of an attribute up to v1.27: chat messages as JSON, or plain text."""
    value = decode_json(attributes.get(name))
    if isinstance(value, str):
        yield build_message(role, value)
        return
    for number, item in enumerate(as_objects([value] if isinstance(value, dict) else value, name)):
        yield openai.parse_message({"role": role, **item}, f"{name}[{number}]", gaps)


def _messages(attributes: Mapping[str, Any], name: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """The messages of an attribute, JSON text or structured. One that was cut off by the emitter is a gap, not an error."""
    value = decode_json(attributes.get(name))
    if isinstance(value, str):
        gaps.add(f"{name} of a call: it is no JSON, perhaps cut by the emitter's limit")
        return
    for number, item in enumerate(as_objects(value, name)):
        yield from _message(item, f"{name}[{number}]", gaps)


def _message(item: Mapping[str, Any], what: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """A message in parts. Answers of tools are messages of their own, whatever message they came in."""
    if "parts" not in item:
        yield openai.parse_message(item, what, gaps)
        return
    role = as_string(item.get("role"), f"{what}.role")
    texts: list[str] = []
    thoughts: list[str] = []
    calls, ids, answers = [], [], []
    for number, part in enumerate(as_objects(item["parts"], f"{what}.parts")):
        sort, at = part.get("type"), f"{what}.parts[{number}]"
        if sort == "text":
            texts.append(as_string(part.get("content"), at))
        elif sort == "reasoning":
            thoughts.append(as_string(part.get("content"), at))
        elif sort == "tool_call":
            calls.append(build_tool_call(part.get("name"), part.get("arguments"), at, gaps))
            ids.append(as_string(part.get("id"), f"{at}.id"))
        elif sort == "tool_call_response":
            result = part.get("response", part.get("result"))
            answers.append(
                build_message("tool", as_text("" if result is None else result, at), answers=as_string(part.get("id"), f"{at}.id"))
            )
        else:
            gaps.add(f"parts of type {printable_label(sort) or 'unknown'}: only text, reasoning and tools are kept")
    if texts or calls or thoughts or not answers:
        yield build_message(role, "\n".join(texts), calls=calls, call_ids=ids, reasoning="\n".join(thoughts))
    yield from answers


def _instructions(value: Any, gaps: Gaps) -> Sequence[ImportedMessage]:
    """`gen_ai.system_instructions`, which are apart from the messages."""
    parts = decode_json(value)
    if parts is None:
        return ()
    if isinstance(parts, str):
        return (build_message("system", parts),)
    if not isinstance(parts, list):
        raise ValueError(f"{_SYSTEM} is {type_name(parts)}, not a list")
    return tuple(_message({"role": "system", "parts": parts}, _SYSTEM, gaps))
