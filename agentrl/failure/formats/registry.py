"""Reads traces of third-party agents from files, and writes traces. The content of a document determines its format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.base.files import replace_file
from agentrl.errors import UserError
from agentrl.failure.formats import atif, openai, otlp
from agentrl.failure.formats.files import Document, UnreadableDocument, documents
from agentrl.failure.formats.otel import SpanCollector
from agentrl.failure.formats.values import type_name
from agentrl.failure.trace import Trace

FORMATS = ("openai", "otel", "atif")

WRITTEN: Mapping[str, Callable[[Trace], Iterable[dict[str, Any]]]] = {
    "atif": lambda trace: [atif.document(trace)],
    "openai": openai.documents,
}
"""Format -> function that returns the documents for a trace: one document in ATIF, or one document per agent in OpenAI chat messages."""

_PARSERS: Mapping[str, ModuleType] = {"atif": atif, "openai": openai}
_PROBED = 100  # maximum number of list entries that are examined to decide whether the list contains documents
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
# Some readers treat these as line breaks and some terminals as control characters, so they are written as escapes.
_ESCAPED = re.compile("[\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_FIX = "repair or remove it, or export it again; other documents are read"


def read(path: Path | str, format: str | None = None) -> Iterator[Trace | UnreadableDocument]:
    """Reads the traces in a file, or in all .json, .jsonl and .ndjson files below a folder.

    Yields an `UnreadableDocument` for each document that contains no trace and for each repeated trace. Traces that consist of spans come
    last, because their spans may be in several files.

    Args:
        format: one of `FORMATS`; None detects the format of each document.

    Raises:
        UserError: the path does not exist or the format is unknown (raised by the call); the folder contains no such files, or the spans
            exceed a limit (raised during iteration).
    """
    if format is not None and format not in FORMATS:
        raise UserError(f"unknown format {format!r}", fix=f"use {', '.join(FORMATS)}, or omit it: the content determines the format")
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist", fix="give a file or a folder")
    return _distinct(_read(path, format))


def read_all(path: Path | str, format: str | None = None) -> tuple[list[Trace], list[UnreadableDocument]]:
    """Returns the traces and the unreadable documents that `read` yields.

    If there is no trace, raises `UserError`: the first unreadable document, if there is one.
    """
    traces: list[Trace] = []
    unreadable: list[UnreadableDocument] = []
    for document in read(path, format):
        if isinstance(document, Trace):
            traces.append(document)
        else:
            unreadable.append(document)
    if not traces:
        raise unreadable[0] if unreadable else UserError(f"{path} contains no traces", fix=f"give files in one of {', '.join(FORMATS)}")
    return traces, unreadable


def write(traces: Iterable[Trace], path: Path | str, format: str = "atif") -> int:
    """Writes traces and returns the number of documents.

    If the path ends in .jsonl, the file contains one document per line. If it ends in .json, the file contains exactly one document. Any
    other path is a folder, which is created if necessary and contains one file per document. Files are replaced atomically.

    Raises:
        UserError: the format cannot be written, or the number of documents for a .json file is not 1.
    """
    if format not in WRITTEN:
        raise UserError(f"format {format!r} cannot be written", fix=f"use {' or '.join(WRITTEN)}")
    path = Path(path)
    documents = ((trace, document) for trace in traces for document in WRITTEN[format](trace))
    if path.suffix not in (".json", ".jsonl"):
        return _write_folder(documents, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count, lines = 0, path.suffix == ".jsonl"
    with replace_file(path) as part, part.open("wb") as file:
        for _, document in documents:
            count += 1
            if count > 1 and not lines:
                break
            file.write(_json(document, indent=None if lines else 1).encode() + b"\n")
        if count != 1 and not lines:
            problem = "more than one document" if count else "nothing"
            raise UserError(f"{path} would contain {problem}", fix="give a folder, or a file whose name ends in .jsonl")
    return count


def _distinct(items: Iterator[Trace | UnreadableDocument]) -> Iterator[Trace | UnreadableDocument]:
    locations: dict[str, str] = {}
    for item in items:
        if isinstance(item, Trace):
            file, position = item.origin.get("file", ""), item.origin.get("place", "")
            if item.id in locations:
                yield UnreadableDocument(
                    Path(file), position, f"is the same as {locations[item.id]}", fix="nothing to do: the trace is read once"
                )
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
    """Yields the entries of a document that is a list of documents, and any other document itself."""
    value, location = document.value, document.location
    if isinstance(value, list) and not openai.recognizes(value) and any(_format(item, format) for item in value[:_PROBED]):
        for number, item in enumerate(value):
            position = ", ".join(part for part in (location.position, f"entry {number}") if part)
            yield Document(item, replace(location, position=position))
    else:
        yield document


def _format(value: Any, wanted: str | None) -> str:
    """Returns the format of a document; empty if it is unknown or is not `wanted`."""
    kind = "otel" if otlp.recognizes(value) else next((name for name, parser in _PARSERS.items() if parser.recognizes(value)), "")
    return kind if wanted in (None, kind) else ""


def _describe(value: Any) -> str:
    if not isinstance(value, dict):
        return type_name(value)
    keys = ", ".join(repr(key[:40]) for key in list(value)[:6])
    is_span = isinstance(value.get("context"), dict) and "trace_id" in value["context"]
    hint = "; it looks like a span of the SDK's console exporter, so export OTLP instead" if is_span else ""
    return f"an object with {keys or 'no keys'}{hint}"


def _write_folder(documents: Iterator[tuple[Trace, dict[str, Any]]], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for trace, document in documents:
        stem = _UNSAFE.sub("-", trace.id).strip(".-")[:80] or "trace"
        name, number = stem, 2
        while name.lower() in taken:
            name, number = f"{stem}-{number}", number + 1
        taken.add(name.lower())
        with replace_file(folder / f"{name}.json") as part:
            part.write_text(_json(document, indent=1) + "\n", encoding="utf-8")
    return len(taken)


def _json(document: Mapping[str, Any], indent: int | None = None) -> str:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=indent)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
