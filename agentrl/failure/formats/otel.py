"""Reads OpenTelemetry spans for generative AI (conventions in development): model calls, and the agents and tools around them.

Reads three forms that are defined in https://github.com/open-telemetry/semantic-conventions, docs/gen-ai: the form up to v1.27 (all
messages in one attribute), the form up to v1.36 (an event for each message, on the span or as a log record), and the newer form
(`gen_ai.input.messages` and `gen_ai.output.messages` with their parts, on spans, on events, or on the single log record of a call).

Exporters that lack structured values write indexed attributes: `gen_ai.prompt.0.role` in OpenLLMetry (formerly `llm.prompts.0.content`;
https://github.com/traceloop/openllmetry, packages/opentelemetry-semantic-conventions-ai), `llm.input_messages.0.message.role` in
OpenInference (https://github.com/Arize-ai/openinference, spec/semantic_conventions.md). Indices become dictionary keys, so a large index
needs no additional memory.

Each call repeats the conversation so far. `otel_conversations` joins the calls into conversations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats import openai, values
from agentrl.failure.formats.files import Document, UnreadableDocument
from agentrl.failure.formats.otel_conversations import AgentSpan, CallGroup, MessageEntry, ModelCall, ToolSpan, trace_of_calls
from agentrl.failure.formats.otlp import Event, Span, SpanKey, entries
from agentrl.failure.formats.values import (
    Gaps,
    as_objects,
    as_string,
    as_text,
    build_message,
    decode_json,
    object_or_empty,
    parse_role,
    printable_label,
)
from agentrl.failure.trace import ImportedMessage, Trace

MOST_SPANS = 250_000
"""Maximum number of spans and log records that are read together."""
MOST_MESSAGES = 5_000_000
"""Maximum total number of messages in all calls. A message that several calls repeat counts once for each call."""
MOST_CHARS = 512 << 20
"""Maximum total number of characters in all distinct messages."""

DETAILS = "gen_ai.client.inference.operation.details"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_MESSAGE_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE = "gen_ai.choice"
_CALLS = ("chat", "generate_content", "text_completion")
_INPUT, _OUTPUT, _SYSTEM = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"
_PROMPT, _COMPLETION = "gen_ai.prompt", "gen_ai.completion"
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.response.model", "llm.request.model", "llm.model_name")
_CONVERSATION = ("gen_ai.conversation.id", "session.id")
_AGENT_NAME = ("gen_ai.agent.name", "agent.name")
_WHOLE_EVENTS = ("gen_ai.content.prompt", "gen_ai.content.completion")  # events that contain all messages, up to v1.27
# Attributes of a tool's span: the tool's name, the call's id, and the arguments and result of the call.
_TOOL_ATTRIBUTES = ("gen_ai.tool.name", "gen_ai.tool.call.id", ("gen_ai.tool.call.arguments",), "gen_ai.tool.call.result")
_OPENINFERENCE_TOOL_ATTRIBUTES = ("tool.name", "tool_call.id", ("tool.parameters", "input.value"), "output.value")
_DEFINITIONS = "gen_ai.tool.definitions"
_MESSAGE_ATTRIBUTES = (_INPUT, _OUTPUT, _PROMPT, _COMPLETION)
_STRUCTURED = ("message", "tool_calls", "index")  # fields that attributes can hold only as JSON text
_MESSAGE_FIELDS = ("role", "content", "id", "tool_calls", "name", "index", "message", "finish_reason")
_PROMPT_LISTS = ("gen_ai.prompt", "gen_ai.input.messages", "llm.input_messages", "llm.prompts")
_COMPLETION_LISTS = ("gen_ai.completion", "gen_ai.output.messages", "llm.output_messages", "llm.completions")
_TOOL_LISTS = ("llm.tools", "llm.request.functions", "gen_ai.tool.definitions")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_MAX_DEPTH = 8  # maximum number of names in a key after the index
_IGNORED_KEYS = ("finish_reason", "refusal_reason", "index")
_ROLES = ("system", "user", "assistant")
_EXTRA_CHOICES = "choices other than the first"


@dataclass(slots=True)
class SpanCollector:
    """Collects the spans from all files that are read together, because a conversation may be spread over several files."""

    calls: dict[SpanKey, ModelCall] = field(default_factory=dict)
    agents: dict[SpanKey, AgentSpan] = field(default_factory=dict)
    tools: dict[SpanKey, ToolSpan] = field(default_factory=dict)
    parents: dict[SpanKey, str] = field(default_factory=dict)
    distinct: dict[bytes, MessageEntry] = field(default_factory=dict)
    events: set[tuple[SpanKey, str, int, bytes]] = field(default_factory=set)  # an exporter may send a record twice
    records: int = 0
    messages: int = 0
    chars: int = 0

    def add(self, document: Document) -> Iterator[UnreadableDocument]:
        """Adds the spans and events of an export, and yields the unreadable entries.

        Raises `UserError` if there are too many spans or messages.
        """
        for entry in entries(document):
            if isinstance(entry, UnreadableDocument):
                yield entry
                continue
            self.records += 1
            if self.records > MOST_SPANS:
                fix = "keep only spans of generative AI and their ancestors, or import the files one by one"
                raise UserError(f"{document.location.path} and earlier files contain more than {MOST_SPANS} spans and records", fix=fix)
            try:
                if isinstance(entry, Span):
                    self._add_span(entry)
                else:
                    self._add_event(entry)
            except UserError:
                raise
            except (ValueError, RecursionError) as error:
                position = f"{'span' if isinstance(entry, Span) else 'record of span'} {printable_label(entry.key[1])}"
                yield entry.location.unreadable(error, position=position, fix="export it again; other spans are read")

    def traces(self) -> Iterator[Trace | UnreadableDocument]:
        """Yields one trace per conversation, in order of start time.

        For a conversation that cannot be converted, yields an `UnreadableDocument`.
        """
        for group in self._groups():
            location = group.calls[0].location
            try:
                yield trace_of_calls(group, location.origin, self.parents)
            except (ValueError, RecursionError) as error:
                fix = f"configure the emitter to write messages ({CAPTURE}=true) and their spans"
                yield location.unreadable(error, position=f"trace {printable_label(group.id)}", fix=fix)

    def _groups(self) -> list[CallGroup]:
        """Groups model calls by conversation id or, if there is none, by trace id.

        Calls without surrounding spans are grouped by their messages.
        """
        spans = Counter(key[0] for key in (*self.calls, *self.agents, *self.tools))
        conversations = {key[0]: call.conversation for key, call in self.calls.items() if call.conversation}
        groups: dict[tuple[str, str], CallGroup] = {}
        for key, call in sorted(self.calls.items(), key=lambda item: (item[1].start, item[1].number)):
            conversation = conversations.get(key[0], "")
            lone = not conversation and spans[key[0]] == 1 and not call.parent
            name = ("calls of", call.service) if lone else ("conversation", conversation) if conversation else ("trace", key[0])
            group = groups.setdefault(name, CallGroup(id=conversation or key[0], lone=lone))
            group.calls.append(call)
            group.trace_ids.add(key[0])
        by_trace = {trace_id: group for group in groups.values() for trace_id in group.trace_ids}
        for key, agent in self.agents.items():
            if key[0] in by_trace:
                by_trace[key[0]].agents[key] = agent
        for key, tool in self.tools.items():
            if key[0] in by_trace:
                by_trace[key[0]].tools[key] = tool
        return [part for group in groups.values() for part in group.split()]

    def _add_span(self, span: Span) -> None:
        if span.key in self.parents:
            if span.parent != self.parents[span.key]:
                raise ValueError("occurs twice with different parents; the first is used")
            return
        self.parents[span.key] = span.parent
        attributes = span.attributes
        operation, kind = attributes.get("gen_ai.operation.name"), attributes.get("openinference.span.kind")
        if operation == "execute_tool":
            self.tools[span.key] = _tool_span(span, *_TOOL_ATTRIBUTES)
        elif kind == "TOOL":
            self.tools[span.key] = _tool_span(span, *_OPENINFERENCE_TOOL_ATTRIBUTES)
        elif operation in ("invoke_agent", "create_agent") or kind == "AGENT":
            self.agents[span.key] = AgentSpan(key=span.key, name=_first_label(attributes, _AGENT_NAME), start=span.start)
        has_messages = any(name in attributes for name in _MESSAGE_ATTRIBUTES) or _has_indexed_messages(attributes)
        if operation in _CALLS or has_messages:
            call = self._call(span)
            call.parent, call.start, call.end, call.error, call.has_span = span.parent, span.start, span.end, span.error, True
            call.of_agent = operation == "invoke_agent" or kind == "AGENT"
            self._add_attributes(call, attributes)

    def _call(self, of: Span | Event) -> ModelCall:
        if of.key not in self.calls:
            self.calls[of.key] = ModelCall(key=of.key, number=len(self.calls), service=of.service, location=of.location)
        return self.calls[of.key]

    def _add_event(self, event: Event) -> None:
        if event.name in (DETAILS, *_WHOLE_EVENTS):
            call = self._call(event)
            self._add_attributes(call, {key: value for key, value in _fields(event).items() if key.startswith("gen_ai.")})
        elif event.name in _MESSAGE_EVENTS or event.name == _CHOICE:
            call = self._call(event)
            self._add_message_event(call, event)
        else:
            return
        if not call.has_span:
            call.start = min(filter(None, (call.start, event.at)), default=0)
            call.end = max(call.end, event.at)

    def _add_message_event(self, call: ModelCall, event: Event) -> None:
        """Adds a message from an event in the form up to v1.36: a chat completion message whose role is in the name of the event."""
        fields = ((key, value) for key, value in _fields(event).items() if not key.startswith("gen_ai."))
        body = {key: decode_json(value) if key in _STRUCTURED else value for key, value in fields}
        if event.name == _CHOICE:
            if body.get("index") not in (None, 0, "0"):
                call.gaps.add(_EXTRA_CHOICES)
                return
            choice = body.get("message")
            if isinstance(choice, str):
                choice = {"content": choice}
            elif not isinstance(choice, dict):
                choice = {key: body[key] for key in ("content", "tool_calls") if key in body}
            message, into, complete = {"role": "assistant", **choice}, call.outputs, call.outputs_complete
        else:
            fields_of_message = {key: value for key, value in body.items() if key not in ("index", "message", "finish_reason")}
            message, into, complete = {"role": _MESSAGE_EVENTS[event.name], **fields_of_message}, call.inputs, call.inputs_complete
        if complete:
            return
        message["tool_call_id"] = message.pop("id", None) if message["role"] == "tool" else None
        entry = self._entry(openai.parse_message(message, event.name, call.gaps))
        key = (event.key, event.name, event.at, entry.full_hash)
        if not event.at or key not in self.events:
            self.events.add(key)
            into.append(entry)

    def _add_attributes(self, call: ModelCall, attributes: Mapping[str, Any]) -> None:
        """Adds the attributes of a call's span or log record to the call."""
        call.model = call.model or _first_label(attributes, _MODEL)
        call.conversation = call.conversation or _first_label(attributes, _CONVERSATION)
        call.agent_name = call.agent_name or _first_label(attributes, _AGENT_NAME)
        if not call.inputs:
            inputs = [*_instructions(attributes.get(_SYSTEM), call.gaps), *_messages(attributes, _INPUT, call.gaps)]
            inputs = inputs or list(_plain_messages(attributes, _PROMPT, "user", call.gaps))
            inputs = inputs or list(_indexed_messages(attributes, _PROMPT_LISTS, "user", call.gaps))
            call.inputs, call.inputs_complete = [self._entry(message) for message in inputs], bool(inputs)
        if not call.outputs:
            outputs = list(_messages(attributes, _OUTPUT, call.gaps))
            outputs = outputs or list(_plain_messages(attributes, _COMPLETION, "assistant", call.gaps))
            outputs = outputs or list(_indexed_messages(attributes, _COMPLETION_LISTS, "assistant", call.gaps))
            if len(outputs) > 1 and all(message.message.role == "assistant" for message in outputs):
                call.gaps.add(_EXTRA_CHOICES, len(outputs) - 1)
                outputs = outputs[:1]
            call.outputs, call.outputs_complete = [self._entry(message) for message in outputs], bool(outputs)
        if not call.tools:
            structured = _DEFINITIONS in attributes
            tools = decode_json(attributes[_DEFINITIONS]) if structured else _indexed_definitions(attributes, call.gaps)
            call.tools = values.tool_schemas(tools, call.gaps)

    def _entry(self, message: ImportedMessage) -> MessageEntry:
        """Returns the entry shared by all messages that are equal to this one. Raises `UserError` if there are too many messages."""
        self.messages += 1
        entry = MessageEntry.of(message)
        if entry.full_hash not in self.distinct:
            self.distinct[entry.full_hash] = entry
            self.chars += len(message.message.content) + len(message.reasoning)
        if self.messages > MOST_MESSAGES or self.chars > MOST_CHARS:
            raise UserError("the spans contain more messages than can be read at once", fix="import the files one by one")
        return self.distinct[entry.full_hash]


def _tool_span(span: Span, name: str, id: str, arguments: Sequence[str], result: str) -> ToolSpan:
    """Returns the tool call that a span describes. `name`, `id`, `arguments` and `result` are names of attributes of the span."""
    attributes = span.attributes
    arguments_json = decode_json(next((attributes[key] for key in arguments if key in attributes), None))
    return ToolSpan(
        key=span.key,
        name=printable_label(attributes.get(name)),
        id=as_string(attributes.get(id), id),
        arguments=arguments_json if isinstance(arguments_json, dict) else None,
        result=None if attributes.get(result) is None else as_text(attributes[result], result),
        error=span.error,
        start=span.start,
        end=span.end,
    )


def _first_label(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Returns the value of the first attribute in `keys` that is set, as a printable label; empty if none is set."""
    return printable_label(next((attributes[key] for key in keys if attributes.get(key)), None))


def _fields(event: Event) -> dict[str, Any]:
    """Returns the fields of an event, merged from its body, the JSON in its attribute `gen_ai.event.content`, and its other attributes."""
    fields: dict[str, Any] = {}
    for content in (event.body, event.attributes.get("gen_ai.event.content")):
        value = decode_json(content)
        fields |= value if isinstance(value, dict) else {"content": content} if isinstance(content, str) else {}
    return fields | {key: value for key, value in event.attributes.items() if key in _MESSAGE_FIELDS or key.startswith("gen_ai.")}


def _plain_messages(attributes: Mapping[str, Any], name: str, role: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """Yields the messages in an attribute of the conventions up to v1.27, which contains chat messages as JSON, or plain text."""
    value = decode_json(attributes.get(name))
    if isinstance(value, str):
        yield build_message(role, value)
        return
    for number, item in enumerate(as_objects([value] if isinstance(value, dict) else value, name)):
        yield openai.parse_message({"role": role, **item}, f"{name}[{number}]", gaps)


def _messages(attributes: Mapping[str, Any], name: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """Yields the messages in an attribute, which contains a structured list or its JSON text.

    Text that is not JSON is recorded as a gap, not an error.
    """
    value = decode_json(attributes.get(name))
    if isinstance(value, str):
        gaps.add(f"{name} of a call: it is not JSON, perhaps cut by the emitter's limit")
        return
    for number, item in enumerate(as_objects(value, name)):
        yield from _message(item, f"{name}[{number}]", gaps)


def _message(item: Mapping[str, Any], what: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """Yields the messages in one item of a message list.

    If the item has parts, each tool result among the parts becomes a separate message.
    """
    if "parts" not in item:
        yield openai.parse_message(item, what, gaps)
        return
    role = parse_role(item.get("role"), f"{what}.role")
    texts: list[str] = []
    reasoning: list[str] = []
    calls, ids, results = [], [], []
    for number, part in enumerate(as_objects(item["parts"], f"{what}.parts")):
        kind, at = part.get("type"), f"{what}.parts[{number}]"
        if kind == "text":
            texts.append(as_string(part.get("content"), at))
        elif kind == "reasoning":
            reasoning.append(as_string(part.get("content"), at))
        elif kind == "tool_call":
            calls.append(values.build_tool_call(part.get("name"), part.get("arguments"), at, gaps))
            ids.append(as_string(part.get("id"), f"{at}.id"))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            text = as_text("" if result is None else result, at)
            results.append(build_message("tool", text, answers=as_string(part.get("id"), f"{at}.id")))
        else:
            gaps.add(f"parts of type {printable_label(kind) or 'unknown'}: only text, reasoning and tools are kept")
    if texts or calls or reasoning or not results:
        yield build_message(role, "\n".join(texts), calls=calls, call_ids=ids, reasoning="\n".join(reasoning), gaps=gaps)
    yield from results


def _instructions(value: Any, gaps: Gaps) -> Sequence[ImportedMessage]:
    """Returns the messages in `gen_ai.system_instructions`."""
    parts = decode_json(value)
    if parts is None:
        return ()
    if isinstance(parts, str):
        return (build_message("system", parts),)
    if not isinstance(parts, list):
        raise ValueError(f"{_SYSTEM} is {values.type_name(parts)}, not a list")
    return tuple(_message({"role": "system", "parts": parts}, _SYSTEM, gaps))


def _has_indexed_messages(attributes: Mapping[str, Any]) -> bool:
    """Whether the attributes of a span contain messages in indexed attributes."""
    prefixes = tuple(f"{name}." for name in (*_PROMPT_LISTS, *_COMPLETION_LISTS))
    return any(key.startswith(prefixes) and any(map(str.isdigit, key)) for key in attributes)


def _indexed_messages(attributes: Mapping[str, Any], lists: tuple[str, ...], role: str, gaps: Gaps) -> Iterator[ImportedMessage]:
    """Yields the messages in the first of `lists` that is not empty, ordered by index. `role` is used for messages without a role."""
    for name in lists:
        items = _indexed_items(attributes, name, gaps)
        for number, item in enumerate(items):
            yield from _message({"role": role, **_chat_message(item)}, f"{name}[{number}]", gaps)
        if items:
            return


def _indexed_definitions(attributes: Mapping[str, Any], gaps: Gaps) -> list[dict[str, Any]]:
    """Returns the schemas of the tools offered in a model call, read from indexed attributes."""
    schemas: list[dict[str, Any]] = []
    for name in _TOOL_LISTS:
        for item in _indexed_items(attributes, name, gaps):
            schema = decode_json(object_or_empty(item.get("tool")).get("json_schema"))
            schema = schema if isinstance(schema, dict) else {key: decode_json(value) for key, value in item.items() if key != "tool"}
            schemas.append(schema if "function" in schema else {"type": "function", "function": schema})
    return schemas


def _indexed_items(attributes: Mapping[str, Any], name: str, gaps: Gaps) -> list[dict[str, Any]]:
    """Returns the items of a list stored in attributes named NAME.INDEX.KEY, ordered by index. Unreadable items are recorded as gaps."""
    items: dict[int, dict[str, Any]] = {}
    prefix = f"{name}."
    for key, value in attributes.items():
        if not key.startswith(prefix):
            continue
        number, _, rest = key[len(prefix) :].partition(".")
        if _INDEX.fullmatch(number):
            _put(items.setdefault(int(number), {}), rest.split(".") if rest else ["content"], value, name, gaps)
        elif number.isdigit():
            gaps.add(f"{name} with a number that is not an index")
    if items and max(items) >= len(items):
        gaps.add(f"{name} between those that have attributes")
    return [{key: _with_lists(value) for key, value in items[number].items()} for number in sorted(items)]


def _put(item: dict[str, Any], path: list[str], value: Any, name: str, gaps: Gaps) -> None:
    """Sets a value at a path of keys.

    A path that is too long, or that contains a key whose value is not an object, is recorded as a gap.
    """
    node = item
    if len(path) <= _MAX_DEPTH:
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                break
        else:
            if path[-1] not in node:
                node[path[-1]] = value
                return
    gaps.add(f"attributes of {name} that contradict others or are nested too deep")


def _with_lists(value: Any) -> Any:
    """Returns a value in which each object whose keys are all indices is replaced with a list."""
    if not isinstance(value, dict):
        return value
    if value and all(map(_INDEX.fullmatch, value)):
        return [_with_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _with_lists(item) for key, item in value.items()}


def _chat_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an indexed message, converted to the form of the chat completions API."""
    fields = object_or_empty(item.get("message")) or dict(item)
    message = {key: value for key, value in fields.items() if key not in _IGNORED_KEYS}
    if "role" not in message and len(roles := [role for role in _ROLES if isinstance(message.get(role), str)]) == 1:
        message |= {"role": roles[0], "content": message.pop(roles[0])}
    if isinstance(contents := message.pop("contents", None), list):
        message["content"] = [object_or_empty(object_or_empty(part).get("message_content")) for part in contents]
    elif isinstance(text := message.get("content"), str) and text.startswith("[{"):
        parts = decode_json(text)
        message["content"] = parts if isinstance(parts, list) and all("type" in object_or_empty(part) for part in parts) else text
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(object_or_empty(object_or_empty(call).get("tool_call")) or object_or_empty(call)) for call in calls]
    name, arguments = message.pop("function_call_name", None), message.pop("function_call_arguments_json", None)
    if name is not None:
        message["function_call"] = {"name": name, "arguments": arguments}
    return message


def _call(fields: Mapping[str, Any]) -> dict[str, Any]:
    function = fields.get("function") or {key: fields[key] for key in ("name", "arguments") if key in fields}
    return {"id": fields.get("id"), "function": function}
