"""Reads spans, their events and log records from OTLP JSON, as collectors and the SDKs' file exporters write it.

https://opentelemetry.io/docs/specs/otlp/ and opentelemetry/proto/trace/v1/trace.proto describe the format. Of a span, only the parent, the
times, the error, and the attributes that conventions for generative AI define are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.failure.formats.files import Document, SourceLocation, UnreadableDocument
from agentrl.failure.formats.values import as_object, as_objects, object_or_empty, printable_label, type_name

SpanKey = tuple[str, str]
"""Trace id and span id: lower-case hex, or base64 in exports that do not follow the specification."""

_OPENINFERENCE = ("llm.", "openinference.span.kind", "session.id", "agent.name", "tool.", "tool_call.id", "input.value", "output.value")
_KEPT = ("gen_ai.", "error.", "event.", *_OPENINFERENCE)
_MAX_DEPTH = 70
_MAX_ID = 64
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Span:
    """A span."""

    key: SpanKey
    parent: str  # span id in the same trace; empty means none
    start: int  # ns since 1970; 0 means unknown
    end: int
    attributes: Mapping[str, Any]
    error: str  # error type or status message; empty means no error
    service: str
    location: SourceLocation


@dataclass(frozen=True, slots=True)
class Event:
    """A log record or a span event."""

    key: SpanKey
    name: str
    at: int  # ns since 1970; 0 means unknown
    attributes: Mapping[str, Any]
    body: Any
    service: str
    location: SourceLocation


def recognizes(value: Any) -> bool:
    """Whether a JSON document appears to be an export of spans or log records."""
    return isinstance(value, dict) and ("resourceSpans" in value or "resourceLogs" in value)


def entries(document: Document) -> Iterator[Span | Event | UnreadableDocument]:
    """Yields the spans and events in an export. For an invalid entry, yields an `UnreadableDocument`, and continues with the next entry."""
    location, fix = document.location, "export spans as OTLP JSON, with ids in hex"
    for outer, scope, inner in (("resourceSpans", "scopeSpans", "spans"), ("resourceLogs", "scopeLogs", "logRecords")):
        try:
            for item, number, service in _items(document.value, outer, scope, inner):
                try:
                    one = as_object(item, inner)
                    entry = _span(one, service, location) if inner == "spans" else _record(one, service, location)
                except (ValueError, RecursionError) as error:
                    yield location.unreadable(error, position=f"{inner}[{number}]", fix=fix)
                    continue
                if entry is not None:
                    yield entry
                if isinstance(entry, Span):
                    yield from _events(entry, one.get("events"))
        except ValueError as error:
            yield location.unreadable(error, fix=fix)


def any_value(value: Any, levels: int = _MAX_DEPTH) -> Any:
    """Returns the plain value of an OTLP `AnyValue`; None if it is empty or of an unknown kind. Raises `ValueError` if it is invalid."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"a value is {type_name(value)}, not an object such as {{'stringValue': ...}}")
    if levels <= 0:
        raise ValueError(f"a value is nested deeper than {_MAX_DEPTH} levels")
    if "arrayValue" in value:
        return [any_value(item, levels - 1) for item in as_objects(object_or_empty(value["arrayValue"]).get("values"), "values")]
    if "kvlistValue" in value:
        items = as_objects(object_or_empty(value["kvlistValue"]).get("values"), "values")
        return {item["key"]: any_value(item.get("value"), levels - 1) for item in items if isinstance(item.get("key"), str)}
    if "intValue" in value:
        return _whole_number(value["intValue"])
    return next((value[key] for key in ("stringValue", "boolValue", "doubleValue", "bytesValue") if key in value), None)


def _items(export: Mapping[str, Any], outer: str, scope: str, inner: str) -> Iterator[tuple[Any, int, str]]:
    """Yields (item, index of the item, name of the service that the item belongs to)."""
    for resource in as_objects(export.get(outer), outer):
        service = _service(resource)
        for scoped in as_objects(resource.get(scope), scope):
            items = scoped.get(inner)
            if items is not None and not isinstance(items, list):
                raise ValueError(f"{inner} is {type_name(items)}, not a list")
            for number, item in enumerate(items or []):
                yield item, number, service


def _service(resource: Mapping[str, Any]) -> str:
    attributes = object_or_empty(resource.get("resource")).get("attributes")
    for item in attributes if isinstance(attributes, list) else []:
        if isinstance(item, dict) and item.get("key") == "service.name":
            return printable_label(object_or_empty(item.get("value")).get("stringValue"))
    return ""


def _span(span: Mapping[str, Any], service: str, location: SourceLocation) -> Span:
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
        location=location,
    )


def _events(span: Span, events: Any) -> Iterator[Event | UnreadableDocument]:
    """Yields those events of a span that concern generative AI. Earlier conventions store messages in events."""
    try:
        for event in as_objects(events, "events"):
            name = event.get("name")
            if isinstance(name, str) and name.startswith("gen_ai."):
                at, attributes = _time(event.get("timeUnixNano")), _attributes(event.get("attributes"), every=True)
                yield Event(span.key, name, at, attributes, None, span.service, span.location)
    except (ValueError, RecursionError) as error:
        position = f"events of span {printable_label(span.key[1])}"
        yield span.location.unreadable(error, position=position, fix="export it again; other spans are read")


def _record(record: Mapping[str, Any], service: str, location: SourceLocation) -> Event | None:
    """Returns a log record if it concerns generative AI, otherwise None."""
    name = record.get("eventName") or _attributes(record.get("attributes")).get("event.name")
    if not isinstance(name, str) or not name.startswith("gen_ai."):
        return None
    return Event(
        key=(_id(record.get("traceId"), "traceId"), _id(record.get("spanId"), "spanId")),
        name=name,
        at=_time(record.get("timeUnixNano")) or _time(record.get("observedTimeUnixNano")),
        attributes=_attributes(record.get("attributes"), every=True),
        body=any_value(record.get("body")),
        service=service,
        location=location,
    )


def _attributes(attributes: Any, *, every: bool = False) -> dict[str, Any]:
    """Returns the attributes that concern generative AI, or all attributes if `every` is true."""
    selected = {}
    for item in as_objects(attributes, "attributes"):
        key = item.get("key")
        if isinstance(key, str) and (every or key.startswith(_KEPT)):
            selected[key] = any_value(item.get("value"))
    return selected


def _id(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_ID or not value.isascii():
        raise ValueError(f"{what} is not a valid id: it is {type_name(value)}")
    return value.lower() if len(value) in (16, 32) else value


def _time(value: Any) -> int:
    number = _whole_number(value)
    return number if isinstance(number, int) and 0 < number < 1 << 63 else 0


def _whole_number(value: Any) -> int | None:
    """Returns a whole number, which OTLP may encode as a string; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return int(value) if isinstance(value, int) or _WHOLE_NUMBER.fullmatch(value) else None
