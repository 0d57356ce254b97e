"""Traces of other people's agents, read from files whose format is known by what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats import atif, openai
from agentrl.failure.formats.files import Document, UnreadableDocument, documents
from agentrl.failure.formats.otel import SpanCollector
from agentrl.failure.formats.otlp import recognises as is_otlp
from agentrl.failure.trace import Trace

FORMATS = ("openai", "otel", "atif")

_PARSERS: Mapping[str, ModuleType] = {"atif": atif, "openai": openai}
_LOOKED_AT = 100  # entries of a list, to know whether they are documents
_FIX = "repair or remove it, or export it again; what else was given is read"


def read(path: Path | str, format: str | None = None) -> Iterator[Trace | UnreadableDocument]:
    """Reads the traces of a file, or of all .json, .jsonl and .ndjson files below a folder.

    What gives no trace is told in its place by an `UnreadableDocument`, an error to count or raise, and the rest is read. The same
    conversation met again is told so too, and given once. Spans belong together across files: theirs come last.

    Args:
        format: one of `FORMATS`; None: each document is what its content says.

    Raises:
        UserError: no such path or format, or a folder without such files (when called); spans beyond what memory allows (on the way).
    """
    if format is not None and format not in FORMATS:
        raise UserError(f"no format {format!r}", fix=f"use {', '.join(FORMATS)}, or none: it is known by the content")
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} is not there", fix="give a file or a folder")
    return _distinct(_read(path, format))


def read_all(path: Path | str, format: str | None = None) -> tuple[list[Trace], list[UnreadableDocument]]:
    """All traces of `read`, and all it told. Raises `UserError` also where there is not one trace: the first of what it told."""
    traces: list[Trace] = []
    told: list[UnreadableDocument] = []
    for one in read(path, format):
        if isinstance(one, Trace):
            traces.append(one)
        else:
            told.append(one)
    if not traces:
        raise told[0] if told else UserError(f"{path} holds no traces", fix=f"give what an agent left, in one of {', '.join(FORMATS)}")
    return traces, told


def _distinct(found: Iterator[Trace | UnreadableDocument]) -> Iterator[Trace | UnreadableDocument]:
    places: dict[str, str] = {}
    for one in found:
        if isinstance(one, Trace):
            where = ", ".join(filter(None, (one.origin.get("file"), one.origin.get("place"))))
            if one.id in places:
                path = Path(one.origin.get("file", ""))
                yield UnreadableDocument(
                    path, one.origin.get("place", ""), f"is the same as {places[one.id]}", fix="nothing to do: it is kept once"
                )
                continue
            places[one.id] = where
        yield one


def _read(path: Path, format: str | None) -> Iterator[Trace | UnreadableDocument]:
    spans = SpanCollector()
    for found in documents(path):
        if isinstance(found, UnreadableDocument):
            yield found
            continue
        for document in _parts(found, format):
            kind = _format(document.value, format)
            if kind == "otel":
                yield from spans.add(document)
            else:
                yield _parsed(document, kind)
    yield from spans.traces()


def _parsed(document: Document, kind: str) -> Trace | UnreadableDocument:
    place = document.location
    try:
        if not kind:
            raise UserError(f"is of no format that is known: {_described(document.value)}", fix=f"known are {', '.join(FORMATS)}; {_FIX}")
        trace: Trace = _PARSERS[kind].parse(document.value, {"file": place.name, **({"place": place.position} if place.position else {})})
        return trace
    except (ValueError, RecursionError) as error:
        return place.error(error, fix=_FIX)


def _parts(document: Document, format: str | None) -> Iterator[Document]:
    """A list of documents as each of them; anything else as it is."""
    value, place = document.value, document.location
    if isinstance(value, list) and value and not openai.recognises(value) and any(_format(item, format) for item in value[:_LOOKED_AT]):
        for number, item in enumerate(value):
            where = ", ".join(part for part in (place.position, f"entry {number}") if part)
            yield Document(item, type(place)(place.path, place.name, where))
    else:
        yield document


def _format(value: Any, wanted: str | None) -> str:
    """The format that a document claims to be of; empty: none, or none that was asked for."""
    claimed = (name for name, parser in _PARSERS.items() if parser.recognises(value))
    kind = "otel" if is_otlp(value) else next(claimed, "")
    return kind if wanted in (None, kind) else ""


def _described(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(repr(key[:40]) for key in list(value)[:6])
        span = isinstance(value.get("context"), dict) and "trace_id" in value["context"]
        return f"an object with {keys or 'no keys'}" + (
            "; it looks like a span of the SDK's console exporter, use one of OTLP" if span else ""
        )
    return f"a {type(value).__name__}"
