"""Reads JSON files in a run folder, which may come from a third party. Damaged files and lines are reported in notes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from agentrl.base.untrusted_files import open_file, read_bytes
from agentrl.observe.stats import Rate

Line = dict[str, Any]
_MAX_DIGITS = 18  # maximum number of digits in an integer; longer integers become floats
_MAX_BYTES = 1 << 30  # maximum size of a file in bytes
_MAX_LINE = 64 << 20


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_lines(
    path: Path, required: Mapping[str, type], notes: list[str], *, most: int = _MAX_BYTES, inside: Path | None = None
) -> list[Line]:
    """Returns a list of the lines that `iter_lines` yields."""
    return list(iter_lines(path, required, notes, most=most, inside=inside))


def iter_lines(
    path: Path, required: Mapping[str, type], notes: list[str], *, most: int = _MAX_BYTES, inside: Path | None = None
) -> Iterator[Line]:
    """Yields those lines of a file in which the `required` keys have the required types; none if the file is missing.

    Only one line is in memory at a time.

    Args:
        notes: a note about each problem is appended to this list.
        most: maximum size of the file in bytes.
        inside: folder that must contain the file after links are resolved; None means the folder of the file.
    """
    bad = 0
    try:
        with open_file(path, inside=inside or path.parent) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise ValueError(f"is larger than {most >> 20} MiB")
            while text := file.readline(_MAX_LINE):
                if not text.strip():
                    continue
                line = parse_object(text.decode("utf-8", "replace"))
                if line is not None and all(isinstance(line.get(key), kind) for key, kind in required.items()):
                    yield line
                else:
                    bad += 1
    except (OSError, ValueError) as error:
        note_unreadable(path, error, notes)
    if bad:
        notes.append(f"{path.name}: {bad} unreadable {'line' if bad == 1 else 'lines'} ignored")


def _text(path: Path, notes: list[str], most: int, inside: Path | None) -> str | None:
    """Returns the text of a file; None if it is missing or cannot be read."""
    try:
        return read_bytes(path, most=most, inside=inside or path.parent).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        note_unreadable(path, error, notes)
        return None


def note_unreadable(path: Path, error: OSError | ValueError, notes: list[str]) -> None:
    """Adds a note with the reason why a file cannot be read. Adds no note if the file is missing."""
    if isinstance(error, ValueError):
        notes.append(f"{path.name} cannot be read, because it {error}")
    elif not isinstance(error, FileNotFoundError):
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")


def parse_object(text: str) -> Line | None:
    """Parses a JSON object. Returns None for any other text. Integers of more than 18 digits become floats, which may be infinite."""
    try:
        data = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= _MAX_DIGITS else float(digits))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def as_mapping(value: Any) -> Line:
    """Returns the value if it is a JSON object, otherwise an empty mapping."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Returns the value if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def read_rate(value: Any) -> Rate | None:
    """Returns the rate in a JSON object; None if a field is missing or is not a finite number."""
    fields: Line = {name: as_mapping(value).get(name) for name in ("value", "ci_low", "ci_high", "n")}
    return Rate(**fields) if all(map(is_finite, fields.values())) else None


def read_object(path: Path, notes: list[str], *, most: int = _MAX_BYTES, inside: Path | None = None) -> Line:
    """Returns the JSON object in a file; empty if the file is missing, cannot be read, or does not contain a JSON object.

    For `most` and `inside`, see `iter_lines`.
    """
    text = _text(path, notes, most, inside)
    content = {} if text is None else parse_object(text)
    if content is None:
        notes.append(f"{path.name} cannot be read")
    return content or {}
