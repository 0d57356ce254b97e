"""Evaluations of suites in the order of their versions: a page with a table and a plot for each suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import write_atomically
from agentrl.observe.charts import Chart, Series, line_chart
from agentrl.observe.markup import render
from agentrl.observe.tables import Table

_SIZE = (1030, 240)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One evaluation of a suite. Of an attempt: `tokens` sampled, `turns`, `seconds`."""

    of: str  # the run or model, with its version
    sha256: str  # of its weights, shortened
    at: str  # UTC
    version: int
    rate: float | None  # pass@1; None: nothing was scored
    low: float
    high: float
    k: int
    pass_at_k: float | None
    tokens: float
    turns: float
    seconds: float
    attempts: int
    unscored: int
    changed: str = ""  # what is not as in the evaluation before: suite, sampling, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteHistory:
    """The evaluations of one suite."""

    suite: str
    rows: tuple[HistoryRow, ...]

    @property
    def by_version(self) -> bool:
        """Whether versions tell the order; else it is that of the rows."""
        numbers = [row.version for row in self.rows]
        return numbers == sorted(set(numbers))

    def chart(self) -> Chart | None:
        """pass@1 with its interval, and pass@k where attempts were several."""
        xs = [float(row.version) if self.by_version else float(place) for place, row in enumerate(self.rows, 1)]
        scored = [(x, row) for x, row in zip(xs, self.rows, strict=True) if row.rate is not None]
        if not scored:
            return None
        alone = Series(
            label="pass@1",
            color="c1",
            points=tuple((x, row.rate) for x, row in scored if row.rate is not None),
            intervals=tuple((x, row.low, row.high) for x, row in scored),
        )
        several = tuple((x, row.pass_at_k) for x, row in scored if row.k > 1 and row.pass_at_k is not None)
        series = [alone, Series(label="pass@k", color="c2", points=several)] if several else [alone]
        width, height = _SIZE
        return line_chart(
            series,
            title=f"Success on {self.suite}",
            width=width,
            height=height,
            y_range=(0.0, 1.0),
            y_format=lambda value: f"{value:.2f}",
            x_name="version" if self.by_version else "evaluation",
        )

    def table(self) -> Table:
        """A row for each evaluation, in words."""
        columns = (
            "pass@1",
            "95% interval",
            "pass@k",
            "tokens",
            "turns",
            "seconds",
            "attempts",
            "unscored",
            "weights",
            "when",
            "not as before",
        )
        return Table(title="of", columns=columns, rows=tuple((row.of, _cells(row)) for row in self.rows))


def write_history_page(path: Path, histories: Sequence[SuiteHistory]) -> None:
    """Writes one self-contained page."""
    drawn = [(history.suite, history.chart(), history.table()) for history in histories]
    write_atomically(path, render("history.html", histories=drawn))


def _cells(row: HistoryRow) -> tuple[str, ...]:
    rate = "-" if row.rate is None else f"{row.rate:.3f}"
    interval = "-" if row.rate is None else f"[{row.low:.3f}, {row.high:.3f}]"
    several = f"{row.pass_at_k:.3f} (k={row.k})" if row.k > 1 and row.pass_at_k is not None else "-"
    figures = (f"{row.tokens:.0f}", f"{row.turns:.1f}", f"{row.seconds:.1f}", str(row.attempts), str(row.unscored))
    return (rate, interval, several, *figures, row.sha256 or "-", row.at, row.changed or "-")
