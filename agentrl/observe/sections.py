"""Builds two sections of the report: failures by tag, and the tasks with and without a learning signal. Invalid input is ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.observe.charts import MAX_SERIES, Chart, Series
from agentrl.observe.exclusions import printable_text
from agentrl.observe.markup import Table
from agentrl.observe.rundata import as_list
from agentrl.observe.transcripts import ShownEpisode, show_failure

_EXAMPLES = 8
_COLUMNS = 10  # maximum number of columns for phases or versions
_ROWS = 20  # maximum number of rows for tasks or kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresSection:
    """The report's section about the failures of a run."""

    note: str
    chart: Chart | None  # share of training episodes with each of the most frequent tags, by step
    tables: tuple[Table, ...]  # failures by tag and phase, and by tag and version
    examples: tuple[ShownEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The number of episodes and the number of failures by tag in one step, phase or version."""

    name: str
    value: float  # number of the step or version; 0 for a phase
    episodes: int
    tags: Mapping[str, int]


def failures_section(failures: Mapping[str, Any]) -> FailuresSection | None:
    """Builds the failures section from the content of `failures/failures.json`. Returns None if there are no failures."""
    tags = _counts(failures.get("tags"))
    if not tags:
        return None
    names = list(tags)
    stored, deleted = (failures.get(key) if isinstance(failures.get(key), int) else 0 for key in ("kept", "dropped"))
    steps, phases, versions = (_entries(failures.get(f"{name}s"), name) for name in ("step", "phase", "version"))
    examples = [
        example for example in as_list(failures.get("examples")) if isinstance(example, dict) and isinstance(example.get("messages"), list)
    ]
    return FailuresSection(
        note=f"{sum(tags.values()):,} training and evaluation episodes failed. Each is counted by its first problem, as tagged by rules,"
        f" judges or people. {stored:,} traces are stored, and {deleted:,} were deleted to limit their number. `agentrl failures` shows"
        " them.",
        chart=_failures_chart(steps, names),
        tables=tuple(table for table in (_by_tag("phase", phases, names), _by_tag("training version", versions, names)) if table.rows),
        examples=tuple(map(show_failure, examples[:_EXAMPLES])),
    )


def _failures_chart(steps: list[_Entry], names: list[str]) -> Chart | None:
    series = [
        Series(
            label=name.replace("_", " "),
            points=tuple((step.value + 1, step.tags.get(name, 0) / step.episodes) for step in steps if step.episodes > 0),
        )
        for name in names[:MAX_SERIES]
    ]
    if len(steps) < 2 or not series or not series[0].points:
        return None
    return Chart(title="Failures by step", series=series, form="percent", height=240)


def _by_tag(title: str, entries: list[_Entry], names: list[str]) -> Table:
    """Returns a table of failures by tag, with a column per entry, or for `_COLUMNS` evenly spaced entries if there are more."""
    if len(entries) > _COLUMNS:
        step = (len(entries) - 1) / (_COLUMNS - 1)
        entries = [entries[round(step * number)] for number in range(_COLUMNS)]
    rows = tuple((name.replace("_", " "), tuple(f"{entry.tags.get(name, 0):,}" for entry in entries)) for name in names)
    episodes = ("episodes", tuple(f"{entry.episodes:,}" for entry in entries))
    return Table(title=title, columns=tuple(entry.name for entry in entries), rows=(*rows, episodes) if entries else ())


def _entries(values: Any, name: str) -> list[_Entry]:
    entries = []
    for item in as_list(values):
        value, episodes = (item.get(name), item.get("episodes")) if isinstance(item, dict) else (None, None)
        if isinstance(value, int | str) and not isinstance(value, bool) and isinstance(episodes, int):
            number = float(value) if isinstance(value, int) else 0.0
            entries.append(_Entry(name=str(value), value=number, episodes=episodes, tags=_counts(item.get("tags"))))
    return entries


def _counts(value: Any) -> dict[str, int]:
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    return {str(name): times for name, times in items if isinstance(times, int) and not isinstance(times, bool)}


@dataclass(slots=True)
class _GroupCount:
    """The number of groups of one kind or task: in total, with different scores, all solved, and all failed."""

    groups: int = 0
    differed: int = 0
    solved: int = 0
    failed: int = 0

    def add(self, lowest: float, highest: float) -> None:
        self.groups += 1
        self.differed += highest > lowest
        self.solved += highest == lowest and lowest > 0.5
        self.failed += highest == lowest and lowest <= 0.5


def learning_tables(lines: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Returns two tables. The first has, for each kind of task, the share of groups whose scores differ and the share whose scores are all
    equal. The second has the tasks with at least two groups, none of which gave a learning signal.

    A table without rows is omitted.
    """
    kinds: dict[str, _GroupCount] = {}
    tasks: dict[str, _GroupCount] = {}
    for line in {line["group"]: line for line in lines}.values():  # a group that a resumed run repeated is counted once
        lowest, highest = line.get("lowest"), line.get("highest")
        if line["counted"] > 0 and isinstance(lowest, int | float) and isinstance(highest, int | float):
            for counts, name in ((kinds, line["kind"]), (tasks, line["task"])):
                counts.setdefault(name, _GroupCount()).add(lowest, highest)
    if not kinds:
        return []
    rows = [
        (name, (f"{count.groups:,}", *(f"{part / count.groups:.0%}" for part in (count.differed, count.solved, count.failed))))
        for name, count in _most_groups(kinds)
    ]
    tables = [_learning_table("kind", ("groups", "attempts differed", "all solved", "none solved"), rows)]
    never = {name: count for name, count in tasks.items() if count.groups > 1 and not count.differed}
    if never:
        rows = [(name, (f"{count.groups:,}", f"{count.solved:,}", f"{count.failed:,}")) for name, count in _most_groups(never)]
        title = f"scheduled repeatedly without a learning signal: {len(never):,} of {len(tasks):,} tasks"
        tables.append(_learning_table(title, ("groups", "all solved", "none solved"), rows))
    return tables


def _most_groups(counts: Mapping[str, _GroupCount]) -> list[tuple[str, _GroupCount]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1].groups, pair[0]))


def _learning_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, tuple[str, ...]]]) -> Table:
    more = f"and {len(rows) - _ROWS:,} more in tasks.jsonl" if len(rows) > _ROWS else ""
    return Table(title=title, columns=columns, rows=tuple((printable_text(name), cells) for name, cells in rows[:_ROWS]), more=more)
