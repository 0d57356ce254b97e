"""`report.html`: what a run did, in one file that reads well on any screen and asks nothing of the network.

Here is what the report says; `agentrl/observe/templates` lays it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.observe import failures
from agentrl.observe.charts import Chart, Series, line_chart
from agentrl.observe.drift import drift_alerts
from agentrl.observe.exclusions import printable_text
from agentrl.observe.formats import Format, format_count, format_duration, format_interval, format_optional, in_unit_interval
from agentrl.observe.gate import read_gate_section
from agentrl.observe.learning_signal import learning_tables
from agentrl.observe.markup import render
from agentrl.observe.rundata import RunData, read_run
from agentrl.observe.stats import Rate, rate_difference
from agentrl.observe.summary import Summary
from agentrl.observe.transcripts import ShownEpisode, choose_pairs, show_episode, show_pair

_EPISODES_SHOWN = 6
_SETBACKS_SHOWN = 20
_WHY_SHOWN = 600  # characters
_PARTS_SHOWN = _LINES_SHOWN = 4  # as many as there are colours
_WIDE, _NARROW, _SMALL = (1030, 300), (330, 240), (300, 150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Success on one held-out split."""

    title: str
    before: Rate | None
    after: Rate | None

    @property
    def gain(self) -> float | None:
        """Percentage points."""
        return 100 * (self.after.value - self.before.value) if self.before and self.after else None

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """95% interval of `gain`."""
        if self.before is None or self.after is None:
            return None
        low, high = rate_difference(self.before, self.after)
        return 100 * low, 100 * high

    @property
    def now(self) -> str:
        """What `after` is called: nothing where it is after nothing."""
        return "" if self.before is None else "after"

    @property
    def on_a_scale(self) -> bool:
        return in_unit_interval(self.before) and in_unit_interval(self.after)

    @property
    def intervals(self) -> str:
        rates = (("before ", self.before), (f"{self.now} ".lstrip(), self.after))
        return "; ".join(f"{name}{format_interval(rate)}, n = {rate.n}" for name, rate in rates if rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Reward by step, for a wide and for a narrow page."""

    note: str
    wide: Chart
    narrow: Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One small chart."""

    title: str
    note: str
    chart: Chart


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run folder from whatever is there, also while the run goes on or after it was cut short.

    Raises `StoreError` when there is no such folder.
    """
    run = read_run(run_dir)
    summary = run.summary
    spent = {name: seconds for name, seconds in (summary.wall_s if summary else {}).items() if seconds > 0}
    episodes_note, episodes = _episodes(run)
    gate = read_gate_section(run_dir)
    text = render(
        "report.html",
        run=run,
        summary=summary,
        facts=_facts(run),
        status=("evaluated", "good") if run.evaluated and summary is None else _status(summary),
        notes=[*(summary.problems if summary else ()), *run.notes, *gate.notes],
        sessions=_sessions(summary) if summary else [],
        gate=gate,
        heads=_heads(summary) if summary else _evaluated(run),
        tiles=_tiles(summary) if summary else [],
        learning=_learning(run),
        kinds=_kinds(summary) if summary else [],
        compute=_compute(run),
        machinery=_machinery(run),
        taught=learning_tables(run.taught),
        failures=failures.failures_section(run.failures),
        left_out=_left_out(run),
        setbacks=_setbacks(run),
        setbacks_earlier=max(len(run.setbacks) - _SETBACKS_SHOWN, 0),
        stages=list(spent.items()),
        total_s=sum(spent.values()),
        episodes_note=episodes_note,
        episodes=episodes,
        recipe=list(_flat(run.recipe)),
        packages=list(summary.versions.items()) if summary else [],
    )
    path = run_dir / "report.html"
    write_atomically(path, text)
    return path


def _facts(run: RunData) -> list[str]:
    summary = run.summary
    policy, tasks = run.recipe.get("policy"), run.recipe.get("tasks")
    facts = [
        str(policy["model"]) if isinstance(policy, dict) and "model" in policy else None,
        f"on {tasks['family']}" if isinstance(tasks, dict) and "family" in tasks else None,
        f"{summary.sandbox_backend} sandboxes" if summary else None,
        f"seed {summary.seed}" if summary else None,
    ]
    return [fact for fact in facts if fact]


def _status(summary: Summary | None) -> tuple[str, str]:
    """What became of the run, and the style of the chip that says so."""
    if summary is None:
        return "no summary yet", ""
    if summary.finished:
        return ("finished without a result", "part") if summary.problems else ("finished", "good")
    if summary.problems and not summary.interrupted:
        return "no result", "part"
    return "interrupted" if summary.interrupted else "not finished", "part"


def _sessions(summary: Summary) -> list[tuple[str, ...]]:
    """The starts of a run: number, time, steps done at the start, and how each ended. Empty if there was only one."""
    rows: list[tuple[str, ...]] = [
        (str(number), one.began, str(one.step), one.ended, printable_text(one.why)[:_WHY_SHOWN])
        for number, one in enumerate(summary.sessions, 1)
    ]
    return rows if len(rows) > 1 else []


def _heads(summary: Summary) -> list[Head]:
    heads = [
        Head(title="Held-out tasks", before=summary.heldout_before, after=summary.heldout_after),
        Head(title="Held-out tasks on real data", before=summary.heldout_real_before, after=summary.heldout_real_after),
    ]
    return [head for head in heads if head.before or head.after]


def _evaluated(run: RunData) -> list[Head]:
    """What `agentrl eval` or `agentrl sample` found, which is all that its folder has to say."""
    titles = {"heldout": "Held-out tasks", "heldout_real": "Held-out tasks on real data", "train": "Training tasks"}
    return [Head(title=title, before=None, after=run.evaluated[split]) for split, title in titles.items() if split in run.evaluated]


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    return [
        (f"{summary.steps:,}", "learner steps"),
        (f"{summary.episodes:,}", "training episodes"),
        (f"{summary.episodes_left_out:,}", "left out"),
        *([(f"{summary.attempts_failed:,}", "attempts ended by faults")] if summary.attempts_failed else []),
        (f"{summary.tasks_quarantined:,}", "tasks in quarantine"),
        *([(f"{summary.tasks_withheld:,}", "training tasks withheld")] if summary.tasks_withheld else []),
        *([(f"{summary.attempts_cancelled:,}", "attempts cancelled")] if summary.attempts_cancelled else []),
        *_judges(summary.judges),
        (f"{summary.updates_left_out:,}", "updates left out"),
        (format_count(summary.tokens_trained), "tokens trained"),
        (format_optional(summary.delivered_share, lambda value: f"{value:.4g}"), "of every sampled token delivered"),
        (f"{summary.weight_swaps:,}", "weight swaps"),
        (format_optional(summary.swap_stall_ms_p50, lambda value: f"{value:.0f} ms"), "median swap stall"),
        (format_optional(summary.swap_probe_max_abs_diff, lambda value: f"{value:.1e}"), "largest probe difference"),
        (format_duration(sum(summary.wall_s.values())), "wall time"),
    ]


def _judges(spent: Mapping[str, float]) -> list[tuple[str, str]]:
    """What judges were asked and have cost; nothing where none was asked."""
    if not spent:
        return []
    tokens = spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)
    money = [(f"{spent['money']:.4g}", "money for judges")] if spent.get("money") else []
    silent = spent.get("abstained", 0) + spent.get("unreadable", 0) + spent.get("failed", 0)
    asked = [(f"{spent.get('calls', 0):,.0f}", "questions to judges"), (format_count(int(tokens)), "tokens of judges"), *money]
    return [*asked, (f"{silent:,.0f}", "questions without a verdict")]


def _learning(run: RunData) -> Learning | None:
    series = [Series(label="mean training reward", color="c4", points=run.series("reward_mean"))]
    for key, label, color, shift in (("heldout", "held-out", "c1", -5.0), ("heldout_real", "held-out on real data", "c2", 5.0)):
        series.append(_evaluations(run, key, Series(label=label, color=color, points=(), line=False, shift=shift)))
    series = [one for one in series if one.points]
    if not series:
        return None
    values = [y for one in series for _, y in one.points]
    y_range = (0.0, 1.0) if min(values) >= 0 and max(values) <= 1 else None

    def chart(size: tuple[int, int]) -> Chart:
        width, height = size
        return line_chart(
            series, title="Reward by step", width=width, height=height, y_range=y_range, y_format=lambda value: f"{value:.2f}"
        )

    note = (
        f"Training reward after each step ({_sampled(run, 'rollout')}), and success on held-out tasks"
        f" ({_sampled(run, 'evaluation')}) with 95% intervals."
    )
    return Learning(note=note, wide=chart(_WIDE), narrow=chart(_NARROW))


def _sampled(run: RunData, section: str) -> str:
    """How the episodes of a section of the recipe were sampled."""
    settings = run.recipe.get(section)
    if not isinstance(settings, dict) or not isinstance(settings.get("temperature"), int | float):
        return "temperature unknown"
    if settings["temperature"] == 0:
        return "greedy"
    said = [f"temperature {settings['temperature']:g}"]
    for key, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        value = settings.get(key, off)
        if isinstance(value, int | float) and value != off:
            said.append(f"{key.replace('_', '-')} {value:g}")
    return ", ".join(said)


def _evaluations(run: RunData, key: str, empty: Series) -> Series:
    """`empty` with the success on one held-out split: before, in between, and after."""
    points = dict(run.series(key))
    intervals: list[tuple[float, float, float]] = []
    last = run.metrics[-1]["step"] if run.metrics else 0
    for step, phase in ((0, "before"), (last, "after")):
        rate: Rate | None = getattr(run.summary, f"{key}_{phase}", None)
        if rate:
            points[step] = rate.value
            intervals.append((step, rate.ci_low, rate.ci_high))
    return replace(empty, points=tuple(sorted(points.items())), intervals=tuple(intervals))


def _kinds(summary: Summary) -> list[tuple[str, Rate | None, Rate | None]]:
    before, after = summary.by_kind.get("before", {}), summary.by_kind.get("after", {})
    return [(kind, before.get(kind), after.get(kind)) for kind in sorted({*before, *after})]


def _compute(run: RunData) -> list[Card]:
    """Success against sampled tokens, for each split of the last evaluation: over budgets for an attempt, and over bounds on thinking."""
    note = "share of tasks solved, by sampled tokens a task"
    return [
        *_against(run.compute, "Success against compute", "", note),
        *_against(run.thinking, "Success against thinking", ", thinking bounded", f"{note}; a point for each bound on thinking, and none"),
    ]


def _against(found: Sequence[tuple[str, int, tuple[tuple[float, float], ...]]], title: str, after: str, note: str) -> list[Card]:
    cards = []
    for split in dict.fromkeys(split for split, _, _ in found):
        lines = [(attempts, points) for other, attempts, points in found if other == split]
        lines = [*lines[:1], *lines[1:][-(_LINES_SHOWN - 1) :]]
        series = [
            Series(label="1 attempt" if attempts == 1 else f"the best of {attempts}", color=f"c{1 + n}", points=points)
            for n, (attempts, points) in enumerate(lines)
        ]
        width, height = _NARROW
        chart = line_chart(
            series,
            title=f"{title}, {split}",
            width=width,
            height=height,
            y_range=(0.0, 1.0),
            y_format=lambda value: f"{value:.2f}",
            x_name="tokens",
        )
        cards.append(Card(title=printable_text(split).replace("_", " ") + after, note=note, chart=chart))
    return cards


def _machinery(run: RunData) -> list[Card]:
    """Small charts of what went on inside; each is there only if the run recorded it."""
    charts = [
        _small(run, "Staleness", "versions between sampling and learning", {"staleness_mean": "mean", "staleness_max": "max"}),
        _small(run, "Swap stall", "ms during which requests waited", {"swap_stall_ms": "stall"}, lambda value: f"{value:.0f}"),
        _small(
            run,
            "Swap probe",
            "largest |server - learner| logprob, nats",
            {"swap_probe_max_abs_diff": "difference"},
            lambda value: f"{value:.0e}" if value else "0",
        ),
        _small(run, "Throughput", "sampled tokens per second", {"tokens_per_s": "tokens/s"}, format_count),
        _small(run, "Step time", "seconds from swap to swap", {"step_s": "seconds"}),
        _small(
            run, "Sandbox time", "seconds of an episode: opening, running, closing, waiting included", {"sandbox_s_per_episode": "seconds"}
        ),
        _small(run, "Loss", "", {"loss": "loss"}),
        _small(run, "Gradient norm", "before clipping", {"grad_norm": "norm"}),
        _small(run, "Entropy", "nats per token", {"entropy": "entropy"}),
        _small(run, "KL", "behaviour policy to learner, nats per token", {"kl_behaviour": "KL"}),
        _small(run, "KL to the reference", "learner to version 0, nats per token", {"kl_reference": "KL"}),
        _small(
            run, "Server against learner", "KL with the same weights, nats per token", {"mismatch_kl": "KL"}, lambda value: f"{value:.0e}"
        ),
        _small(run, "Ratio extremes", "learner to behaviour policy", {"ratio_max": "largest", "ratio_min": "smallest"}),
        _small(run, "Effective sample size", "share of tokens, after truncated importance sampling", {"ess": "share"}),
        _small(
            run,
            "Faults",
            "attempts that failed, and tool calls that raised or ran late",
            {"attempts_failed": "attempts", "tool_failures": "tool calls"},
            whole=True,
        ),
        _small(
            run,
            "Updates left out",
            "not finite, or beyond a limit",
            {"updates_left_out": "updates", "rollbacks": "rollbacks"},
            whole=True,
        ),
        _small(run, "Clipped ratios", "share of tokens", {"clip_fraction_high": "from above", "clip_fraction_low": "from below"}),
        _small(run, "Groups without signal", "all attempts scored alike", {"groups_without_signal": "groups"}, whole=True),
        _small(run, "Further attempts", "that a group had enough without", _further(run), whole=True),
        _small(run, "Length of what was cancelled", "sampled tokens, until then", _lengths(run)),
        _small(run, "Episodes left out", "for task or infrastructure faults", {"episodes_left_out": "episodes"}, whole=True),
        _small(run, "Reward and audit", _drift(run), _audit(run)),
        _small(run, "Judges' disagreement", "mean over the episodes that several judged", {"judge_disagreement": "disagreement"}),
        _small(run, "Unscored", "share of the played episodes that no verifier gave a value", _unscored(run)),
        _small(run, "Tokens by server", "sampled in a step", _replicas(run, "tokens"), format_count),
        _small(run, "Restarts by server", "since the run was started or resumed", _restarted(run), whole=True),
        _small(run, "Parts of the score", "means over the episodes that have them", _parts(run)),
    ]
    return [chart for chart in charts if chart]


def _further(run: RunData) -> dict[str, str]:
    return {"attempts_cancelled": "cancelled", "attempts_not_begun": "not begun"} if run.series("attempts_cancelled") else {}


def _lengths(run: RunData) -> dict[str, str]:
    names = {"cancelled_tokens_mean": "cancelled", "completion_tokens_mean": "episodes"}
    return names if run.series("cancelled_tokens_mean") else {}


def _audit(run: RunData) -> dict[str, str]:
    return {"reward_mean": "reward", "audit_mean": "audit"} if run.series("audit_mean") else {}


def _drift(run: RunData) -> str:
    """What the chart of the audit shows, and every drift alarm of the run."""
    steps = [{key: value for key, value in line.items() if isinstance(value, int | float)} for line in run.metrics]
    found = [f"step {line['step']:g}: {text}" for at, line in enumerate(steps) for text in drift_alerts(steps[: at + 1])]
    return ". ".join(["mean of the training reward, and of what is never trained on", *found])


def _unscored(run: RunData) -> dict[str, str]:
    return {"unscored_share": "share"} if any(value for _, value in run.series("unscored_share")) else {}


def _replicas(run: RunData, figure: str) -> dict[str, str]:
    """The first servers of a policy that has several."""
    return {f"replica{n}_{figure}": f"server {n}" for n in range(_LINES_SHOWN) if run.series(f"replica{n}_{figure}")}


def _restarted(run: RunData) -> dict[str, str]:
    """The same, where one was restarted."""
    found = _replicas(run, "restarts")
    return found if any(value for key in found for _, value in run.series(key)) else {}


def _parts(run: RunData) -> dict[str, str]:
    """The first parts by name; with a single one there is nothing to see that the reward does not show."""
    found = sorted({key for line in run.metrics for key in line if key.startswith("part/")})
    return {key: printable_text(key.removeprefix("part/"))[:60] for key in found[:_PARTS_SHOWN]} if len(found) > 1 else {}


def _small(
    run: RunData, title: str, note: str, keys: Mapping[str, str], y_format: Format = lambda value: f"{value:g}", *, whole: bool = False
) -> Card | None:
    """A card with one chart: `keys` names the metrics and says what each line is called; None when the run has none of them."""
    series = [Series(label=label, color=f"c{1 + n}", points=run.series(key)) for n, (key, label) in enumerate(keys.items())]
    series = [one for one in series if one.points]
    if not series:
        return None
    width, height = _SMALL
    return Card(title=title, note=note, chart=line_chart(series, title=title, width=width, height=height, y_format=y_format, whole=whole))


def _left_out(run: RunData) -> list[tuple[str, int, str]]:
    """Why episodes count in no figure, and how many: of training, then of each evaluation."""
    places = [("training", run.summary.left_out_reasons if run.summary else {})]
    places += [(f"{phase}, {split}", reasons) for phase, split, reasons in run.left_out]
    return [(place, count, printable_text(reason)) for place, reasons in places for reason, count in reasons.items()]


def _setbacks(run: RunData) -> list[tuple[str, ...]]:
    """What was not trained on: the newest of it, with its groups and reasons."""
    return [
        (
            str(line["step"]),
            f"{line.get('what', '')}: {line['action']}",
            ", ".join(map(str, line["groups"])),
            str(len(line["episodes"])),
            "; ".join(map(str, line["reasons"])),
        )
        for line in run.setbacks[-_SETBACKS_SHOWN:]
    ]


def _episodes(run: RunData) -> tuple[str, list[tuple[ShownEpisode, ...]]]:
    pairs = choose_pairs(run.episodes.get("before", ()), run.episodes.get("after", ()), _EPISODES_SHOWN)
    if pairs:
        return "The same tasks before and after training. Open one to read it whole.", [show_pair(*pair) for pair in pairs]
    some = [item for lines in run.episodes.values() for item in lines[-_EPISODES_SHOWN // 2 :]]
    return "Open one to read it whole.", [show_episode(item) for item in some[:_EPISODES_SHOWN]]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted keys, as they are written in overrides."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
