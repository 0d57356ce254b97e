"""Reads growing JSON-lines files of a run incrementally: each refresh reads the lines that were added since the previous refresh."""

from __future__ import annotations

import math
import os
import statistics
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from agentrl.base.untrusted_files import open_file
from agentrl.observe.rundata import is_finite, note_unreadable, parse_object

MAX_LINE = 1 << 20
"""Maximum line length in bytes. Longer lines are skipped."""
MAX_CELLS = 4_000_000
"""Maximum number of metric values per run in memory, at 8 bytes each. Steps beyond that limit are not shown."""
MAX_KEYS = 2000
MAX_ROWS = 500_000
MAX_NUMBER = 1e100
"""Numbers with a larger absolute value are not shown, so that sums and squares of the shown numbers are finite."""
MAX_BYTES = 1 << 30
"""Maximum file size in bytes. A larger file is not read."""
_PIECE = 4 << 20
_TIMED_STEPS = 10  # number of newest steps from which the remaining time is estimated
_MAX_LEFT_S = 1e9  # bound on the remaining time, because a third party's run may contain any number


class JsonTail(ABC):
    """Reads a growing file, and calls `_add` once for each complete line that is a JSON object.

    If the file was replaced or truncated, calls `_clear` and reads the file from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restart(None)

    @property
    def notes(self) -> list[str]:
        """Messages about lines that could not be read."""
        bad = self._bad_lines
        return [f"{self.path.name}: {bad} unreadable {'line' if bad == 1 else 'lines'} ignored"] if bad else []

    @abstractmethod
    def _add(self, line: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...

    def refresh(self) -> bool:
        """Reads the lines that were added since the last call. Returns whether the file has changed.

        A missing file counts as empty. Raises `OSError` if the file cannot be read, and `ValueError` if it is too large or not a regular
        file.
        """
        try:
            with open_file(self.path, inside=self.path.parent) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._restart((status.st_dev, status.st_ino))
                if status.st_size == self._offset:
                    return False
                if status.st_size > MAX_BYTES:
                    raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")
                file.seek(self._offset)
                while piece := file.read(min(_PIECE, status.st_size - self._offset)):
                    self._offset += len(piece)
                    self._take(piece)
                return True
        except FileNotFoundError:
            had = self._file is not None
            self._restart(None)
            return had

    def _restart(self, file: tuple[int, int] | None) -> None:
        self._file, self._offset, self._rest, self._skipping, self._bad_lines = file, 0, b"", False, 0
        self._clear()

    def _take(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif len(line) > MAX_LINE:
                self._bad_lines += 1
            elif line.strip():
                data = parse_object(line.decode("utf-8", "replace"))
                if data is None:
                    self._bad_lines += 1
                else:
                    self._add(data)
        if len(self._rest) > MAX_LINE:
            self._bad_lines += not self._skipping
            self._rest, self._skipping = b"", True


class MetricsTable(JsonTail):
    """The metrics of a run's steps, as columns of numbers. If a resumed run repeated a step, the newest values of the step are used."""

    _sorted: list[int]

    @property
    def notes(self) -> list[str]:
        """Messages about lines that could not be read, and about steps that are not shown."""
        limits = f"{MAX_ROWS:,} steps or {MAX_CELLS:,} numbers"
        return super().notes + ([f"metrics.jsonl has more than {limits}; the later ones are not shown"] if self._full else [])

    @property
    def steps(self) -> list[int]:
        """The steps, in ascending order."""
        if len(self._sorted) != len(self._rows):
            self._sorted = sorted(self._rows)
        return self._sorted

    @property
    def keys(self) -> list[str]:
        """The names of the metrics."""
        return sorted(self._columns)

    @property
    def cells(self) -> int:
        """The number of metric values in memory."""
        return len(self._rows) * len(self._columns)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Returns pairs (step, value) for the steps whose value of `key` is a finite number, in order."""
        column = self._columns.get(key)
        if column is None:
            return []
        return [(step, value) for step in self.steps if not math.isnan(value := _at(column, self._rows[step]))]

    def curve(self, key: str, most: int) -> list[tuple[int, float]]:
        """Returns about `most` points of a metric's curve, or fewer.

        A longer curve is reduced to the minimum and maximum in each interval of steps.
        """
        points = self.series(key)
        if len(points) <= most:
            return points
        size = math.ceil(2 * len(points) / most)
        thinned: set[tuple[int, float]] = {points[0], points[-1]}
        for start in range(0, len(points), size):
            piece = points[start : start + size]
            thinned |= {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        return sorted(thinned)

    def row(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step; empty if the step is unknown."""
        if (row := self._rows.get(step)) is None:
            return {}
        values = ((key, _at(column, row)) for key, column in self._columns.items())
        return {"step": float(step)} | {key: value for key, value in sorted(values) if not math.isnan(value)}

    def rows(self, steps: Sequence[int] | None = None) -> list[dict[str, float]]:
        """Returns the metrics of the given steps, or of all steps if `steps` is None."""
        return [self.row(step) for step in (self.steps if steps is None else steps)]

    def seconds_left(self, total: float | None) -> float | None:
        """Returns the estimated seconds until `total` steps are done, from the median duration of the newest steps.

        Returns None if `total` is None or no duration is known.
        """
        times = [seconds for _, seconds in self.series("step_s")[-_TIMED_STEPS:]]
        if total is None or not times:
            return None
        return min(_MAX_LEFT_S, max(0, total - self.steps[-1]) * statistics.median(times))

    def _clear(self) -> None:
        self._rows: dict[int, int] = {}
        self._sorted = []
        self._columns: dict[str, array[float]] = {}
        self._full = False

    def _add(self, line: Mapping[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            return
        rows = len(self._rows) + (step not in self._rows)
        if rows * max(1, len(self._columns)) > MAX_CELLS or rows > MAX_ROWS:
            self._full = True
            return
        most_keys = min(MAX_KEYS, MAX_CELLS // rows)  # each metric takes up one number per step
        row = self._rows.setdefault(step, len(self._rows))
        for column in self._columns.values():
            if row < len(column):
                column[row] = math.nan
        for key, value in line.items():
            if key == "step" or not _is_shown(value):
                continue
            if (name := key[:200]) in self._columns or len(self._columns) < most_keys:
                column = self._columns.setdefault(name, array("d"))
                while len(column) <= row:
                    column.append(math.nan)
                column[row] = value


def _is_shown(value: Any) -> TypeGuard[float]:
    return is_finite(value) and abs(value) <= MAX_NUMBER


def _at(column: array[float], row: int) -> float:
    return column[row] if row < len(column) else math.nan


class TaskTable(JsonTail):
    """The kind and mean score of each group, from `tasks.jsonl`. Each name of a kind is stored once in memory."""

    MAX_GROUPS = 500_000

    def kind(self, group: int) -> str:
        """Returns the kind of a group's task; empty if the kind is unknown."""
        row = self._groups.get(group)
        return "" if row is None else self._names[self._kinds[row]]

    def mean(self, group: int) -> float | None:
        """Returns the mean score of a group; None if the mean is unknown."""
        row = self._groups.get(group)
        return None if row is None or math.isnan(self._means[row]) else self._means[row]

    def _clear(self) -> None:
        self._groups: dict[int, int] = {}
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._kinds, self._means = array("H"), array("d")

    def _add(self, line: Mapping[str, Any]) -> None:
        group, kind, mean = line.get("group"), line.get("kind"), line.get("mean")
        if not isinstance(group, int) or isinstance(group, bool) or not isinstance(kind, str) or len(self._groups) >= self.MAX_GROUPS:
            return
        name = kind[:80] if len(self._names) < 1000 or kind[:80] in self._numbers else "others"
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        self._groups[group] = len(self._kinds)
        self._kinds.append(self._numbers[name])
        self._means.append(mean if _is_shown(mean) else math.nan)


def read_new_lines(table: JsonTail, notes: list[str]) -> None:
    """Reads the lines that were added to a table's file. Adds notes about unreadable files and lines to `notes`."""
    try:
        table.refresh()
    except (OSError, ValueError) as error:
        note_unreadable(table.path, error, notes)
    notes += table.notes
