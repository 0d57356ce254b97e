"""Spans, their events and log records of OTLP in its JSON form, as collectors and the SDKs' file exporters write them.

Described at https://opentelemetry.io/docs/specs/otlp/ and in opentelemetry/proto/trace/v1/trace.proto. Only attributes of the
conventions for generative AI are kept, and the parents of spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.failure.formats.files import Document, SourceLocation, UnreadableDocument
from agentrl.failure.formats.values import as_object, as_objects, object_or_empty, printable_label, type_name

SpanKey = tuple[str, str]
"""Trace id and span id, as they are written: in hex, or in base64 by those who do not follow the specification."""

_OPENINFERENCE = ("llm.", "openinference.span.kind", "session.id", "agent.name", "tool.", "tool_call.id", "input.value", "output.value")
_KEPT = ("gen_ai.", "error.", "event.", *_OPENINFERENCE)
_DEEPEST = 70
_LONGEST_ID = 64
_WHOLE = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Span:
    """What a span says."""

    key: SpanKey
    parent: str  # span id in the same trace; empty: none
    start: int  # ns since 1970; 0: not said
    end: int
    attributes: Mapping[str, Any]
    error: str  # what went wrong, in its own words; empty: nothing
    service: str
    place: SourceLocation


@dataclass(frozen=True, slots=True)
class Event:
    """The content of a log record or of a span's event."""

    key: SpanKey
    name: str
    at: int  # ns since 1970; 0: not said
    attributes: Mapping[str, Any]
    body: Any
    service: str
    place: SourceLocation


def recognises(value: Any) -> bool:
    """Whether a JSON document claims to be an export of spans or log records."""
    return isinstance(value, dict) and ("resourceSpans" in value or "resourceLogs" in value)


def entries(document: Document) -> Iterator[Span | Event | UnreadableDocument]:
    """The spans and events of one export. One that is none is told, the others are read."""
    whole, place = document.value, document.location
    fix = "export spans as OTLP JSON, ids in hex"
    for outer, scope, inner, make in (("resourceSpans", "scopeSpans", "spans", _span), ("resourceLogs", "scopeLogs", "logRecords", _event)):
        try:
            for resource in as_objects(whole.get(outer), outer):
                service = _service(resource)
                for scoped in as_objects(resource.get(scope), scope):
                    items = scoped.get(inner)
                    if items is not None and not isinstance(items, list):
                        raise ValueError(f"{inner} is {type_name(items)}, not a list")
                    for number, item in enumerate(items or []):
                        try:
                            one = as_object(item, inner)
                            found = make(one, service, place)
                        except (ValueError, RecursionError) as error:
                            yield place.error(error, where=f"{inner}[{number}]", fix=fix)
                            continue
                        if found is not None:
                            yield found
                        if isinstance(found, Span):
                            yield from _events_of(found, one.get("events"))
        except ValueError as error:
            yield place.error(error, fix=fix)


def _service(resource: Mapping[str, Any]) -> str:
    found = object_or_empty(resource.get("resource")).get("attributes")
    for item in found if isinstance(found, list) else []:
        if isinstance(item, dict) and item.get("key") == "service.name":
            return printable_label(object_or_empty(item.get("value")).get("stringValue"))
    return ""


def _span(span: Mapping[str, Any], service: str, place: SourceLocation) -> Span:
    status = object_or_empty(span.get("status"))
    attributes = _attributes(span.get("attributes"))
    failed = status.get("code") in (2, "STATUS_CODE_ERROR")
    error = printable_label(attributes.get("error.type")) or printable_label(status.get("message")) or "error" if failed else ""
    return Span(
        key=(_id(span.get("traceId"), "traceId"), _id(span.get("spanId"), "spanId")),
        parent=_id(span.get("parentSpanId") or "-", "parentSpanId").strip("-"),
        start=_time(span.get("startTimeUnixNano")),
        end=_time(span.get("endTimeUnixNano")),
        attributes=attributes,
        error=error,
        service=service,
        place=place,
    )


def _events_of(span: Span, found: Any) -> Iterator[Event | UnreadableDocument]:
    """The events of a span that concern generative AI: earlier conventions put messages there."""
    try:
        for event in as_objects(found, "events"):
            name = event.get("name")
            if isinstance(name, str) and name.startswith("gen_ai."):
                at, told = _time(event.get("timeUnixNano")), _attributes(event.get("attributes"), every=True)
                yield Event(key=span.key, name=name, at=at, attributes=told, body=None, service=span.service, place=span.place)
    except (ValueError, RecursionError) as error:
        yield span.place.error(error, where=f"events of span {printable_label(span.key[1])}", fix="export it again; other spans are read")


def _event(record: Mapping[str, Any], service: str, place: SourceLocation) -> Event | None:
    """A log record that tells of generative AI, else None."""
    attributes = _attributes(record.get("attributes"))
    name = record.get("eventName") or attributes.get("event.name")
    if not isinstance(name, str) or not name.startswith("gen_ai."):
        return None
    return Event(
        key=(_id(record.get("traceId"), "traceId"), _id(record.get("spanId"), "spanId")),
        name=name,
        at=_time(record.get("timeUnixNano")) or _time(record.get("observedTimeUnixNano")),
        attributes=_attributes(record.get("attributes"), every=True),
        body=any_value(record.get("body")),
        service=service,
        place=place,
    )


def _attributes(found: Any, *, every: bool = False) -> dict[str, Any]:
    """The attributes that concern generative AI; with `every`, all attributes, for an event that concerns it."""
    kept = {}
    for item in as_objects(found, "attributes"):
        key = item.get("key")
        if isinstance(key, str) and (every or key.startswith(_KEPT)):
            kept[key] = any_value(item.get("value"))
    return kept


def any_value(value: Any, levels: int = _DEEPEST) -> Any:
    """A plain value of an `AnyValue`. Raises `ValueError`."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"a value is {type_name(value)}, not an object such as {{'stringValue': ...}}")
    if levels <= 0:
        raise ValueError(f"a value is nested deeper than {_DEEPEST} levels")
    if "arrayValue" in value:
        return [any_value(item, levels - 1) for item in as_objects(object_or_empty(value["arrayValue"]).get("values"), "values")]
    if "kvlistValue" in value:
        items = as_objects(object_or_empty(value["kvlistValue"]).get("values"), "values")
        return {item["key"]: any_value(item.get("value"), levels - 1) for item in items if isinstance(item.get("key"), str)}
    if "intValue" in value:
        return _whole(value["intValue"])
    return next((value[key] for key in ("stringValue", "boolValue", "doubleValue", "bytesValue") if key in value), None)


def _id(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _LONGEST_ID or not value.isascii():
        raise ValueError(f"{what} is {type_name(value)} that is no id")
    return value.lower() if len(value) in (16, 32) else value


def _time(value: Any) -> int:
    number = _whole(value)
    return number if isinstance(number, int) and 0 < number < 1 << 63 else 0


def _whole(value: Any) -> Any:
    """A number that OTLP may write as text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return int(value) if isinstance(value, int) or _WHOLE.fullmatch(value) else None
