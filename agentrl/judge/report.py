"""Renders a judge's calibration report as text, JSON data and SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from markupsafe import escape

from agentrl.base.numbers import plural
from agentrl.base.user_code import printable
from agentrl.judge.agreement import Bin
from agentrl.judge.calibrate import CalibrationReport
from agentrl.judge.calibration import IntervalEstimate


def render_report(report: CalibrationReport) -> str:
    """Returns the calibration report as text for a terminal."""
    return "\n".join(_lines(report))


def report_data(report: CalibrationReport) -> dict[str, Any]:
    """Returns the report, without the calibration, as JSON data for the calibration file."""
    data = asdict(report)
    del data["calibration"]
    data["reliability"] = data.pop("bins")
    return data | {"wall_s": round(report.wall_s, 3)}


def _lines(report: CalibrationReport) -> Iterator[str]:
    calibration = report.calibration
    judged = calibration.agreement.n
    kind = "pairs of a correct and a wrong answer" if report.pairs else "labelled answers"
    counts = f"{judged} of {judged + calibration.abstained} {kind}, of {plural(calibration.tasks, 'task')}"
    yield f"{printable(calibration.judge, 200)}: verdicts on {counts}"
    if calibration.coverage is not None:
        yield _row("coverage", calibration.coverage, "share with a verdict")
    yield _row("agreement", calibration.agreement)
    yield _row("Cohen's kappa", calibration.kappa, "0 is chance")
    yield _row("sensitivity", calibration.sensitivity, "share of correct answers that are judged correct")
    yield _row("specificity", calibration.specificity, "share of wrong answers that are judged wrong")
    yield _row("informedness", calibration.informedness, "sensitivity + specificity - 1; 0 is chance")
    if report.position_bias is not None:
        bias = f"share of preferences for A; 0.5 is no bias{_off(report.position_bias, 0.5)}"
        yield _row("first place", report.position_bias, bias)
    if report.inconsistent is not None:
        yield _row("inconsistent", report.inconsistent, "share with contradictory verdicts in the two orders")
    if report.length_bias is not None:
        yield _row("length", report.length_bias, f"correlation of score and length; 0 is no bias{_off(report.length_bias, 0.0)}")
    if report.calibration_error is not None:
        curve = ", ".join(map(_bin, report.bins))
        yield f"  {'reliability':<15} score -> share correct: {curve}; mean error {report.calibration_error:.3f}"
    if report.disputed:
        yield f"  {report.disputed} answers are excluded because their labellers are tied"
    if report.copies:
        yield f"  {report.copies} labelled answers are duplicates and are not counted again"
    yield from (f"  no verdict, {count} times: {reason}" for reason, count in report.reasons.items())
    if calibration.tasks < judged:
        effect = f"the design effect of informedness is {calibration.design_effect:.1f}"
        yield f"  {plural(judged, 'answer')} to {plural(calibration.tasks, 'task')}: answers to one task are correlated, and {effect}"
    yield _cost(report)
    if calibration.may_be_chance:
        yield "NOT SHOWN TO BE BETTER THAN CHANCE: a recipe that requires this calibration fails"


def _row(name: str, estimate: IntervalEstimate, note: str = "") -> str:
    return f"  {name:<15} {estimate.value:6.3f}   95% interval {estimate.low:6.3f} to {estimate.high:.3f}{note and f'   {note}'}"


def _off(estimate: IntervalEstimate, unbiased: float) -> str:
    return "" if estimate.low <= unbiased <= estimate.high else " -- BIASED"


def _bin(bucket: Bin) -> str:
    return f"{bucket.score:.2f} -> {bucket.right.value:.2f} ({bucket.right.n})"


def _cost(report: CalibrationReport) -> str:
    spent = report.spent
    if spent is None:
        return f"  {report.wall_s:.1f} s"
    tokens = f"{spent.prompt_tokens:,} + {spent.completion_tokens:,} tokens{' (partly estimated)' if spent.estimated else ''}"
    return (
        f"  {report.wall_s:.1f} s, {plural(spent.calls, 'call')}, {plural(spent.cached, 'cached answer')}, {tokens}, cost {spent.money:.4f}"
    )


_SIDE, _EDGE, _BARS = 300, 50, 330
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.q{fill:#777}.grid{stroke:#ddd}.ideal{stroke:#999;stroke-dasharray:4 4}"
    ".mark{fill:#2563eb;fill-opacity:.75}.whisker{stroke:#2563eb;stroke-width:1.5;fill:none}"
)


def render_svg(report: CalibrationReport) -> str:
    """Returns an SVG image that shows the reliability curve and the measured figures with their intervals."""
    calibration = report.calibration
    width, height = _EDGE + _SIDE + 60 + _BARS + 20, _SIDE + 2 * _EDGE + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(printable(calibration.judge, 200))}</title><style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_EDGE}" y="24">{escape(printable(calibration.judge, 100))}: {plural(calibration.agreement.n, "answer")}</text>',
        *_curve(report),
        *_rows(report),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curve(report: CalibrationReport) -> Iterator[str]:
    largest = max(bucket.right.n for bucket in report.bins)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        at, up = _x(tick), _y(tick)
        yield f'<line class="grid" x1="{_EDGE}" x2="{_EDGE + _SIDE}" y1="{up}" y2="{up}"/>'
        yield f'<text class="q" x="{_EDGE - 6}" y="{up + 4}" text-anchor="end">{tick:g}</text>'
        yield f'<text class="q" x="{at}" y="{_y(0) + 18}" text-anchor="middle">{tick:g}</text>'
    yield f'<line class="ideal" x1="{_x(0)}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(1)}"/>'
    yield f'<text x="{_x(0.5)}" y="{_y(0) + 36}" text-anchor="middle">score of the judge</text>'
    yield f'<text x="{_EDGE - 34}" y="{_y(0.5)}" text-anchor="middle" transform="rotate(-90 {_EDGE - 34} {_y(0.5)})">share correct</text>'
    for bucket in report.bins:
        at = _x(min(1.0, max(0.0, bucket.score)))
        yield f'<path class="whisker" d="M{at} {_y(bucket.right.low)}V{_y(bucket.right.high)}"/>'
        radius = round(3 + 6 * (bucket.right.n / largest) ** 0.5, 1)
        yield f'<circle class="mark" cx="{at}" cy="{_y(bucket.right.value)}" r="{radius}"><title>{escape(_bin(bucket))}</title></circle>'


def _rows(report: CalibrationReport) -> Iterator[str]:
    calibration = report.calibration
    named = {
        "agreement": calibration.agreement,
        "kappa": calibration.kappa,
        "sensitivity": calibration.sensitivity,
        "specificity": calibration.specificity,
        "informedness": calibration.informedness,
        "first place": report.position_bias,
        "length": report.length_bias,
    }
    left, width = _EDGE + _SIDE + 150, _BARS - 150

    def at(value: float) -> float:
        return round(left + (min(1.0, max(-1.0, value)) + 1) / 2 * width, 1)

    yield f'<line class="ideal" x1="{at(0)}" x2="{at(0)}" y1="{_EDGE - 6}" y2="{_EDGE + 40 * len(named)}"/>'
    for number, (name, estimate) in enumerate((name, estimate) for name, estimate in named.items() if estimate is not None):
        up = _EDGE + 14 + 40 * number
        yield f'<text x="{left - 10}" y="{up + 4}" text-anchor="end">{name} {estimate.value:.2f}</text>'
        yield f'<path class="whisker" d="M{at(estimate.low)} {up}H{at(estimate.high)}"/>'
        yield f'<circle class="mark" cx="{at(estimate.value)}" cy="{up}" r="5"/>'


def _x(value: float) -> float:
    return round(_EDGE + value * _SIDE, 1)


def _y(value: float) -> float:
    return round(_EDGE + (1 - value) * _SIDE, 1)
