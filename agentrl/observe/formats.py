"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.observe.stats import Rate

Format = Callable[[float], str]


def in_unit_interval(rate: Rate | None) -> bool:
    """Whether a rate and its interval lie between 0 and 1; so does one that there is not."""
    return rate is None or (rate.ci_low >= 0 and rate.ci_high <= 1)


def format_rate(value: Rate | None) -> str:
    if value is None:
        return "n/a"
    return f"{100 * value.value:.1f}%" if in_unit_interval(value) else f"{value.value:.3f}"


def format_interval(value: Rate) -> str:
    if in_unit_interval(value):
        return f"{100 * value.ci_low:.1f}-{100 * value.ci_high:.1f}%"
    return f"{value.ci_low:.3f} to {value.ci_high:.3f}"


def format_optional(value: float | None, form: Format) -> str:
    return "n/a" if value is None else form(value)


def format_count(value: float) -> str:
    """1,234; 12.3k; 4.56M; 7.89B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
