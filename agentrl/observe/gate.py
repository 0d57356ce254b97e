"""What the gate of a run decided, for the report: success on the suite by version, each verdict, and what regressed, side by side.

Read from `gate/` of the run folder: `000012/verdict.json` and the episodes that it names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.untrusted_files import read_bytes
from agentrl.observe.charts import Chart, Series, line_chart
from agentrl.observe.rundata import parse_object
from agentrl.observe.transcripts import ShownEpisode, show_versions

Line = dict[str, Any]
_SIZE = (1030, 240)
_PAIRS_SHOWN = 8
_LARGEST = 64 << 20  # bytes of one file
_REASON = 600  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One version at the gate."""

    version: int
    outcome: str
    rate: str
    cost: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressedCase:
    """A case that went wrong: an episode of the reference, and one of the version that was refused."""

    title: str
    episodes: tuple[ShownEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSection:
    """What the report says of the gate; without rows there was none."""

    rows: tuple[GateRow, ...]
    chart: Chart | None
    regressed: tuple[RegressedCase, ...]
    notes: tuple[str, ...]  # what could not be read


def read_gate_section(run_dir: Path) -> GateSection:
    """The story of a run's gate. What cannot be read becomes a note."""
    notes: list[str] = []
    folder = run_dir / "gate"
    numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []
    verdicts = [found for number in numbers if (found := _verdict(folder, number, notes)) is not None]
    regressed = [one for verdict in reversed(verdicts) for one in _regressed(folder, verdict, notes)]
    return GateSection(
        rows=tuple(_row(one) for one in verdicts), chart=_chart(verdicts), regressed=tuple(regressed[:_PAIRS_SHOWN]), notes=tuple(notes)
    )


def _verdict(folder: Path, number: int, notes: list[str]) -> Line | None:
    path = folder / f"{number:06d}" / "verdict.json"
    if not path.exists():
        return None
    found = next(_lines(path, notes), None)
    if found is None or found.get("version") != number:
        notes.append(f"gate/{number:06d}/verdict.json cannot be read")
        return None
    return found


def _row(verdict: Line) -> GateRow:
    figures = _of(verdict, "figures")
    rate, low, high = (_number(figures.get(name)) for name in ("pass_at_1", "low", "high"))
    shown = "none scored" if rate is None else f"{rate:.1%}"
    if low is not None and high is not None:
        shown += f" [{low:.1%}, {high:.1%}]"
    k, several, took = (_number(figures.get(name)) for name in ("k", "pass_at_k", "wall_s"))
    if k is not None and k > 1 and several is not None:
        shown += f", pass@{k:.0f} {several:.1%}"
    tokens, attempts, turns = (_number(figures.get(name)) for name in ("tokens", "attempts", "turns"))
    cost = f"{tokens / attempts:.0f} tokens, {turns or 0:.1f} turns" if tokens is not None and attempts else ""
    cost += f"; {took:.1f} s in all" if cost and took else ""
    return GateRow(
        version=verdict["version"],
        outcome=str(verdict.get("outcome", "")),
        rate=shown,
        cost=cost,
        reason=str(verdict.get("reason", ""))[:_REASON],
    )


def _chart(verdicts: list[Line]) -> Chart | None:
    points, intervals = [], []
    for verdict in verdicts:
        figures = _of(verdict, "figures")
        rate, low, high = (_number(figures.get(name)) for name in ("pass_at_1", "low", "high"))
        if rate is not None and low is not None and high is not None:
            points.append((float(verdict["version"]), rate))
            intervals.append((float(verdict["version"]), low, high))
    if not points:
        return None
    series = Series(label="pass@1", color="c1", points=tuple(points), intervals=tuple(intervals))
    width, height = _SIZE
    return line_chart(
        [series],
        title="Success on the suite by version",
        width=width,
        height=height,
        y_range=(0.0, 1.0),
        y_format=lambda value: f"{value:.2f}",
        x_name="version",
    )


def _regressed(folder: Path, verdict: Line, notes: list[str]) -> Iterator[RegressedCase]:
    named = verdict.get("regressions")
    found = [one for one in named if isinstance(one, dict)] if isinstance(named, list) else []
    reference = verdict.get("reference")
    if not found or not isinstance(reference, int):
        return
    ours = _episodes(folder / f"{verdict['version']:06d}", {str(one.get("episode")) for one in found}, notes)
    theirs = _episodes(folder / f"{reference:06d}", {str(one.get("before_episode")) for one in found}, notes)
    for one in found:
        before, after = theirs.get(str(one.get("before_episode"))), ours.get(str(one.get("episode")))
        if before is not None and after is not None:
            turn = f", which part at turn {one['turn']}" if isinstance(one.get("turn"), int) else ""
            yield RegressedCase(
                title=f"version {verdict['version']} was {verdict.get('outcome', '')}: case {one.get('case', '')}{turn}",
                episodes=show_versions(f"version {reference}, passed", before, f"version {verdict['version']}, did not", after),
            )


def _episodes(folder: Path, wanted: set[str], notes: list[str]) -> dict[str, Line]:
    path = folder / "episodes.jsonl"
    if not path.exists():
        return {}
    return {str(line["episode"]): line for line in _lines(path, notes) if str(line.get("episode")) in wanted}


def _lines(path: Path, notes: list[str]) -> Iterator[Line]:
    if path.stat().st_size > _LARGEST:
        notes.append(f"{path.parent.name}/{path.name} is larger than {_LARGEST >> 20} MiB and left out")
        return
    for text in read_bytes(path, most=_LARGEST, inside=path.parent).decode("utf-8", "replace").split("\n"):
        if (line := parse_object(text)) is not None:
            yield line


def _of(line: Line, key: str) -> Line:
    found = line.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
