"""Line charts: where each line, mark and label lies on the drawing. `templates/chart.html` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.observe.formats import Format

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 14, 12, 26
_INSET = 11  # between the edges of the grid and the first and last step


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or with `line=False` one set of marks."""

    label: str
    color: str  # CSS class: c1, c2, ...
    points: tuple[Point, ...]  # in order of x
    line: bool = True
    shift: float = 0.0  # sideways, in drawing units, so that marks of two series at one step stay apart
    intervals: tuple[tuple[float, float, float], ...] = ()  # x, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where data coordinates lie on the drawing."""

    width: int
    height: int
    x_range: Point
    y_range: Point

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(_LEFT + _INSET + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT - 2 * _INSET), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of an axis: where it is, and what it says."""

    at: float
    label: str
    zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One point, and what is told of it where a pointer rests."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSeries:
    """A series as it is drawn: SVG paths, and marks."""

    label: str
    color: str
    line: bool
    path: str  # empty: no line
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

    @property
    def left(self) -> int:
        return _LEFT

    @property
    def right(self) -> int:
        return self.width - _RIGHT


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    width: int,
    height: int,
    y_range: Point | None = None,
    y_format: Format = lambda value: f"{value:g}",
    whole: bool = False,
    x_name: str = "step",
) -> Chart:
    """A chart over steps, or what `x_name` says. `y_range` None: from 0, or from the smallest value where that is negative, to the largest.

    `whole` keeps the marks of the y axis at whole numbers, for counts.

    Raises `ValueError` when there is not one point.
    """
    xs = [x for one in series for x, _ in one.points]
    if not xs:
        raise ValueError(f"chart {title!r} has no point")
    ys = [y for one in series for _, y in one.points] + [edge for one in series for _, low, high in one.intervals for edge in (low, high)]
    ticks = _ticks(*(y_range or (min(0.0, *ys), max(0.0, *ys))), least=1.0 if whole else 0.0)
    x_low, x_high = min(xs), max(xs)
    pad = 0.0 if x_high > x_low else 0.5
    frame = Frame(width=width, height=height, x_range=(x_low - pad, x_high + pad), y_range=(ticks[0], ticks[-1]))
    return Chart(
        title=title,
        x_name=x_name,
        width=width,
        height=height,
        y_ticks=tuple(Tick(at=frame.y(tick), label=y_format(tick), zero=not tick) for tick in ticks),
        x_ticks=_steps(frame, x_low, x_high),
        series=tuple(_drawn(frame, one, y_format, x_name) for one in series),
    )


def _steps(frame: Frame, low: float, high: float) -> tuple[Tick, ...]:
    every = max(1, _nice((high - low) / max(2, frame.width // 60)))
    first = math.ceil(low / every) * every
    count = int((high - first) // every) + 1
    return tuple(Tick(at=frame.x(x), label=f"{x:g}") for x in (first + n * every for n in range(count)))


def _drawn(frame: Frame, series: Series, y_format: Format, x_name: str) -> DrawnSeries:
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


def _whisker(frame: Frame, x: float, low: float, high: float, *, shift: float) -> str:
    at, top, bottom = frame.x(x) + shift, frame.y(high), frame.y(low)
    return f"M{at - 4},{top}h8M{at - 4},{bottom}h8M{at},{top}V{bottom}"


def _ticks(low: float, high: float, *, least: float) -> list[float]:
    """Round values that cover [low, high], four or so, at least `least` apart."""
    step = max(_nice((high - low) / 4 if high > low else 1.0), least)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def _nice(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `value` (1 for values that are not positive)."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))
