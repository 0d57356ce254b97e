"""The JSON documents of a file or folder, one after the other, within bounds: a file is one document, or has one on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentrl.base.untrusted_files import open_file
from agentrl.base.user_code import printable
from agentrl.errors import UserError

LARGEST = 32 << 20
"""Bytes of one document: a file of one, or a line of a file of many."""
LARGEST_IN_MEMORY = 768 << 20
"""Bytes that the values of one document may take once it is read, by estimate."""
MOST_FILES = 20_000
"""Files of a folder."""
SUFFIXES = (".json", ".jsonl", ".ndjson")

_LINES = (".jsonl", ".ndjson")
_LIST, _OBJECT, _VALUE = 72, 240, 40  # bytes that Python takes for an empty list, an object of one entry, any other value


class UnreadableDocument(UserError):
    """A file, or a part of one, that gave no trace: an error to raise or to count. `read` yields these among the traces.

    `path` is the file, `where` the place in it ("line 3", "span 1f...", empty: all of it).
    """

    def __init__(self, path: Path, where: str, message: str, *, fix: str = "") -> None:
        self.path, self.position = path, where
        place = f"{path}, {where}" if where else str(path)
        super().__init__(printable(f"{place}: {message}", 1000), fix=fix)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where a document lies."""

    path: Path
    name: str  # of the file, below what was asked for
    position: str = ""

    def error(self, error: Exception, *, where: str = "", fix: str) -> UnreadableDocument:
        """The error as what is told of this place; its own advice goes before `fix`."""
        message = "is nested too deep" if isinstance(error, RecursionError) else getattr(error, "message", "") or str(error)
        full = ", ".join(part for part in (self.position, where) if part)
        return UnreadableDocument(self.path, full, message, fix=getattr(error, "fix", "") or fix)


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON value and where it lies."""

    value: Any
    location: SourceLocation


def documents(path: Path) -> Iterator[Document | UnreadableDocument]:
    """The documents of a file, or of all files below a folder in the order of their names; what is none is told and passed over.

    Raises:
        UserError: there is no such file, or the folder holds none that could be read.
    """
    if path.is_dir():
        files = _below(path)
    elif path.is_file():
        files = [path]
    else:
        raise UserError(f"{path} is not there, or no file", fix=f"give a file, or a folder of {', '.join(SUFFIXES)}")
    for file in files:
        place = SourceLocation(file, file.relative_to(path).as_posix() if path.is_dir() else file.name)
        try:
            yield from _of_file(place)
        except OSError as error:
            yield place.error(ValueError(f"cannot be read: {error.strerror}"), fix="make it readable")
        except ValueError as error:  # the path was a file before
            yield place.error(error, fix="give a file")


def _below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in folder.rglob("*"):
        if path.suffix.lower() in SUFFIXES and not path.is_symlink() and path.is_file():
            found.append(path)
            if len(found) > MOST_FILES:
                raise UserError(f"{folder} holds more than {MOST_FILES} files", fix="import its folders one by one")
    if not found:
        raise UserError(f"{folder} holds no files that end in {', '.join(SUFFIXES)}", fix="give the folder that the export was written to")
    return sorted(found)


def _of_file(place: SourceLocation) -> Iterator[Document | UnreadableDocument]:
    with open_file(place.path) as file:
        if _has_lines(place, file):
            file.seek(0)
            yield from _lines(place, file)
            return
        file.seek(0)
        data = file.read(LARGEST + 1)
        try:
            yield Document(decode_document(data), place)
        except (ValueError, RecursionError) as error:
            yield place.error(error, fix="export it again, or remove what is no JSON")


def _has_lines(place: SourceLocation, file: IO[bytes]) -> bool:
    """Whether a file has a document on each line: its first line is one and others follow; else by its name, or by its first braces."""
    first = b""
    while not first.strip():
        first = file.readline(LARGEST + 1)
        if not first:
            return False
    try:
        decode_document(first)
    except (ValueError, RecursionError):
        start = first.strip()
        return place.path.suffix.lower() in _LINES or (start.startswith(b"{") and start.endswith(b"}"))
    return any(line.strip() for line in iter(lambda: file.readline(1 << 16), b""))


def _lines(place: SourceLocation, file: IO[bytes]) -> Iterator[Document | UnreadableDocument]:
    number = 0
    while line := file.readline(LARGEST + 1):
        number += 1
        here = SourceLocation(place.path, place.name, f"line {number}")
        whole = len(line) <= LARGEST
        while not whole and line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        if whole and not line.strip():
            continue
        try:
            if not whole:
                raise ValueError(f"is longer than {LARGEST >> 20} MiB")
            yield Document(decode_document(line), here)
        except (ValueError, RecursionError) as error:
            yield here.error(error, fix="remove or repair the line; the others are read")


def decode_document(data: bytes) -> Any:
    """The JSON value of UTF-8 bytes. Raises `ValueError` (or `RecursionError`) where they are none, or would take too much memory."""
    if len(data) > LARGEST:
        raise UserError(f"is larger than {LARGEST >> 20} MiB", fix="split it: a document on each line of a .jsonl file is read one by one")
    lists, parts = data.count(b"["), data.count(b",") + data.count(b":")
    if lists * _LIST + data.count(b"{") * _OBJECT + parts * _VALUE > LARGEST_IN_MEMORY:
        raise UserError("holds too many values to be read at once", fix="split it into several files")
    if not data.strip():
        raise ValueError("is empty")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
