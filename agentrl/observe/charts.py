"""Line charts as inline SVG. Colours are CSS classes, so that light and dark follow the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.observe.markup import Html, element, join

Point = tuple[float, float]
Format = Callable[[float], str]

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


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    width: int,
    height: int,
    y_range: Point | None = None,
    y_format: Format = lambda value: f"{value:g}",
    whole: bool = False,
) -> Html:
    """A chart over steps. `y_range` None: from 0, or from the smallest value where that is negative, to the largest.

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
    drawn = [_grid(frame, ticks, y_format), _steps(frame, x_low, x_high), *(_draw(frame, one, y_format) for one in series)]
    return element("svg", *drawn, viewBox=f"0 0 {width} {height}", role="img", aria_label=title, class_="chart")


def legend(series: Sequence[Series]) -> Html:
    keys = [element("span", element("i", class_=f"key {one.color}{'' if one.line else ' dot'}"), one.label) for one in series]
    return element("div", *keys, class_="legend")


def _grid(frame: Frame, ticks: Sequence[float], y_format: Format) -> Html:
    marks = []
    for tick in ticks:
        y = frame.y(tick)
        marks.append(element("line", x1=_LEFT, x2=frame.width - _RIGHT, y1=y, y2=y, class_="grid" if tick else "axis"))
        marks.append(element("text", y_format(tick), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    return join(marks)


def _steps(frame: Frame, low: float, high: float) -> Html:
    every = max(1, _nice((high - low) / max(2, frame.width // 60)))
    first = math.ceil(low / every) * every
    count = int((high - first) // every) + 1
    labels = [first + n * every for n in range(count)]
    name = element("text", "step", x=_LEFT - 8, y=frame.height - 6, text_anchor="end", class_="quiet")
    return join([name, *(element("text", f"{x:g}", x=frame.x(x), y=frame.height - 6, text_anchor="middle") for x in labels)])


def _draw(frame: Frame, series: Series, y_format: Format) -> Html:
    drawn = [_whisker(frame, *interval, shift=series.shift) for interval in series.intervals]
    if series.line and len(series.points) > 1:
        path = "M" + "L".join(f"{frame.x(x)},{frame.y(y)}" for x, y in series.points)
        drawn.append(element("path", d=path, class_="line"))
    radius, style = (2.5, "point") if series.line else (5, "mark")
    for x, y in series.points if not series.line or len(series.points) <= 60 else ():
        tip = element("title", f"step {x:g}, {series.label}: {y_format(y)}")
        drawn.append(element("circle", tip, cx=frame.x(x) + series.shift, cy=frame.y(y), r=radius, class_=style))
    return element("g", *drawn, class_=series.color)


def _whisker(frame: Frame, x: float, low: float, high: float, *, shift: float) -> Html:
    at, top, bottom = frame.x(x) + shift, frame.y(high), frame.y(low)
    return element("path", d=f"M{at - 4},{top}h8M{at - 4},{bottom}h8M{at},{top}V{bottom}", class_="whisker")


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
