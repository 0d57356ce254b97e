"""Reads the JSON documents in a file or folder, with size limits. A file contains either one document or one document per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from agentrl.base.untrusted_files import open_file
from agentrl.base.user_code import printable
from agentrl.errors import UserError

LARGEST = 32 << 20
"""Maximum bytes of one document, which is a file or a line."""
LARGEST_IN_MEMORY = 768 << 20
"""Maximum bytes of memory that the values in one document are estimated to need."""
MOST_FILES = 20_000
"""Maximum number of files in a folder."""
SUFFIXES = (".json", ".jsonl", ".ndjson")

_LINE_SUFFIXES = (".jsonl", ".ndjson")
_LIST_BYTES, _OBJECT_BYTES, _VALUE_BYTES = 72, 240, 40  # estimated bytes of an empty list, an object with one entry, and any other value


class UnreadableDocument(UserError):
    """An error for a file, or a part of a file, from which no trace can be read.

    `registry.read` yields these errors together with the traces. `path` is the file. `position` is the position in the file, such as "line
    3" or "span 1f..."; if it is empty, the error concerns the entire file.
    """

    def __init__(self, path: Path, position: str, message: str, *, fix: str = "") -> None:
        self.path, self.position = path, position
        super().__init__(printable(f"{f'{path}, {position}' if position else path}: {message}", 1000), fix=fix)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The location of a document."""

    path: Path
    name: str  # relative to the folder that is read
    position: str = ""

    @property
    def origin(self) -> dict[str, str]:
        """The file name and the position in the file, as entries of `Trace.origin`."""
        return {"file": self.name} | ({"place": self.position} if self.position else {})

    def unreadable(self, error: Exception, *, position: str = "", fix: str) -> UnreadableDocument:
        """Returns an `UnreadableDocument` for this location. If `error` has a fix, that fix is used instead of `fix`."""
        message = "is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "message", "") or str(error)
        where = ", ".join(part for part in (self.position, position) if part)
        return UnreadableDocument(self.path, where, message, fix=getattr(error, "fix", "") or fix)


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON value and its location."""

    value: Any
    location: SourceLocation


def documents(path: Path) -> Iterator[Document | UnreadableDocument]:
    """Yields the documents in a file, or in all JSON files below a folder, ordered by path. Unreadable documents are yielded as errors.

    Symbolic links below a folder are skipped. Raises `UserError` if the path does not exist, or if the folder contains no JSON files or
    more than `MOST_FILES`.
    """
    if path.is_dir():
        files = _files_below(path)
    elif path.is_file():
        files = [path]
    else:
        raise UserError(f"{path} does not exist or is not a file", fix=f"give a file, or a folder of {', '.join(SUFFIXES)}")
    for file in files:
        location = SourceLocation(file, file.relative_to(path).as_posix() if path.is_dir() else file.name)
        try:
            yield from _documents_of(location)
        except OSError as error:
            yield location.unreadable(ValueError(f"cannot be read: {error.strerror}"), fix="make it readable")
        except ValueError as error:  # the path is no longer a file
            yield location.unreadable(error, fix="give a file")


def decode_document(data: bytes) -> Any:
    """Returns the JSON value that UTF-8 bytes encode.

    Raises `ValueError` if the bytes are empty, too many (`LARGEST`) or not JSON in UTF-8, or if the value would need too much memory.
    """
    if len(data) > LARGEST:
        raise UserError(f"is larger than {LARGEST >> 20} MiB", fix="split it: the lines of a .jsonl file are read one by one")
    lists, objects, parts = data.count(b"["), data.count(b"{"), data.count(b",") + data.count(b":")
    if lists * _LIST_BYTES + objects * _OBJECT_BYTES + parts * _VALUE_BYTES > LARGEST_IN_MEMORY:
        raise UserError("contains too many values to be read at once", fix="split it into several files")
    if not data.strip():
        raise ValueError("is empty")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _files_below(folder: Path) -> list[Path]:
    files: list[Path] = []
    for path in folder.rglob("*"):
        if path.suffix.lower() in SUFFIXES and not path.is_symlink() and path.is_file():
            files.append(path)
            if len(files) > MOST_FILES:
                raise UserError(f"{folder} contains more than {MOST_FILES} files", fix="import its subfolders one by one")
    if not files:
        raise UserError(f"{folder} contains no files whose names end in {', '.join(SUFFIXES)}", fix="give the folder of the export")
    return sorted(files)


def _documents_of(location: SourceLocation) -> Iterator[Document | UnreadableDocument]:
    with open_file(location.path) as file:
        if _has_lines(location, file):
            file.seek(0)
            yield from _line_documents(location, file)
            return
        file.seek(0)
        try:
            yield Document(decode_document(file.read(LARGEST + 1)), location)
        except (ValueError, RecursionError) as error:
            yield location.unreadable(error, fix="export it again, or remove everything that is not JSON")


def _has_lines(location: SourceLocation, file: IO[bytes]) -> bool:
    """Whether a file contains one document per line: its first nonblank line is a document, and other nonblank lines follow.

    If the first nonblank line cannot be decoded, the file is assumed to contain lines if its name ends in .jsonl or .ndjson, or if that
    line starts with { and ends with }.
    """
    first = b""
    while not first.strip():
        first = file.readline(LARGEST + 1)
        if not first:
            return False
    try:
        decode_document(first)
    except (ValueError, RecursionError):
        start = first.strip()
        return location.path.suffix.lower() in _LINE_SUFFIXES or (start.startswith(b"{") and start.endswith(b"}"))
    return any(line.strip() for line in iter(lambda: file.readline(1 << 16), b""))


def _line_documents(location: SourceLocation, file: IO[bytes]) -> Iterator[Document | UnreadableDocument]:
    number = 0
    while line := file.readline(LARGEST + 1):
        number += 1
        here = replace(location, position=f"line {number}")
        complete = len(line) <= LARGEST
        while not complete and line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        if complete and not line.strip():
            continue
        try:
            if not complete:
                raise ValueError(f"is longer than {LARGEST >> 20} MiB")
            yield Document(decode_document(line), here)
        except (ValueError, RecursionError) as error:
            yield here.unreadable(error, fix="remove or repair the line; the other lines are read")
