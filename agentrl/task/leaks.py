"""Finds answers that an agent can read: in its task's files, its prompt, or the image's files.

The truth of a task consists of the values in `Task.data` under keys such as `answer`, the output of the gold solution, and the tests and
solution of a task folder. A leak is

    a failure  if a file contains only the truth, and the truth has at least LONG characters or the file is named like an answer; if the
               truth is next to a key or in a column such as `answer`; or if the file contains a test or the gold solution
    a note     if a truth of at least LONG characters appears verbatim, which is intended if the agent's task is to look it up
"""

from __future__ import annotations

import ast
import base64
import binascii
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.records import Task
from agentrl.task.grading import GRADING_KEY, Grading

LONG = 8  # minimum length of a truth that does not appear by chance, in characters
SOURCE = 32  # minimum length of a test or solution that is recognised in another file, in characters
LONGEST = 10_000
MAX_FILE = 4 << 20  # maximum number of bytes that are searched in a file

_TRUE_KEYS = r"answers?|solutions?|expected(?:_\w+)?|ground_?truth|truths?|gold(?:en)?(?:_\w+)?|correct(?:_\w+)?"
_DATA_KEY = re.compile(rf"(?:{_TRUE_KEYS}|targets?|labels?|results?|references?)", re.IGNORECASE)
_FILE_NAME = re.compile(rf"(?:.*[^a-z])?(?:{_TRUE_KEYS})(?:[^a-z].*)?", re.IGNORECASE)
_COLUMN = re.compile(rf"(?:{_TRUE_KEYS})", re.IGNORECASE)
_PAIR = re.compile(rf"(?<![A-Za-z])(?:{_TRUE_KEYS})\b[\"']?\s*(?::|=>|=|\bis\b)\s*[\"']?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A string that an agent must not see, and its origin."""

    text: str
    origin: str  # such as data.answer
    is_source: bool = False  # the full text of a test or solution
    is_compared: bool = False  # a test compares a value with it, perhaps to check that an input is unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A truth that an agent could read. `certain`: whether the leak is almost certainly a mistake."""

    path: str
    how: str
    truth: Truth
    certain: bool


def hidden_truths(task: Task, printed: str = "") -> tuple[Truth, ...]:
    """Returns the strings, of at most `LONGEST` characters, that an agent must not be able to read. `printed`: output of the gold solution,
    if that is the answer."""
    known = [
        Truth(text=text, origin=f"data.{key}") for key, value in task.data.items() if key != GRADING_KEY for text in _answers(key, value)
    ]
    if printed.strip() and not task.outputs:
        known.append(Truth(text=printed.strip(), origin="the gold solution's output"))
    if GRADING_KEY in task.data:
        known += _hidden(Grading.model_validate(task.data[GRADING_KEY]))
    return tuple({truth.text: truth for truth in reversed(known) if 0 < len(truth.text) <= LONGEST}.values())


def _answers(key: str, value: Any) -> Iterator[str]:
    """Yields the strings under keys that are named like an answer."""
    if not _DATA_KEY.fullmatch(key.rpartition(".")[2]):
        if isinstance(value, Mapping):
            for inner, part in value.items():
                yield from _answers(str(inner), part)
        return
    if isinstance(value, Mapping | list | tuple):
        parts = list(value.values()) if isinstance(value, Mapping) else list(value)
        yield json.dumps(value, ensure_ascii=False, default=str)
        yield from (str(part) for part in parts if isinstance(part, str | int | float) and len(str(part)) >= LONG)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value).strip()


def _hidden(grading: Grading) -> Iterator[Truth]:
    """Yields the tests and the solution, and strings of `LONG` characters or more that the tests use in comparisons."""
    tests = {f"tests/{path}": data for path, data in grading.files().items()}
    for path, data in {**tests, **_solution(grading.gold)}.items():
        text = data.decode("utf-8", "replace").strip()
        name = path.rpartition("/")[2]
        if len(text) >= SOURCE and (name.endswith((".py", ".sh")) or _FILE_NAME.fullmatch(name.partition(".")[0])):
            yield Truth(text=text, origin=path, is_source=True)
        if path.startswith("tests/") and name.endswith(".py"):
            yield from (Truth(text=compared, origin=path, is_compared=True) for compared in _compared(text))


def _solution(gold: str) -> dict[str, bytes]:
    """Returns the files of solution/ that a task folder's gold program contains."""
    for node in ast.walk(ast.parse(gold or "pass")):
        if isinstance(node, ast.Dict):
            try:
                packed = ast.literal_eval(node)
                return {f"solution/{path}": base64.b64decode(text, validate=True) for path, text in packed.items()}
            except (ValueError, TypeError, binascii.Error):
                continue
    return {}


def _compared(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value.strip()) >= LONG:
                    yield part.value.strip()


def find_leaks(files: Mapping[str, bytes], wanted: Iterable[Truth]) -> list[Leak]:
    """Returns the leaks in `files`. If a file leaks a truth in several ways, only the most obvious leak is returned."""
    readable: list[Leak] = []
    known = list(wanted)
    for path, data in files.items():
        text = data[:MAX_FILE].decode("utf-8", "replace")
        stripped = text.strip()
        labelled = list(_labelled_texts(stripped)) if known else []
        readable += filter(None, (_leak(path, stripped, labelled, truth) for truth in known))
    return readable


def _leak(path: str, text: str, labelled: list[str], truth: Truth) -> Leak | None:
    wanted = truth.text
    if truth.is_source:
        return Leak(path=path, how="contains a copy of", truth=truth, certain=True) if wanted in text else None
    if text.strip("\"'") == wanted:
        named = _FILE_NAME.fullmatch(path.rpartition("/")[2].partition(".")[0]) is not None
        sure = named or (len(wanted) >= LONG and not truth.is_compared)
        return Leak(path=path, how="contains only", truth=truth, certain=sure) if sure or len(wanted) >= LONG else None
    if any(_begins(rest, wanted) for rest in labelled):
        return Leak(path=path, how="contains, next to its key,", truth=truth, certain=True)
    if len(wanted) >= LONG and (wanted in text or wanted in path):
        return Leak(path=path, how="contains, among other text,", truth=truth, certain=False)
    return None


def _labelled_texts(text: str) -> Iterator[str]:
    """Yields the text after each key such as `answer:`, and the values in columns whose header is such a key."""
    for match in _PAIR.finditer(text):
        yield text[match.end() : match.end() + LONGEST + 2]
    lines = text.splitlines()
    for mark in (",", ";", "\t"):
        header = lines[0].split(mark) if lines else []
        if len(header) < 2:
            continue
        columns = [number for number, name in enumerate(header) if _COLUMN.fullmatch(name.strip().strip('"'))]
        if columns:
            try:
                rows = list(csv.reader(lines[1:], delimiter=mark))
            except csv.Error:
                continue
            yield from (row[number].strip() for row in rows for number in columns if number < len(row))


def _begins(rest: str, wanted: str) -> bool:
    """Whether `rest` starts with the truth as a full word: 4 does not match 42 or 4.5."""
    if not rest.startswith(wanted):
        return False
    after = rest[len(wanted) : len(wanted) + 2]
    return not re.match(r"\w|[.,]\d", after)


def without_truth(value: Any) -> Any:
    """Returns the readable part of a task's JSON data. Excludes values under keys that are named like an answer, and the tests and the
    solution."""
    if isinstance(value, Mapping):
        readable = (
            (str(key), entry) for key, entry in value.items() if key != GRADING_KEY and not _DATA_KEY.fullmatch(str(key).rpartition(".")[2])
        )
        return {key: without_truth(entry) for key, entry in readable}
    return [without_truth(entry) for entry in value] if isinstance(value, list | tuple) else value
