"""Lays out the frames of `agentrl watch`: lines of text that fit the size of the terminal.

The output of agents and tools, and file names, are untrusted. `shown` replaces all control characters, so that none reach the terminal.
Every line is cropped to the width of the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.cells import cell_len, chop_cells
from rich.text import Text

from agentrl.base.user_code import one_line, printable
from agentrl.observe.stats import Format, format_count, format_duration
from agentrl.observe.terminal import level, sparkline

MAX_LINES = 20_000
"""Maximum number of lines in a transcript. A note replaces the remaining lines."""
MAX_CHARS = 100_000
"""Maximum number of characters in one message of a transcript."""
_LEAST_WIDTH = 20
_PLOT_HEIGHT = 4
_LABEL = 10  # number of characters in a row's label
_DOTS = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)  # bits of a braille character: left column and right column, each from the top


@dataclass(frozen=True, slots=True)
class Size:
    """The number of columns and rows of a terminal."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The values of a metric, by step."""

    label: str
    values: tuple[float, ...]
    form: Format = "{:.3g}".format


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine:
    """An episode in the list of the newest episodes."""

    id: str
    kind: str
    score: float | None
    outcome: str
    turns: int
    tokens: int
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFrame:
    """The content of the frame for one run."""

    name: str
    state: str  # new, running, finished, interrupted, failed, killed or removed
    stage: str = ""
    step: int = 0
    steps: int | None = None  # None means until the run is stopped
    left_s: float | None = None
    success: tuple[tuple[str, float], ...] = ()  # split -> newest success
    reward: Curve | None = None
    curves: tuple[Curve, ...] = ()
    parts: tuple[tuple[str, float], ...] = ()  # part -> share of the newest step during which it was busy
    restarts: tuple[tuple[str, int], ...] = ()
    ledger: str = ""
    alerts: tuple[str, ...] = ()  # the newest first
    running: int | None = None  # episodes in flight; None if unknown
    episodes: tuple[EpisodeLine, ...] = ()  # the newest first
    selected: int = 0
    notes: tuple[str, ...] = ()  # messages about what could not be read
    keys: str = "↑↓ select  enter open  q quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run in the list of runs."""

    name: str
    state: str
    step: int
    steps: int | None
    reward: float | None
    changed_s: float | None  # seconds since the run last changed; None if it has not started


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A message of a transcript."""

    who: str
    text: str
    style: str = ""


@dataclass(slots=True, kw_only=True)
class Transcript:
    """An episode as text, which can be scrolled."""

    title: str
    facts: str
    parts: tuple[Part, ...]
    top: int = 0  # first visible line
    _wrapped: tuple[int, list[Text]] = field(default=(0, []), repr=False)  # width -> lines

    def lines(self, width: int) -> list[Text]:
        """Returns all lines, wrapped to a width."""
        if self._wrapped[0] != width:
            self._wrapped = width, list(_wrapped(self.parts, width))
        return self._wrapped[1]


def shown(text: object, most: int = 300) -> str:
    """Returns a string as one line without control characters, of at most `most` characters."""
    return one_line(str(text), most)


def crop(lines: Sequence[Text], size: Size) -> list[Text]:
    """Returns the first lines that fit the height, each cropped to the width."""
    cropped = []
    for line in lines[: max(1, size.height)]:
        short = line.copy()
        short.truncate(max(1, size.width), overflow="ellipsis")
        cropped.append(short)
    return cropped


def run_frame(run: RunFrame, size: Size) -> list[Text]:
    """Returns the lines of the frame for one run. A small terminal shows fewer sections, but always the title, the list and the keys."""
    width = max(size.width, _LEAST_WIDTH)
    top = [_title(run), *([_progress(run, width)] if run.step or run.steps else [])]
    sections = [section for section in _sections(run, width, tall=size.height >= 22) if section]
    room = size.height - len(top) - 1 - min(4, 1 + len(run.episodes))  # line of keys, and a list with a header and three episodes
    for section in sections:
        visible = section[: max(0, room)]
        top += visible
        room -= len(visible)
    rest = size.height - len(top) - 1
    body = _episode_list(run, width, rest)
    lines = [*top, *body]
    lines += [Text()] * (size.height - 1 - len(lines))
    return crop([*lines[: max(0, size.height - 1)], Text(run.keys, style="dim")], size)


def runs_frame(runs: Sequence[RunLine], selected: int, size: Size, *, title: str, notes: Sequence[str] = ()) -> list[Text]:
    """Returns the lines of the frame that lists the runs."""
    head = [Text(shown(title), style="bold"), *(Text(shown(note), style="yellow") for note in notes[:2])]
    wide = min(40, max([len(shown(run.name)) for run in runs] or [4]))
    rows = [f"{'run':{wide}}  {'state':11}  {'step':>9}  {'reward':>7}  changed"]
    for run in runs:
        step = f"{run.step}" + (f"/{run.steps}" if run.steps else "")
        reward = "-" if run.reward is None else f"{run.reward:.3f}"
        ago = "-" if run.changed_s is None else f"{format_duration(run.changed_s)} ago"
        rows.append(f"{_padded(shown(run.name, 40), wide)}  {shown(run.state):11}  {step:>9}  {reward:>7}  {ago}")
    body = _selectable(rows, selected, size.height - len(head) - 1, empty="no runs here yet")
    lines = [*head, *body]
    lines += [Text()] * (size.height - 1 - len(lines))
    return crop([*lines[: max(0, size.height - 1)], Text("↑↓ select  enter open  q quit", style="dim")], size)


def transcript_frame(transcript: Transcript, size: Size) -> list[Text]:
    """Returns the visible lines of a transcript, and limits `top` to the valid range."""
    width, room = max(size.width, _LEAST_WIDTH), max(1, size.height - 3)
    lines = transcript.lines(width)
    transcript.top = max(0, min(transcript.top, len(lines) - room))
    end = min(transcript.top + room, len(lines))
    visible = lines[transcript.top : end]
    head = [Text(shown(transcript.title), style="bold"), Text(shown(transcript.facts), style="cyan")]
    keys = f"↑↓ scroll  n/p next/previous episode  ← back  q quit   {transcript.top + 1}-{end} of {len(lines)}"
    return crop([*head, *visible, *[Text()] * (room - len(visible)), Text(keys, style="dim")], size)


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Returns a curve as `height` rows of braille characters over the full width. Each character shows two values. Ignores
    values that are not finite; the rows are blank if there are no others."""
    points = _stretched([value for value in values if math.isfinite(value)], 2 * width)
    if not points or width < 1:
        return [" " * max(0, width)] * height
    low, high = min(points), max(points)
    levels = 4 * height - 1
    grid = [[0] * width for _ in range(height)]
    before = None
    for at, value in enumerate(points):
        y = level(value, low, high, levels, flat=levels // 2)
        first, last = (y, y) if before is None else (min(before, y), max(before, y))
        for stroke in range(first, last + 1):  # a vertical stroke connects neighbours
            row, dot = divmod(levels - stroke, 4)
            grid[row][at // 2] |= _DOTS[at % 2][dot]
        before = y
    return ["".join(chr(0x2800 + bits) for bits in row) for row in grid]


def _binned(values: Sequence[float], most: int) -> list[float]:
    """Reduces values to at most `most` by averaging neighbours."""
    if len(values) <= most or most < 1:
        return list(values)
    edges = [round(number * len(values) / most) for number in range(most + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


def _stretched(values: Sequence[float], count: int) -> list[float]:
    """Resamples values to exactly `count` by averaging neighbours or interpolating between them. Returns an empty list if there are no
    values."""
    some = _binned(values, count)
    if len(some) in (0, count):
        return some
    scaled = []
    for number in range(count):
        at = number * (len(some) - 1) / (count - 1)
        low = min(int(at), len(some) - 1)
        high = min(low + 1, len(some) - 1)
        scaled.append(some[low] + (some[high] - some[low]) * (at - low))
    return scaled


def _title(run: RunFrame) -> Text:
    styles = {"running": "green", "finished": "cyan"}
    title = Text(shown(run.name, 80), style="bold").append(f"  {shown(run.state)}", style=styles.get(run.state, "red"))
    if run.stage:
        title.append(f"  {shown(run.stage)}", style="default")
    if run.running is not None and run.state == "running":
        title.append(f"  episodes in flight: {run.running}", style="dim")
    return title


def _progress(run: RunFrame, width: int) -> Text:
    of = f"/{run.steps}" if run.steps else ""
    left = f"  about {format_duration(run.left_s)} left" if run.left_s is not None else ""
    text = Text(f"{'step':{_LABEL}}{run.step}{of}{left}")
    room = width - cell_len(text.plain) - 3
    if run.steps and room >= 8:
        filled = round(min(1.0, run.step / run.steps) * min(room, 30))
        text.append(f"  {'█' * filled}{'░' * (min(room, 30) - filled)}", style="cyan")
    return text


def _sections(run: RunFrame, width: int, *, tall: bool) -> list[list[Text]]:
    """Returns the sections between the title and the list, the most important first."""
    reward: list[Text] = []
    if run.reward is not None and run.reward.values:
        newest = run.reward.form(run.reward.values[-1])
        room = max(4, width - _LABEL - 10)
        rows = plot(run.reward.values, room, _PLOT_HEIGHT) if tall else [sparkline(_binned(run.reward.values, room), room)]
        labels = [f"{newest:9} ", *[" " * 10] * (len(rows) - 1)]
        names = [shown(run.reward.label, _LABEL - 1), *[""] * (len(rows) - 1)]
        reward = [Text(f"{name:{_LABEL}}{label}").append(row, style="green") for name, label, row in zip(names, labels, rows, strict=True)]
    success = " · ".join(f"{shown(split)} {value:.3f}" for split, value in run.success)
    parts = " · ".join(f"{shown(part)} {share:.0%}" for part, share in run.parts)
    restarts = " · ".join(f"{shown(part)} {count}" for part, count in run.restarts if count)
    alerts = [Text(f"{'alert':{_LABEL}}", style="red").append(shown(text), style="default") for text in run.alerts[: 3 if tall else 1]]
    return [
        [Text(shown(note), style="yellow") for note in run.notes[:2]],
        alerts,
        reward,
        [_row("success", success)] if success else [],
        [_row("busy", parts)] if parts else [],
        [_row("restarts", restarts, style="red")] if restarts else [],
        [_row("tokens", run.ledger)] if run.ledger else [],
        _curves(run.curves, width),
    ]


def _row(label: str, text: str, *, style: str = "") -> Text:
    return Text(f"{label:{_LABEL}}", style="dim").append(shown(text), style=style or "default")


def _curves(curves: Sequence[Curve], width: int) -> list[Text]:
    """Returns lines with the curves in one or two columns. Each curve is shown with its newest value."""
    columns = 2 if width >= 72 else 1
    room = width // columns
    cells = []
    for curve in (curve for curve in curves if curve.values):
        spark = max(4, room - 26)
        head = f"{shown(curve.label, 13):14}{curve.form(curve.values[-1]):>8}  "
        cells.append(Text(head, style="dim").append(_padded(sparkline(_binned(curve.values, spark), spark), spark + 2), style="blue"))
    return [Text().join(cells[at : at + columns]) for at in range(0, len(cells), columns)]


def _episode_list(run: RunFrame, width: int, room: int) -> list[Text]:
    wide = width >= 72
    names = [shown(episode.id, 60) for episode in run.episodes]
    id_width = max(16, min(width - 56, max(map(cell_len, names), default=0))) if wide else 16
    if wide:
        rows = [f"{'episode':{id_width}}  {'kind':14}  {'score':>6}  {'outcome':9}  {'turns':>5}  {'tokens':>6}  {'ver':>4}"]
    else:
        rows = [f"{'episode':16} {'score':>6} {'outcome':9}"]
    for one, full in zip(run.episodes, names, strict=True):
        score = "-" if one.score is None else f"{one.score:.3g}"[:6]
        name, outcome = _padded(full, id_width), _padded(shown(one.outcome, 9), 9)
        if wide:
            version = "-" if one.version is None else str(one.version)
            cells = f"{one.turns:>5}  {format_count(one.tokens):>6}  {version:>4}"
            rows.append(f"{name}  {_padded(shown(one.kind, 14), 14)}  {score:>6}  {outcome}  {cells}")
        else:
            rows.append(f"{name} {score:>6} {outcome}")
    return _selectable(rows, run.selected, room, empty="no episodes")


def _selectable(rows: Sequence[str], selected: int, room: int, *, empty: str) -> list[Text]:
    """Returns lines with a header and as many rows around the selected row as fit into `room` lines."""
    head, *items = rows
    if room < 1:
        return []
    if not items:
        return [Text(empty, style="dim")]
    most = max(1, room - 1)
    first = max(0, min(selected - most // 2, len(items) - most))
    visible = items[first : first + most]
    lines = [Text(f"  {head}", style="dim")] if room > 1 else []
    for number, item in enumerate(visible, first):
        lines.append(Text(f"> {item}", style="bold reverse") if number == selected else Text(f"  {item}"))
    return lines


def _padded(text: str, width: int) -> str:
    """Pads or shortens a string to exactly `width` columns, even if the string contains wide characters."""
    short = text
    while cell_len(short) > width:
        short = short[:-1]
    return short + " " * (width - cell_len(short))


def _pieces(line: str, width: int) -> Iterator[str]:
    """Yields the pieces into which a line is wrapped. The length of each piece in characters is also bounded, because combining characters
    need no column."""
    for piece in chop_cells(line, width) or [""]:
        yield from (piece[at : at + 4 * width] for at in range(0, max(1, len(piece)), 4 * width))


def _wrapped(parts: Sequence[Part], width: int) -> Iterator[Text]:
    count = 0
    for part in parts:
        yield Text(f"── {shown(part.who, 80)} ", style="bold cyan")
        for line in printable(part.text[:MAX_CHARS].expandtabs(4), 4 * MAX_CHARS).split("\n"):
            for piece in _pieces(line, width):
                count += 1
                if count > MAX_LINES:
                    yield Text(f"only the first {MAX_LINES:,} lines are shown", style="yellow")
                    return
                yield Text(piece, style=part.style)
        if len(part.text) > MAX_CHARS:
            yield Text(f"{len(part.text) - MAX_CHARS:,} more characters are not shown", style="yellow")
