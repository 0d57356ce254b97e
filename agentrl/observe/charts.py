"""The charts of a run. The report and the pages of `agentrl view` draw them with `components/chart.js`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentrl.observe.exclusions import printable_text
from agentrl.observe.stats import Rate
from agentrl.observe.tails import MetricsTable
from agentrl.observe.timeline import PARTS, UTILIZATION

Point = tuple[float, float]
Form = Literal["plain", "count", "whole", "round", "exponent", "rate", "percent"]
"""The format of the values on an axis. `whole` also places the ticks at whole numbers."""
MAX_POINTS, SMALL_POINTS = 1500, 300
"""Maximum number of points in a curve of a large chart, and in a curve of a small chart."""
MAX_SERIES = 4
"""Maximum number of lines in a small chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of a chart: a line, or separate marks if `line=False`."""

    label: str
    points: Sequence[Point]  # sorted by x
    colour: int = 0  # number of the colour; 0 means the position of the series in the chart, counted from 1
    line: bool = True
    intervals: Sequence[tuple[float, float, float]] = ()  # x, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart over steps, versions or tokens."""

    title: str
    series: Sequence[Series]  # each has at least one point
    note: str = ""
    form: Form = "plain"
    y_range: Point | None = None  # None means from 0 (or the smallest value, if it is negative) to the largest value
    x_name: str = "step"
    height: int = 150

    def to_data(self) -> dict[str, Any]:
        """Returns the chart as JSON data."""
        return asdict(self)

    @property
    def text(self) -> str:
        """The chart as JSON, in ASCII. Raises `ValueError` if a number is not finite."""
        return json.dumps(self.to_data(), allow_nan=False)

    @property
    def ends(self) -> list[str]:
        """The first and last point of each series as text, for a reader without JavaScript."""
        ends = [(curve.label, curve.points[0], curve.points[-1]) for curve in self.series]
        return [
            f"{label}: {y:.4g} at {self.x_name} {x:g}, {end_y:.4g} at {self.x_name} {end_x:g}" for label, (x, y), (end_x, end_y) in ends
        ]


_Spec = tuple[str, str, Mapping[str, str], Form]
"""Title, note, metric -> label of its line, and the format of the y axis."""
CHARTS: tuple[_Spec, ...] = (
    ("Staleness", "versions between sampling and learning", {"staleness_mean": "mean", "staleness_max": "max"}, "plain"),
    ("Swap stall", "ms during which requests waited", {"swap_stall_ms": "stall"}, "round"),
    ("Swap probe", "largest |server - learner| logprob, nats", {"swap_probe_max_abs_diff": "difference"}, "exponent"),
    ("Throughput", "sampled tokens per second", {"tokens_per_s": "tokens/s"}, "count"),
    ("Step time", "seconds from swap to swap", {"step_s": "seconds"}, "plain"),
    ("Utilization", "share of a step in which a part was busy", {f"{UTILIZATION}{part}": part for part in PARTS[:4]}, "plain"),
    (
        "Loop latency",
        "seconds from a turn to the version trained on it",
        {"loop_latency_s_mean": "mean", "loop_latency_s_max": "max"},
        "plain",
    ),
    (
        "Queues",
        "groups, and requests on the server, at the end of each step",
        {"groups_running": "running", "groups_ready": "ready", "groups_assigned": "assigned", "requests_waiting": "requests waiting"},
        "whole",
    ),
    ("Sandbox time", "seconds per episode to open, run and close, including waiting", {"sandbox_s_per_episode": "seconds"}, "plain"),
    ("Loss", "", {"loss": "loss"}, "plain"),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}, "plain"),
    ("Entropy", "nats per token", {"entropy": "entropy"}, "plain"),
    ("KL", "behaviour policy to learner, nats per token", {"kl_behaviour": "KL"}, "plain"),
    ("KL to the reference model", "learner to version 0, nats per token", {"kl_reference": "KL"}, "plain"),
    ("Server-learner mismatch", "KL with the same weights, nats per token", {"mismatch_kl": "KL"}, "exponent"),
    ("Ratio extremes", "learner to behaviour policy", {"ratio_max": "largest", "ratio_min": "smallest"}, "plain"),
    ("Effective sample size", "share of tokens, after truncated importance sampling", {"ess": "share"}, "plain"),
    (
        "Spare attempts",
        "attempts that their group did not need",
        {"attempts_cancelled": "cancelled", "attempts_not_begun": "not started"},
        "whole",
    ),
    (
        "Length of cancelled attempts",
        "tokens sampled before the cancellation",
        {"cancelled_tokens_mean": "cancelled", "completion_tokens_mean": "episodes"},
        "plain",
    ),
    (
        "Policy-reachable faults",
        "share of attempts with a fault that the policy may have caused",
        {"excluded_policy_reachable": "share"},
        "plain",
    ),
    ("Faults", "failed attempts and tool calls", {"attempts_failed": "attempts", "tool_failures": "tool calls"}, "whole"),
    ("Updates skipped", "not finite, or beyond a limit", {"updates_left_out": "updates", "rollbacks": "rollbacks"}, "whole"),
    ("Clipped ratios", "share of tokens", {"clip_fraction_high": "from above", "clip_fraction_low": "from below"}, "plain"),
    ("Groups without signal", "all attempts have equal scores", {"groups_without_signal": "groups"}, "whole"),
    ("Episodes excluded", "because of task or infrastructure faults", {"episodes_left_out": "episodes"}, "whole"),
    ("Judges' disagreement", "mean over the episodes with several judges", {"judge_disagreement": "disagreement"}, "plain"),
)
# The first metric of each of these charts is 0 or missing in most runs, and then the chart is not drawn.
_RARE = frozenset({"attempts_cancelled", "cancelled_tokens_mean", "excluded_policy_reachable"})


def reward_chart(table: MetricsTable, rates: Mapping[str, Sequence[Rate | None]]) -> Chart | None:
    """Returns a chart of the training reward and of success on held-out tasks by step; None if neither has values.

    Args:
        rates: split (`heldout` or `heldout_real`) -> success rates before and after training.
    """
    reward = table.curve("reward_mean", MAX_POINTS)
    series = [Series(label="mean training reward", points=reward)] if reward else []
    for colour, (key, label) in enumerate((("heldout", "held-out"), ("heldout_real", "held-out on real data")), 2):
        points, intervals = dict(table.curve(key, MAX_POINTS)), []
        for step, rate in zip((0, table.steps[-1] if table.steps else 0), rates.get(key, ()), strict=False):
            if rate is not None:
                points[step] = rate.value
                intervals.append((float(step), rate.ci_low, rate.ci_high))
        if points:
            series.append(Series(label=label, points=sorted(points.items()), colour=colour, line=False, intervals=intervals))
    values = [y for curve in series for _, y in curve.points]
    y_range = (0.0, 1.0) if values and min(values) >= 0 and max(values) <= 1 else None
    return Chart(title="Reward by step", series=series, form="rate", y_range=y_range, height=300) if series else None


def metric_charts(table: MetricsTable, *, audit: str = "the audit is not used in training") -> list[Chart]:
    """Returns the small charts of a run. A chart is omitted if its metrics have no values, or for some charts, if all values are 0.

    Args:
        audit: note for the chart that shows the mean reward and the mean audit score.
    """
    specs = [*CHARTS]
    if table.series("audit_mean"):
        specs.insert(0, ("Reward and audit", audit, {"reward_mean": "reward", "audit_mean": "audit"}, "plain"))
    parts = [key for key in table.keys if key.startswith("part/")]
    if len(parts) > 1:
        labels = {key: printable_text(key.removeprefix("part/"))[:60] for key in parts[:MAX_SERIES]}
        specs.insert(0, ("Parts of the score", "mean of each part over the episodes that have it", labels, "plain"))
    for metric, title, note, form in _SERVERS:
        names = {f"replica{n}_{metric}": f"server {n}" for n in range(MAX_SERIES)}
        specs.append((title, note, names, form))
    charts = []
    for title, note, metrics, form in specs:
        first = next(iter(metrics))
        rare = first in _RARE or first.endswith("_restarts")
        if rare and not any(value for key in metrics for _, value in table.series(key)):
            continue
        curves = ((label, table.curve(key, SMALL_POINTS)) for key, label in metrics.items())
        series = [Series(label=label, points=points) for label, points in curves if points]
        if series:
            charts.append(Chart(title=title, note=note, series=series, form=form))
    return charts


_SERVERS: tuple[tuple[str, str, str, Form], ...] = (
    ("tokens", "Tokens by server", "sampled in a step", "count"),
    ("restarts", "Restarts by server", "since the run started or resumed", "whole"),
)
