"""Prepares evaluations of suites by version for the gate's section of the report and for the history page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import numbered_folders, write_atomically
from agentrl.observe.charts import Chart, Series
from agentrl.observe.markup import Table, render
from agentrl.observe.rundata import Line, as_list, is_finite, read_lines, read_object
from agentrl.observe.transcripts import ShownEpisode, show_episode

_PAIRS_SHOWN = 8
_MAX_BYTES = 64 << 20  # maximum size of one file in bytes
_MAX_REASON = 600  # maximum number of characters in a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSection:
    """The gate's section of the report. `rows` is empty if the run has no gate."""

    rows: tuple[tuple[str, ...], ...]  # version, verdict, rate, cost, reason
    chart: Chart | None
    regressed: tuple[tuple[str, tuple[ShownEpisode, ...]], ...]  # title, episodes from the baseline version and from the blocked version
    notes: tuple[str, ...]  # messages about what could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One evaluation of a suite, as a row of its history. `tokens`, `turns` and `seconds` are means per attempt."""

    of: str  # the run or model, with its version
    sha256: str  # shortened hash of the weights
    at: str  # UTC
    version: int
    rate: float | None  # pass@1; None if no attempt was scored
    low: float
    high: float
    k: int
    pass_at_k: float | None
    tokens: float
    turns: float
    seconds: float
    attempts: int
    unscored: int
    changed: str = ""  # what differs from the previous evaluation: suite, sampling, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteHistory:
    """The evaluations of one suite, as rows of the history page."""

    suite: str
    rows: tuple[HistoryRow, ...]

    @property
    def by_version(self) -> bool:
        """Whether the version numbers of the rows are distinct and in ascending order."""
        numbers = [row.version for row in self.rows]
        return numbers == sorted(set(numbers))

    def chart(self) -> Chart | None:
        """Returns a chart of pass@1 with its interval and, if cases have several attempts, of pass@k. Returns None if no attempt was
        scored."""
        xs = [float(row.version) if self.by_version else float(number) for number, row in enumerate(self.rows, 1)]
        scored = [(x, row.rate, row) for x, row in zip(xs, self.rows, strict=True) if row.rate is not None]
        several = tuple((x, row.pass_at_k) for x, _, row in scored if row.k > 1 and row.pass_at_k is not None)
        rates = [(x, rate, row.low, row.high) for x, rate, row in scored]
        return _success_chart(f"Success on {self.suite}", rates, several, x_name="version" if self.by_version else "evaluation")

    def table(self) -> Table:
        """Returns a table with one row per evaluation."""
        columns = ("pass@1", "95% interval", "pass@k", "tokens", "turns", "seconds", "attempts", "unscored", "weights", "when", "changed")
        return Table(title="policy", columns=columns, rows=tuple((row.of, _cells(row)) for row in self.rows))


def write_history_page(path: Path, histories: Sequence[SuiteHistory]) -> None:
    """Writes the history page, one HTML file that needs no other files, with the histories of suites."""
    drawn = [(history.suite, history.chart(), history.table()) for history in histories]
    write_atomically(path, render("history.html", histories=drawn))


def read_gate_section(run_dir: Path) -> GateSection:
    """Reads the gate's section from `gate/` in a run folder: the files `*/verdict.json` and the episodes that each verdict lists.
    The notes of the section name unreadable files."""
    notes: list[str] = []
    folder = run_dir / "gate"
    numbers = [int(path.name) for path in numbered_folders(folder)]
    verdicts = [verdict for number in numbers if (verdict := _verdict(folder, number, notes)) is not None]
    regressed = [case for verdict in reversed(verdicts) for case in _regressed_cases(folder, verdict, notes)]
    rates = []
    for verdict in verdicts:
        rate, low, high = _figures(verdict, "pass_at_1", "low", "high")
        if rate is not None and low is not None and high is not None:
            rates.append((float(verdict["version"]), rate, low, high))
    return GateSection(
        rows=tuple(map(_gate_row, verdicts)),
        chart=_success_chart("Success on the suite by version", rates, (), x_name="version"),
        regressed=tuple(regressed[:_PAIRS_SHOWN]),
        notes=tuple(notes),
    )


def _success_chart(
    title: str, rates: Sequence[tuple[float, float, float, float]], pass_at_k: tuple[tuple[float, float], ...], *, x_name: str
) -> Chart | None:
    """Returns a chart of pass@1 and pass@k. `rates` contains, for each point, x, pass@1, and the bounds of the interval of pass@1."""
    if not rates:
        return None
    points, intervals = tuple((x, rate) for x, rate, _, _ in rates), tuple((x, low, high) for x, _, low, high in rates)
    series = [Series(label="pass@1", points=points, intervals=intervals)]
    if pass_at_k:
        series.append(Series(label="pass@k", points=pass_at_k))
    return Chart(title=title, series=series, form="rate", y_range=(0.0, 1.0), x_name=x_name, height=240)


def _cells(row: HistoryRow) -> tuple[str, ...]:
    rate = "-" if row.rate is None else f"{row.rate:.3f}"
    interval = "-" if row.rate is None else f"[{row.low:.3f}, {row.high:.3f}]"
    several = f"{row.pass_at_k:.3f} (k={row.k})" if row.k > 1 and row.pass_at_k is not None else "-"
    figures = (f"{row.tokens:.0f}", f"{row.turns:.1f}", f"{row.seconds:.1f}", str(row.attempts), str(row.unscored))
    return (rate, interval, several, *figures, row.sha256 or "-", row.at, row.changed or "-")


def _verdict(folder: Path, number: int, notes: list[str]) -> Line | None:
    path = folder / f"{number:06d}" / "verdict.json"
    if not path.exists():
        return None
    verdict = read_object(path, [], most=_MAX_BYTES)
    if verdict.get("version") != number:
        notes.append(f"gate/{number:06d}/verdict.json cannot be read")
        return None
    return verdict


def _gate_row(verdict: Line) -> tuple[str, ...]:
    rate, low, high, k, several, seconds = _figures(verdict, "pass_at_1", "low", "high", "k", "pass_at_k", "wall_s")
    shown = "none scored" if rate is None else f"{rate:.1%}"
    if low is not None and high is not None:
        shown += f" [{low:.1%}, {high:.1%}]"
    if k is not None and k > 1 and several is not None:
        shown += f", pass@{k:.0f} {several:.1%}"
    tokens, attempts, turns = _figures(verdict, "tokens", "attempts", "turns")
    cost = f"{tokens / attempts:.0f} tokens, {turns or 0:.1f} turns" if tokens is not None and attempts else ""
    cost += f"; {seconds:.1f} s in total" if cost and seconds else ""
    return str(verdict["version"]), str(verdict.get("outcome", "")), shown, cost, str(verdict.get("reason", ""))[:_MAX_REASON]


def _regressed_cases(folder: Path, verdict: Line, notes: list[str]) -> Iterator[tuple[str, tuple[ShownEpisode, ...]]]:
    regressions = [regression for regression in as_list(verdict.get("regressions")) if isinstance(regression, dict)]
    version, baseline = verdict["version"], verdict.get("reference")
    if not regressions or not isinstance(baseline, int):
        return
    ours = _episodes(folder / f"{version:06d}", {str(regression.get("episode")) for regression in regressions}, notes)
    theirs = _episodes(folder / f"{baseline:06d}", {str(regression.get("before_episode")) for regression in regressions}, notes)
    for regression in regressions:
        before, after = theirs.get(str(regression.get("before_episode"))), ours.get(str(regression.get("episode")))
        if before is not None and after is not None:
            turn = f", with the first difference at turn {regression['turn']}" if isinstance(regression.get("turn"), int) else ""
            title = f"version {version} was {verdict.get('outcome', '')}: case {regression.get('case', '')}{turn}"
            yield title, (show_episode(before, f"version {baseline}, passed"), show_episode(after, f"version {version}, failed"))


def _episodes(folder: Path, wanted: set[str], notes: list[str]) -> dict[str, Line]:
    lines = read_lines(folder / "episodes.jsonl", {"episode": str}, notes, most=_MAX_BYTES)
    return {line["episode"]: line for line in lines if line["episode"] in wanted}


def _figures(verdict: Line, *names: str) -> list[float | None]:
    """Returns the figures `names` of a verdict, in order, with None in place of a figure that is not a finite number."""
    figures = verdict.get("figures")
    values = [figures.get(name) if isinstance(figures, dict) else None for name in names]
    return [value if is_finite(value) else None for value in values]
