"""What the tasks of a run taught: groups whose attempts were scored alike trained nothing, and some tasks never give another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.observe.exclusions import printable_text
from agentrl.observe.tables import Table

REQUIRED: Mapping[str, type] = {"group": int, "task": str, "kind": str, "counted": int}
"""Of a line of `tasks.jsonl`, beside the lowest and the highest score."""
_SHOWN = 20


@dataclass(slots=True)
class _Count:
    """Groups of a kind, or of a task."""

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
    """By kind, then the tasks that were given more than once and never taught. Nothing for a run without groups."""
    kinds: dict[str, _Count] = {}
    tasks: dict[str, _Count] = {}
    for line in {line["group"]: line for line in lines}.values():  # a group made again by a resumed run counts once
        lowest, highest = line.get("lowest"), line.get("highest")
        if line["counted"] > 0 and isinstance(lowest, int | float) and isinstance(highest, int | float):
            for counts, name in ((kinds, line["kind"]), (tasks, line["task"])):
                counts.setdefault(name, _Count()).add(lowest, highest)
    if not kinds:
        return []
    never = {name: count for name, count in tasks.items() if count.groups > 1 and not count.differed}
    return [_by_kind(kinds), *([_never(never, len(tasks))] if never else [])]


def _by_kind(kinds: Mapping[str, _Count]) -> Table:
    columns = ("groups", "attempts differed", "all solved", "none solved")
    ordered = sorted(kinds.items(), key=lambda pair: (-pair[1].groups, pair[0]))
    rows = [
        (name, (f"{count.groups:,}", *(f"{part / count.groups:.0%}" for part in (count.differed, count.solved, count.failed))))
        for name, count in ordered
    ]
    return _table("kind", columns, rows)


def _never(tasks: Mapping[str, _Count], given: int) -> Table:
    ordered = sorted(tasks.items(), key=lambda pair: (-pair[1].groups, pair[0]))
    rows = [(name, (f"{count.groups:,}", f"{count.solved:,}", f"{count.failed:,}")) for name, count in ordered]
    title = f"given more than once, and never taught: {len(tasks):,} of {given:,} tasks"
    return _table(title, ("groups", "all solved", "none solved"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, tuple[str, ...]]]) -> Table:
    shown = tuple((printable_text(name), cells) for name, cells in rows[:_SHOWN])
    more = f"and {len(rows) - _SHOWN:,} more; tasks.jsonl has them all" if len(rows) > _SHOWN else ""
    return Table(title=title, columns=columns, rows=shown, more=more)
