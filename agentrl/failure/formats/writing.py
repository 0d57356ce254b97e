"""Writes traces in third-party formats."""

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
# Line breaks to some readers, control characters to some terminals; written as escapes.
_ESCAPED = re.compile("[\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")

WRITTEN: Mapping[str, Callable[[Trace], Iterable[dict[str, Any]]]] = {
    "atif": lambda trace: [atif_export.document(trace)],
    "openai": openai.documents,
}
"""Format -> the documents of a trace. ATIF has one, chat messages have one for each agent."""


def write(traces: Iterable[Trace], path: Path | str, format: str = "atif") -> int:
    """Writes traces and returns the number of documents.

    A path that ends in .jsonl gets one document per line, a path that ends in .json the only document. Any other path is a folder, created
    if necessary, that gets one file per document. Files are replaced atomically.

    Raises:
        UserError: the format cannot be written, or the number of documents for a .json file is not 1.
    """
    if format not in WRITTEN:
        raise UserError(f"format {format!r} is not written", fix=f"use {' or '.join(WRITTEN)}")
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
            raise UserError(f"{path} would contain {problem}", fix="name a folder, or a file that ends in .jsonl")
    return count


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
