"""Traces, imported ones and our own, in other people's formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.base.files import replace_file
from agentrl.errors import UserError
from agentrl.failure.formats import atif_export, openai
from agentrl.failure.trace import Trace

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_ESCAPED = re.compile(
    "[\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)  # ends of lines to some readers, orders to some terminals


def _atif(trace: Trace) -> Iterator[dict[str, Any]]:
    yield atif_export.document(trace)


WRITTEN: Mapping[str, Callable[[Trace], Iterator[dict[str, Any]]]] = {"atif": _atif, "openai": openai.documents}
"""Format -> the documents of a trace. ATIF has one, chat messages one for each agent."""


def write(traces: Iterable[Trace], path: Path | str, format: str = "atif") -> int:
    """Writes traces and returns how many documents that made.

    A `path` that ends in .jsonl gets a document a line; one that ends in .json the only document; any other is a folder, made where it
    is missing, that gets a file for each document. Files are replaced whole.

    Raises:
        UserError: the format is not written, or a .json file was to hold none or several documents.
    """
    if format not in WRITTEN:
        raise UserError(f"format {format!r} is not written", fix=f"use {' or '.join(WRITTEN)}")
    path = Path(path)
    made = ((trace, document) for trace in traces for document in WRITTEN[format](trace))
    if path.suffix == ".jsonl":
        return _lines(made, path)
    if path.suffix == ".json":
        return _single(made, path)
    return _files(made, path)


def _lines(made: Iterator[tuple[Trace, dict[str, Any]]], path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with replace_file(path) as part, part.open("wb") as file:
        for _, document in made:
            file.write(_json(document).encode() + b"\n")
            count += 1
    return count


def _single(made: Iterator[tuple[Trace, dict[str, Any]]], path: Path) -> int:
    found = next(made, None)
    if found is None or next(made, None) is not None:
        what = "nothing" if found is None else "more than one document"
        raise UserError(f"{path} would hold {what}", fix="name a folder, or a file that ends in .jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as part:
        part.write_text(_json(found[1], indent=1) + "\n", encoding="utf-8")
    return 1


def _files(made: Iterator[tuple[Trace, dict[str, Any]]], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for trace, document in made:
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
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
