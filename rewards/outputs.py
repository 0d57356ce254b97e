r"""Scores files and state: compares the content of the task's declared outputs with the truth.

    rewards.outputs:outputs      with task.outputs = ("report.json",) and
                                 task.data = {"answer": {"report.json": {"json": {"rows": 4}}, "table.csv": {"table": "a,b\\n1,2\\n"}}}

The truth of each path is one of: {"text": ...}; {"json": ...} (equal as JSON); {"has": ...} (JSON that contains at least this, for example
the relevant state of a world after the agent's actions); {"table": ...} (CSV with a header); or {"absent": true}.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from agentrl.base.numbers import parse_number, same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import ConfiguredVerifier
from agentrl.task.outputs import matches_pattern
from rewards import bags
from rewards.json_schema import strict_json

MAX_CELLS = 200_000
OUT_OF_TIME, REFUSED, CUT = "wall_limit", "outputs_refused", 2000  # as `agentrl.rollout` reports them; characters of a message
KINDS = ("text", "json", "has", "table", "absent")


class Outputs(ConfiguredVerifier):
    """Scores 1 if every path has the true content, else 0. The part `files` is the share of paths with the true content. Settings are in
    `task.data["outputs"]`.

    Text is UTF-8. A byte order mark, differences in line endings, and white space at the end of the file are ignored. The order of a
    table's columns is ignored, as is the order of its rows unless `row_order` is true. Numeric cells are compared as numbers. An absent
    path must not be a file, a folder or a link. A file that could not be collected does not count as absent, nor does any file in an
    episode that ran out of time.
    """

    name: ClassVar[str] = "outputs"

    relative: float = Field(1e-9, ge=0, lt=1)
    """Relative tolerance for numbers in JSON and in tables. Two whole numbers must be equal."""
    row_order: bool = False
    """Whether the order of a table's rows matters."""
    longest: int = Field(1_000_000, gt=0)
    """Maximum size of a file in bytes; a larger file is wrong."""

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the files. Raises `TaskError` if the truth or a setting is invalid."""
        rules = self.for_task(task)
        truth = rules.truth_of(task)
        if not isinstance(truth, Mapping) or not truth:
            raise TaskError(f"task {task.id}: the truth of its outputs must be an object whose keys are paths")
        for path, due in truth.items():
            if not any(matches_pattern(pattern, path) for pattern in task.outputs):
                raise TaskError(f"task {task.id}: its truth contains {path}, which is not an output", fix="add the path to Task.outputs")
            if isinstance(due, Mapping) and "absent" in due and path not in task.outputs:
                raise TaskError(
                    f"task {task.id}: {path} must be absent, but only a pattern in Task.outputs matches it",
                    fix="add the path itself to Task.outputs, because * does not match folders",
                )
        problems = await asyncio.to_thread(rules._problems, task.id, truth, episode)  # a large table takes a while to compare
        wrong = {path: problem for path, problem in problems.items() if problem}
        share = 1 - len(wrong) / len(problems)
        evidence = "; ".join(f"{path}: {problem}" for path, problem in wrong.items())
        return Score(value=float(not wrong), parts={"files": share}, evidence=evidence[:2000])

    def _problems(self, task_id: str, truth: Mapping[str, Any], episode: Episode) -> dict[str, str]:
        """Returns a mapping from each path to its problem; an empty problem means that the file is correct. Raises `TaskError`."""
        problems: dict[str, str] = {}
        for path, due in truth.items():
            if not isinstance(due, Mapping) or len(due) != 1 or not set(due) <= set(KINDS):
                raise TaskError(f"task {task_id}: the truth of {path} is not one of {', '.join(KINDS)}")
            ((kind, content),) = due.items()
            if kind == "absent" and content is not True:
                raise TaskError(f"task {task_id}: the truth of {path} has absent={content!r}, but only true has a meaning")
            try:
                problems[path] = _not_absent(episode, path) if kind == "absent" else self._problem(kind, content, episode.outputs.get(path))
            except _BadTruth as error:
                raise TaskError(f"task {task_id}: the truth of {path}: {error}") from None
        return problems

    def _problem(self, kind: str, due: Any, data: bytes | None) -> str:
        """Returns the problem with a file; empty if the file is correct."""
        written = due if isinstance(due, str) else json.dumps(due, ensure_ascii=False, separators=(",", ":"))
        if (least := len(written.encode("utf-8", "replace"))) > self.longest:
            raise _BadTruth(f"{least} bytes, more than the limit of an output (longest={self.longest})")
        if data is None:
            return "it is missing"
        if len(data) > self.longest:
            return f"{len(data)} bytes, more than {self.longest}"
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            return "it is not UTF-8"
        if kind == "text":
            return "" if _lines(text) == _lines(str(due)) else "different text"
        if kind == "table":
            return self._table(text, due)
        try:
            value = strict_json(text)
            return "" if same(value, due, relative=self.relative, part=kind == "has") else "a different value"
        except (ValueError, RecursionError) as error:
            return f"invalid JSON: {str(error)[:100]}"

    def _table(self, text: str, due: Any) -> str:
        try:
            wanted = table(due if isinstance(due, str) else "")
        except ValueError as error:
            raise _BadTruth(str(error)) from None
        try:
            given = table(text)
        except ValueError as error:
            return str(error)
        if sorted(given[0]) != sorted(wanted[0]):
            return f"columns {', '.join(given[0])[:100]!r}"
        if len(given) != len(wanted):
            return f"{len(given) - 1} rows, not {len(wanted) - 1}"
        places = [given[0].index(name) for name in wanted[0]]
        rows = [tuple(row[place] for place in places) for row in given[1:]]
        due_rows = [tuple(row) for row in wanted[1:]]
        cells = bags.Cells(near=partial(_same_cell, relative=self.relative), number=_finite, relative=self.relative)
        if self.row_order:
            same_rows = all(bags.near_rows(row, true, cells) for row, true in zip(rows, due_rows, strict=True))
            return "" if same_rows else "different rows, or a different order"
        if bags.crowded(due_rows, cells):
            raise _BadTruth(
                f"more than {bags.MAX_CROWD} rows are too close to each other to be distinguished with relative={self.relative}: "
                "lower it, or set row_order"
            )
        return "" if bags.same_bag(rows, due_rows, cells) else "different rows"


class _BadTruth(Exception):
    """A truth with which no file can be compared."""


def same(given: Any, wanted: Any, *, relative: float, part: bool = False) -> bool:
    """Whether two JSON values are equal, with numbers within a tolerance. `part`: whether objects in `given` may have additional keys."""
    if isinstance(given, bool) or isinstance(wanted, bool) or wanted is None:
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, Mapping):
        fits = wanted.keys() <= given.keys() if part else wanted.keys() == given.keys()
        return fits and all(same(given[key], wanted[key], relative=relative, part=part) for key in wanted)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(same(*pair, relative=relative, part=part) for pair in zip(given, wanted, strict=True))
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        return same_number(given, wanted, relative=relative)
    return type(given) is type(wanted) and bool(given == wanted)


def table(text: str) -> list[list[str]]:
    """Returns the rows of a CSV string, header first, with stripped cells. Raises `ValueError` if the table is invalid or too large."""
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True) if row]
    except csv.Error as error:
        raise ValueError(f"not a table: {error}") from None
    if not rows or len(set(rows[0])) < len(rows[0]):
        raise ValueError("not a table: its header must contain different names")
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("not a table: its rows have different lengths")
    if len(rows) * len(rows[0]) > MAX_CELLS:
        raise ValueError(f"a table of more than {MAX_CELLS:,} cells")
    return rows


def _not_absent(episode: Episode, path: str) -> str:
    """Returns why a path may not be absent; empty if it is absent. A folder or link at the path is a rejected output."""
    if path in episode.outputs:
        return "the file exists"
    if episode.stop_reason == OUT_OF_TIME:
        return "the episode ended before its files were collected"
    refused = [failure.message for failure in episode.failures if failure.kind == REFUSED]
    if any(f"{path}: " in message or "cannot be listed" in message or len(message) >= CUT for message in refused):
        return "the path is not a file, or the files could not be listed"
    return ""


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").rstrip()


def _same_cell(cell: str, true_cell: str, *, relative: float) -> bool:
    if cell == true_cell:
        return True
    given, wanted = parse_number(cell), parse_number(true_cell)
    return given is not None and wanted is not None and same_number(given, wanted, relative=relative)


def _finite(text: str) -> float | None:
    value = parse_number(text)
    try:
        return None if value is None else float(value)
    except OverflowError:
        return None


outputs = Outputs()
