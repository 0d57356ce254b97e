"""Renders the templates of the report (Jinja2), and lays out their line charts: positions of lines, marks and labels.

Text from sandboxes and models is hostile. Autoescaping prevents tags, attributes and scripts; invisible characters and those that change
the direction of text are shown as escapes.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl.observe.stats import Format, format_duration, format_interval, format_rate

Point = tuple[float, float]

_UNCHANGED = frozenset("\n\t")
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 14, 12, 26  # margins of a chart
_INSET = 11  # between the edges of the grid and the first and last step


def render(template: str, **values: Any) -> str:
    """Renders a template of `agentrl/observe/templates`. Raises `jinja2.UndefinedError` for a missing value."""
    return environment().get_template(template).render(**values)


def template_file(name: str) -> bytes:
    """Returns the content of a file of `agentrl/observe/templates` without rendering it."""
    return (files("agentrl.observe") / "templates" / name).read_bytes()


@cache
def environment() -> Environment:
    """Returns the Jinja2 environment of the templates."""
    environment = Environment(
        loader=PackageLoader("agentrl.observe"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"rate": format_rate, "interval": format_interval, "duration": format_duration}
    return environment


def visible(text: str) -> str:
    """Returns the text with escapes for invisible characters."""
    return text.translate(_VISIBLE)


def _shown(value: object) -> object:
    """Returns the output of an expression in a template: markup of a macro unchanged, anything else as visible text."""
    return value if isinstance(value, Markup) else visible(str(value))


class _Visible(dict[int, str]):
    """Character -> its visible form, computed on first use: `\\xNN` for controls, surrogates and bidirectional overrides."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        hidden = char not in _UNCHANGED and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        self[number] = char.encode("unicode_escape", "surrogatepass").decode("ascii") if hidden else char
        return self[number]


_VISIBLE = _Visible()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one set of marks with `line=False`."""

    label: str
    color: str  # CSS class: c1, c2, ...
    points: tuple[Point, ...]  # in order of x
    line: bool = True
    shift: float = 0.0  # horizontal shift of marks, in drawing units, to separate series
    intervals: tuple[tuple[float, float, float], ...] = ()  # x, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of an axis."""

    at: float
    label: str
    zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One point with its tooltip."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSeries:
    """A series as SVG paths and marks."""

    label: str
    color: str
    line: bool
    path: str  # empty means no line
    whiskers: tuple[str, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart over steps or versions, in drawing units."""

    title: str
    x_name: str
    width: int
    height: int
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    series: tuple[DrawnSeries, ...]
    left: int  # edges of the grid
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a name in each row."""

    title: str  # head of the column of names
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # name, cells
    more: str = ""  # note on rows that are not shown


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    size: tuple[int, int],
    y_range: Point | None = None,
    y_format: Format = lambda value: f"{value:g}",
    whole: bool = False,
    x_name: str = "step",
) -> Chart:
    """Lays out a chart.

    Args:
        size: width and height.
        y_range: None means from 0, or the smallest value if it is negative, to the largest.
        whole: whether the y axis has marks at whole numbers only, for counts.

    Raises `ValueError` if there is no point.
    """
    xs = [x for one in series for x, _ in one.points]
    if not xs:
        raise ValueError(f"chart {title!r} has no point")
    ys = [y for one in series for _, y in one.points] + [edge for one in series for _, low, high in one.intervals for edge in (low, high)]
    ticks = _y_ticks(*(y_range or (min(0.0, *ys), max(0.0, *ys))), least=1.0 if whole else 0.0)
    x_low, x_high = min(xs), max(xs)
    pad = 0.0 if x_high > x_low else 0.5
    frame = _Frame(size=size, x_range=(x_low - pad, x_high + pad), y_range=(ticks[0], ticks[-1]))
    return Chart(
        title=title,
        x_name=x_name,
        width=size[0],
        height=size[1],
        y_ticks=tuple(Tick(at=frame.y(tick), label=y_format(tick), zero=not tick) for tick in ticks),
        x_ticks=_x_ticks(frame, x_low, x_high),
        series=tuple(_drawn(frame, one, y_format, x_name) for one in series),
        left=_LEFT,
        right=size[0] - _RIGHT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps data coordinates to the drawing."""

    size: tuple[int, int]
    x_range: Point
    y_range: Point

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(_LEFT + _INSET + (value - low) / (high - low) * (self.size[0] - _LEFT - _RIGHT - 2 * _INSET), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(self.size[1] - _BOTTOM - (value - low) / (high - low) * (self.size[1] - _TOP - _BOTTOM), 1)


def _x_ticks(frame: _Frame, low: float, high: float) -> tuple[Tick, ...]:
    every = max(1, _round_up((high - low) / max(2, frame.size[0] // 60)))
    first = math.ceil(low / every) * every
    count = int((high - first) // every) + 1
    return tuple(Tick(at=frame.x(x), label=f"{x:g}") for x in (first + n * every for n in range(count)))


def _drawn(frame: _Frame, series: Series, y_format: Format, x_name: str) -> DrawnSeries:
    joined = series.line and len(series.points) > 1
    marked = series.points if not series.line or len(series.points) <= 60 else ()
    return DrawnSeries(
        label=series.label,
        color=series.color,
        line=series.line,
        path="M" + "L".join(f"{frame.x(x)},{frame.y(y)}" for x, y in series.points) if joined else "",
        whiskers=tuple(_whisker(frame, *interval, shift=series.shift) for interval in series.intervals),
        marks=tuple(
            Mark(x=frame.x(x) + series.shift, y=frame.y(y), tip=f"{x_name} {x:g}, {series.label}: {y_format(y)}") for x, y in marked
        ),
    )


def _whisker(frame: _Frame, x: float, low: float, high: float, *, shift: float) -> str:
    at, top, bottom = frame.x(x) + shift, frame.y(high), frame.y(low)
    return f"M{at - 4},{top}h8M{at - 4},{bottom}h8M{at},{top}V{bottom}"


def _y_ticks(low: float, high: float, *, least: float) -> list[float]:
    """About four round values that cover [low, high], at least `least` apart."""
    step = max(_round_up((high - low) / 4 if high > low else 1.0), least)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def _round_up(value: float) -> float:
    """Returns the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `value`; 1 if `value` is not positive."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))
