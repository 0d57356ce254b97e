"""Figures as a table that a spreadsheet opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.config import Recipe
from agentrl.protocols import Interval, Tracker


class CsvTracker(Tracker):
    def __init__(self, run_dir: Path, recipe: Recipe, *, columns: list[str]) -> None:
        self._columns, self._path = columns, run_dir / "figures.csv"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._row(step, *(metrics.get(name, "") for name in self._columns))

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        for split, rate in rates.items():
            self._row(phase, split, rate.value, rate.n)

    def _row(self, *cells: object) -> None:
        with self._path.open("a") as file:
            file.write(",".join(map(str, cells)) + "\n")
