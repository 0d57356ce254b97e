"""Compares runs: recipe settings that differ, success rates with intervals before and after training and by kind of task, and costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import StoreError, UserError
from agentrl.observe.report_data import read_summary
from agentrl.observe.rundata import Line, read_object
from agentrl.observe.stats import Rate, format_count, format_duration, format_interval, format_optional, format_rate, rate_difference
from agentrl.observe.summary import Summary
from agentrl.observe.tails import MetricsTable, read_new_lines

_MAX_RECIPE = 1 << 20
_MAX_TEXT = 60
MISSING = "(not set)"
_RATES = {  # field of the summary -> title
    "heldout_before": "held-out, before",
    "heldout_after": "held-out, after",
    "heldout_real_before": "held-out on real data, before",
    "heldout_real_after": "held-out on real data, after",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """One success rate per run, and the difference between the last and the first run with its 95% interval."""

    name: str
    rates: tuple[Rate | None, ...]

    @property
    def difference(self) -> tuple[float, float, float] | None:
        """The rate of the last run minus the rate of the first run, and the bounds of the interval; None if either rate is unknown.

        The two runs are treated as independent.
        """
        first, last = self.rates[0], self.rates[-1]
        return None if first is None or last is None else (last.value - first.value, *rate_difference(first, last))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A comparison of runs. Every tuple of values has one entry per run, in the order of the runs."""

    names: tuple[str, ...]
    settings: tuple[tuple[str, tuple[Any, ...]], ...]  # dotted key of the recipe, and its value in each run; only keys whose values differ
    rates: tuple[RateRow, ...]  # success on held-out tasks
    kinds: tuple[RateRow, ...]  # success after training, by kind of task
    costs: tuple[tuple[str, tuple[float | None, ...]], ...]
    notes: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """Returns the comparison as JSON data."""
        return {
            "names": list(self.names),
            "settings": [{"key": key, "values": list(values)} for key, values in self.settings],
            "rates": [_row_data(row) for row in self.rates],
            "kinds": [_row_data(row) for row in self.kinds],
            "costs": [{"name": name, "values": list(values)} for name, values in self.costs],
            "comparison_notes": list(self.notes),
        }

    def render(self) -> str:
        """Returns the comparison as a text table."""
        lines: list[tuple[str, ...]] = [("", *self.names, *(["last - first, 95% interval"] if self.rates else []))]
        lines += [(row.name, *map(_shown_rate, row.rates), _shown_difference(row)) for row in self.rates]
        lines += [(name, *(format_optional(value, _FORMATS[name]) for value in values)) for name, values in self.costs]
        tables = [_table(lines)]
        if self.settings:
            tables.append(_table([("settings that differ", *self.names), *((key, *map(_shown, values)) for key, values in self.settings)]))
        if self.kinds:
            rows = [(row.name, *map(_shown_rate, row.rates), _shown_difference(row)) for row in self.kinds]
            tables.append(_table([("success by kind, after", *self.names, "last - first, 95% interval"), *rows]))
        return "\n\n".join([*tables, *(f"note: {_printable(note)}" for note in self.notes)])


def compare_folders(folders: Sequence[Path]) -> RunComparison:
    """Compares run folders. Raises `UserError` if there are fewer than two folders, and `StoreError` if a folder does not exist."""
    if len(folders) < 2:
        raise UserError("a comparison needs at least two runs", fix="agentrl compare RUN RUN")
    runs = [_read(folder) for folder in folders]
    rates = [RateRow(name=title, rates=tuple(getattr(run.summary, key, None) for run in runs)) for key, title in _RATES.items()]
    kinds = sorted({kind for run in runs for kind in _kinds(run)})
    return RunComparison(
        names=tuple(run.name for run in runs),
        settings=tuple(_settings([run.recipe for run in runs])),
        rates=tuple(row for row in rates if any(row.rates)),
        kinds=tuple(RateRow(name=kind, rates=tuple(_kinds(run).get(kind) for run in runs)) for kind in kinds),
        costs=tuple(_costs(runs)),
        notes=tuple(f"{run.name}: {note}" for run in runs for note in run.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The data of one run in a comparison."""

    name: str
    recipe: Line
    summary: Summary | None
    metrics: MetricsTable
    notes: tuple[str, ...]

    def series(self, key: str) -> list[float]:
        """Returns the finite values of a metric, in the order of the steps."""
        return [value for _, value in self.metrics.series(key)]


def _read(folder: Path) -> _Run:
    if not folder.is_dir():
        raise StoreError(f"there is no run folder {folder}")
    notes: list[str] = []
    metrics = MetricsTable(folder / "metrics.jsonl")
    read_new_lines(metrics, notes)
    summary = read_summary(folder, notes)
    recipe = read_object(folder / "recipe.json", notes, most=_MAX_RECIPE)
    return _Run(name=folder.name, recipe=recipe, summary=summary, metrics=metrics, notes=tuple(notes))


def _kinds(run: _Run) -> Mapping[str, Rate]:
    return run.summary.by_kind.get("after", {}) if run.summary else {}


def _settings(recipes: Sequence[Line]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    flat = [dict(flatten(recipe)) for recipe in recipes]
    for key in sorted({key for settings in flat for key in settings}):
        values = tuple(settings.get(key, MISSING) for settings in flat)
        if any(value != values[0] for value in values[1:]):
            yield key, values


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields pairs (dotted key, value) for nested settings. The keys have the format of overrides, such as `learner.lr`. An
    empty mapping is a value."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_FORMATS = {
    "steps": lambda value: f"{value:,.0f}",
    "episodes": lambda value: f"{value:,.0f}",
    "tokens trained": format_count,
    "wall time": format_duration,
    "median step": lambda value: f"{value:.2f} s",
    "last reward": lambda value: f"{value:.3f}",
    "best reward": lambda value: f"{value:.3f}",
}


def _costs(runs: Sequence[_Run]) -> Iterator[tuple[str, tuple[float | None, ...]]]:
    yield "steps", tuple(float(run.metrics.steps[-1]) if run.metrics.steps else None for run in runs)
    yield "episodes", tuple(float(run.summary.episodes) if run.summary else None for run in runs)
    yield "tokens trained", tuple(sum(run.series("tokens_trained")) or None for run in runs)
    yield "wall time", tuple((sum(run.summary.wall_s.values()) or None) if run.summary else None for run in runs)
    yield "median step", tuple(statistics.median(times) if (times := run.series("step_s")) else None for run in runs)
    rewards = [run.series("reward_mean") for run in runs]
    yield "last reward", tuple(values[-1] if values else None for values in rewards)
    yield "best reward", tuple(max(values, default=None) for values in rewards)


def _row_data(row: RateRow) -> dict[str, Any]:
    return {"name": row.name, "rates": [None if rate is None else asdict(rate) for rate in row.rates], "difference": row.difference}


def _shown_rate(rate: Rate | None) -> str:
    return "-" if rate is None else f"{format_rate(rate)} [{format_interval(rate)}]"


def _shown_difference(row: RateRow) -> str:
    if row.difference is None:
        return ""
    value, low, high = (100 * number for number in row.difference)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _printable(text: str) -> str:
    """Returns the text as one line without terminal control sequences. Names of runs, settings and kinds may come from a third party."""
    return " ".join("".join(char if char.isprintable() or char == "\n" else "?" for char in text).split())


def _shown(value: Any) -> str:
    text = _printable(str(value))
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _table(rows: Sequence[Sequence[str]]) -> str:
    columns = max(map(len, rows))
    full = [[*map(_printable, row), *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(columns)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in full)
