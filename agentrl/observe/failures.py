"""The failures of a run as the report tells them, from what `failures/failures.json` says; whatever is not as it should be is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.observe.charts import Chart, Series, line_chart
from agentrl.observe.tables import Table
from agentrl.observe.transcripts import ShownEpisode, show_failure

_COLORS = ("c1", "c2", "c3", "c4")
_TAGS_DRAWN = len(_COLORS)
_EXAMPLES = 8
_COLUMNS = 10  # of phases, and of versions
_SIZE = (1030, 240)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresSection:
    """One section of the report."""

    note: str
    chart: Chart | None  # share of training episodes with each of the most frequent tags, by step
    tables: tuple[Table, ...]  # failures by tag: of phases, and of versions
    examples: tuple[ShownEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Episodes and tags of one step, phase or version."""

    name: str
    value: float  # of a step or version
    episodes: int
    tags: Mapping[str, int]


def failures_section(failures: Mapping[str, Any]) -> FailuresSection | None:
    """The section; None when nothing failed, or nothing was captured."""
    tags = _numbers(failures.get("tags"))
    if not tags:
        return None
    names = list(tags)
    kept, dropped = (failures.get(key) if isinstance(failures.get(key), int) else 0 for key in ("kept", "dropped"))
    steps, phases, versions = (_lines(failures.get(f"{name}s"), name) for name in ("step", "phase", "version"))
    listed = failures.get("examples")
    examples = [
        one for one in (listed if isinstance(listed, list) else ()) if isinstance(one, dict) and isinstance(one.get("messages"), list)
    ]
    return FailuresSection(
        note=f"{sum(tags.values()):,} episodes of training and evaluations failed. The first thing that went wrong in each, as rules"
        f" or people name it; {kept:,} traces are kept, {dropped:,} made room. agentrl failures shows them.",
        chart=_chart(steps, names[:_TAGS_DRAWN]),
        tables=tuple(table for table in (_table("phase", phases, names), _table("version, in training", versions, names)) if table.rows),
        examples=tuple(map(show_failure, examples[:_EXAMPLES])),
    )


def _chart(steps: list[_Line], names: list[str]) -> Chart | None:
    series = [
        Series(
            label=name.replace("_", " "),
            color=color,
            points=tuple((one.value + 1, one.tags.get(name, 0) / one.episodes) for one in steps if one.episodes > 0),
        )
        for name, color in zip(names, _COLORS, strict=False)
    ]
    if len(steps) < 2 or not any(one.points for one in series):
        return None
    return line_chart(series, title="Failures by step", width=_SIZE[0], height=_SIZE[1], y_format=lambda value: f"{value:.0%}")


def _table(title: str, lines: list[_Line], names: list[str]) -> Table:
    """Of many columns the first and the newest."""
    if len(lines) > _COLUMNS:
        step = (len(lines) - 1) / (_COLUMNS - 1)
        lines = [lines[round(step * number)] for number in range(_COLUMNS)]
    rows = tuple((name.replace("_", " "), tuple(f"{one.tags.get(name, 0):,}" for one in lines)) for name in names)
    episodes = ("episodes", tuple(f"{one.episodes:,}" for one in lines))
    return Table(title=title, columns=tuple(one.name for one in lines), rows=(*rows, episodes) if lines else ())


def _lines(found: Any, name: str) -> list[_Line]:
    return [line for one in (found if isinstance(found, list) else ()) if (line := _line(one, name)) is not None]


def _line(one: Any, name: str) -> _Line | None:
    if not isinstance(one, dict) or not isinstance(one.get("episodes"), int):
        return None
    value = one.get(name)
    if not isinstance(value, int | str) or isinstance(value, bool):
        return None
    return _Line(
        name=str(value), value=float(value) if isinstance(value, int) else 0.0, episodes=one["episodes"], tags=_numbers(one.get("tags"))
    )


def _numbers(found: Any) -> dict[str, int]:
    items: Iterable[tuple[Any, Any]] = found.items() if isinstance(found, dict) else ()
    return {str(name): times for name, times in items if isinstance(times, int) and not isinstance(times, bool)}
