"""Reads traces of third-party agents from files. The content of a document determines its format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats import atif, openai, otlp
from agentrl.failure.formats.files import Document, UnreadableDocument, documents
from agentrl.failure.formats.otel import SpanCollector
from agentrl.failure.formats.values import type_name
from agentrl.failure.trace import Trace

FORMATS = ("openai", "otel", "atif")

_PARSERS: Mapping[str, ModuleType] = {"atif": atif, "openai": openai}
_PROBED = 100  # entries of a list that are tested for being documents
_FIX = "repair or remove it, or export it again; other documents are read"


def read(path: Path | str, format: str | None = None) -> Iterator[Trace | UnreadableDocument]:
    """Reads the traces of a file, or of all .json, .jsonl and .ndjson files below a folder.

    Yields an `UnreadableDocument` for each document without a trace and for each repeated trace. Traces of spans come last, because
    their spans may be in several files.

    Args:
        format: one of `FORMATS`; None detects the format of each document.

    Raises:
        UserError: the path or format does not exist, or the folder has no such files (when called); the spans take too much memory (later).
    """
    if format is not None and format not in FORMATS:
        raise UserError(f"no format {format!r}", fix=f"use {', '.join(FORMATS)}, or omit it: the content determines the format")
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} is not there", fix="give a file or a folder")
    return _distinct(_read(path, format))


def read_all(path: Path | str, format: str | None = None) -> tuple[list[Trace], list[UnreadableDocument]]:
    """Returns the traces and the unreadable documents of `read`. Raises `UserError` if there is no trace: the first unreadable document."""
    traces: list[Trace] = []
    unreadable: list[UnreadableDocument] = []
    for one in read(path, format):
        if isinstance(one, Trace):
            traces.append(one)
        else:
            unreadable.append(one)
    if not traces:
        raise unreadable[0] if unreadable else UserError(f"{path} contains no traces", fix=f"give files in one of {', '.join(FORMATS)}")
    return traces, unreadable


def _distinct(items: Iterator[Trace | UnreadableDocument]) -> Iterator[Trace | UnreadableDocument]:
    locations: dict[str, str] = {}
    for item in items:
        if isinstance(item, Trace):
            file, position = item.origin.get("file", ""), item.origin.get("place", "")
            if item.id in locations:
                yield UnreadableDocument(Path(file), position, f"is the same as {locations[item.id]}", fix="nothing to do: it is kept once")
                continue
            locations[item.id] = ", ".join(filter(None, (file, position)))
        yield item


def _read(path: Path, format: str | None) -> Iterator[Trace | UnreadableDocument]:
    spans = SpanCollector()
    for item in documents(path):
        if isinstance(item, UnreadableDocument):
            yield item
            continue
        for document in _parts(item, format):
            kind = _format(document.value, format)
            if kind == "otel":
                yield from spans.add(document)
            else:
                yield _parse(document, kind)
    yield from spans.traces()


def _parse(document: Document, kind: str) -> Trace | UnreadableDocument:
    try:
        if not kind:
            raise UserError(f"has no known format: it is {_describe(document.value)}", fix=f"use one of {', '.join(FORMATS)}; {_FIX}")
        trace: Trace = _PARSERS[kind].parse(document.value, document.location.origin)
        return trace
    except (ValueError, RecursionError) as error:
        return document.location.unreadable(error, fix=_FIX)


def _parts(document: Document, format: str | None) -> Iterator[Document]:
    """The entries of a list of documents, or the document itself."""
    value, location = document.value, document.location
    if isinstance(value, list) and not openai.recognizes(value) and any(_format(item, format) for item in value[:_PROBED]):
        for number, item in enumerate(value):
            position = ", ".join(part for part in (location.position, f"entry {number}") if part)
            yield Document(item, replace(location, position=position))
    else:
        yield document


def _format(value: Any, wanted: str | None) -> str:
    """The format of a document; empty if it is unknown or not the wanted one."""
    kind = "otel" if otlp.recognizes(value) else next((name for name, parser in _PARSERS.items() if parser.recognizes(value)), "")
    return kind if wanted in (None, kind) else ""


def _describe(value: Any) -> str:
    if not isinstance(value, dict):
        return type_name(value)
    keys = ", ".join(repr(key[:40]) for key in list(value)[:6])
    is_span = isinstance(value.get("context"), dict) and "trace_id" in value["context"]
    hint = "; it looks like a span of the SDK's console exporter, use one of OTLP" if is_span else ""
    return f"an object with {keys or 'no keys'}{hint}"
