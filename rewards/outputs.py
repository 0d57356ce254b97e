"""Files and state: what the agent left at the task's declared outputs, compared with the truth by content.

    rewards.outputs:outputs      with task.outputs = ("report.json",) and
                                 task.data = {"answer": {"report.json": {"json": {"rows": 4}}, "table.csv": {"table": "a,b\\n1,2\\n"}}}

The truth of each path is one of: {"text": ...}, {"json": ...} (equal as JSON), {"has": ...} (JSON that holds at least this: the state of a
world after the agent acted, without what does not matter), {"table": ...} (CSV with a header), or {"absent": true}.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from agentrl.contract.values import number, same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import Configured
from rewards.json_schema import strict_json

MAX_CELLS = 200_000
_NEAR = 300  # rows that are compared with a tolerance
KINDS = ("text", "json", "has", "table", "absent")


class Outputs(Configured):
    """1 when every path holds what the truth says, else 0; the part `files` is the share that does. Settings in `task.data["outputs"]`.

    Text is UTF-8; line ends and white space at the end of the file play no part. In tables the order of columns plays no part, nor that of
    rows unless `row_order`; cells that are numbers are compared as numbers.
    """

    name: ClassVar[str] = "outputs"

    relative: float = Field(1e-9, ge=0, lt=1)
    """How far numbers in JSON and tables may be from the truth, relative to it. Two whole numbers must be equal."""
    row_order: bool = False
    """Whether the order of a table's rows matters."""
    longest: int = Field(1_000_000, gt=0)
    """Bytes of a file; a longer one is wrong."""

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.of(task)
        truth = rules.wanted(task)
        if not isinstance(truth, Mapping) or not truth:
            raise TaskError(f"task {task.id}: the truth of its outputs is no object of paths")
        told = await asyncio.to_thread(rules._problems, task.id, truth, episode.outputs)  # a large table takes a while to compare
        wrong = {path: problem for path, problem in told.items() if problem}
        share = 1 - len(wrong) / len(told)
        evidence = "; ".join(f"{path}: {problem}" for path, problem in wrong.items())
        return Score(value=float(not wrong), parts={"files": share}, evidence=evidence[:2000])

    def _problems(self, task_id: str, truth: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, str]:
        """Path -> what is wrong with the file there; empty when it is right. Raises `TaskError`."""
        told: dict[str, str] = {}
        for path, due in truth.items():
            if not isinstance(due, Mapping) or len(due) != 1 or not set(due) <= set(KINDS):
                raise TaskError(f"task {task_id}: the truth of {path} is none of {', '.join(KINDS)}")
            ((kind, content),) = due.items()
            try:
                told[path] = self._problem(kind, content, files.get(path))
            except _BadTruth as error:
                raise TaskError(f"task {task_id}: the truth of {path}: {error}") from None
        return told

    def _problem(self, kind: str, due: Any, data: bytes | None) -> str:
        """What is wrong with a file; empty when it is right."""
        if kind == "absent":
            return "" if data is None else "it is there"
        if data is None:
            return "it is missing"
        if len(data) > self.longest:
            return f"{len(data)} bytes, more than {self.longest}"
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return "it is not UTF-8"
        if kind == "text":
            return "" if _lines(text) == _lines(str(due)) else "another text"
        if kind == "table":
            return self._table(text, due)
        try:
            value = strict_json(text)
            return "" if same(value, due, relative=self.relative, part=kind == "has") else "another value"
        except (ValueError, RecursionError) as error:
            return f"no JSON: {str(error)[:100]}"

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
        if self.row_order:
            return "" if all(map(self._near, rows, due_rows)) else "other rows, or in another order"
        return "" if self._same_bag(rows, due_rows) else "other rows"

    def _same_bag(self, rows: Sequence[tuple[str, ...]], due: Sequence[tuple[str, ...]]) -> bool:
        """Whether two bags of rows are equal: rows that are exactly so are taken away, and what remains is paired."""
        one, other = Counter(rows), Counter(due)
        rest, left = list((one - other).elements()), list((other - one).elements())
        if len(rest) > _NEAR:
            return False
        for row in rest:
            place = next((place for place, true in enumerate(left) if self._near(row, true)), None)
            if place is None:
                return False
            del left[place]
        return True

    def _near(self, one: Sequence[str], other: Sequence[str]) -> bool:
        return all(a == b or _same_cell(a, b, self.relative) for a, b in zip(one, other, strict=True))


class _BadTruth(Exception):
    """A truth that cannot be compared with."""


def same(given: Any, wanted: Any, *, relative: float, part: bool = False) -> bool:
    """Whether two JSON values are equal, numbers within a tolerance; `part`: whether objects of `given` may have further keys."""
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
    """The rows of a CSV text, its header first; cells without white space at their ends. Raises `ValueError`."""
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text.lstrip("\ufeff")), strict=True) if row]
    except csv.Error as error:
        raise ValueError(f"no table: {error}") from None
    if not rows or len(set(rows[0])) < len(rows[0]):
        raise ValueError("no table: it needs a header of different names")
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("no table: rows of different lengths")
    if len(rows) * len(rows[0]) > MAX_CELLS:
        raise ValueError(f"a table of more than {MAX_CELLS:,} cells")
    return rows


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").rstrip()


def _same_cell(one: str, other: str, relative: float) -> bool:
    given, wanted = number(one), number(other)
    return given is not None and wanted is not None and same_number(given, wanted, relative=relative)


outputs = Outputs()
