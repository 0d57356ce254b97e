"""Writes `report.html`: the results of a run in one self-contained file that loads nothing from the network.

This module computes the content of the report, and the templates in `agentrl/observe/templates` define its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import write_atomically
from agentrl.observe.charts import MAX_SERIES, Chart, Series, metric_charts, reward_chart
from agentrl.observe.drift import past_alerts
from agentrl.observe.evaluations import read_gate_section
from agentrl.observe.exclusions import printable_text
from agentrl.observe.markup import render
from agentrl.observe.report_data import Curves, RunData, read_run
from agentrl.observe.run_comparison import flatten
from agentrl.observe.sections import failures_section, learning_tables
from agentrl.observe.stats import (
    Rate,
    format_count,
    format_duration,
    format_interval,
    format_optional,
    in_unit_interval,
    rate_difference,
)
from agentrl.observe.summary import Summary
from agentrl.observe.timeline import BUSY, time_by_state
from agentrl.observe.transcripts import ShownEpisode, choose_pairs, show_episode

_EPISODES_SHOWN = 6
_SETBACKS_SHOWN = 20
_MAX_WHY = 600  # maximum number of characters in a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The success rates on one split, before and after training."""

    title: str
    before: Rate | None
    after: Rate | None

    @property
    def gain(self) -> float | None:
        """The rate after training minus the rate before, in percentage points; None if a rate is missing."""
        return 100 * (self.after.value - self.before.value) if self.before and self.after else None

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """The 95% interval of `gain`; None if a rate is missing."""
        if self.before is None or self.after is None:
            return None
        low, high = rate_difference(self.before, self.after)
        return 100 * low, 100 * high

    @property
    def now(self) -> str:
        """The label of the rate `after`; empty if there is no rate `before`."""
        return "" if self.before is None else "after"

    @property
    def on_a_scale(self) -> bool:
        """Whether both rates and their intervals are within [0, 1]."""
        return in_unit_interval(self.before) and in_unit_interval(self.after)

    @property
    def intervals(self) -> str:
        """The intervals of both rates as text, each with its number of episodes."""
        rates = (("before ", self.before), (f"{self.now} ".lstrip(), self.after))
        return "; ".join(f"{name}{format_interval(rate)}, n = {rate.n}" for name, rate in rates if rate)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run folder, with the content of the files that exist in the folder.

    This function can be called during a run or after an interruption. Raises `StoreError` if the folder does not exist, and `OSError` if
    the report cannot be written.
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
        learning_note=_learning_note(run),
        kinds=_kinds(summary) if summary else [],
        compute=_compute(run),
        machinery=metric_charts(run.metrics, audit=_drift_note(run)),
        learning_signal=learning_tables(run.taught),
        failures=failures_section(run.failures),
        excluded=_excluded(run),
        setbacks=_setbacks(run),
        setbacks_earlier=max(len(run.setbacks) - _SETBACKS_SHOWN, 0),
        stages=list(spent.items()),
        total_s=sum(spent.values()),
        timeline=_timeline(run),
        episodes_note=episodes_note,
        episodes=episodes,
        recipe=[(name, str(value)) for name, value in flatten(run.recipe)],
        packages=list(summary.versions.items()) if summary else [],
    )
    path = run_dir / "report.html"
    write_atomically(path, text)
    return path


def _timeline(run: RunData) -> list[tuple[str, list[tuple[str, float]], float]]:
    """Returns, for each part of the run, the seconds in each state (the busy state first) and the sum; empty if no step has a timeline."""
    steps = [{key: value for key, value in line.items() if value > 0} for line in run.metrics.rows()]
    rows = []
    for part, spent in time_by_state(steps).items():
        states = sorted(((printable_text(state)[:60], seconds) for state, seconds in spent.items()), key=lambda item: item[0] != BUSY)
        rows.append((part, states, sum(spent.values())))
    return rows


def _facts(run: RunData) -> list[str]:
    summary = run.summary
    policy, tasks = run.recipe.get("policy"), run.recipe.get("tasks")
    family = tasks.get("family") if isinstance(tasks, dict) else None
    facts = [
        str(policy["model"]) if isinstance(policy, dict) and "model" in policy else None,
        f"on {family.get('ref') if isinstance(family, dict) else family}" if family else None,
        f"{summary.sandbox_backend} sandboxes" if summary else None,
        f"seed {summary.seed}" if summary else None,
    ]
    return [fact for fact in facts if fact]


def _status(summary: Summary | None) -> tuple[str, str]:
    """Returns the status of the run, and the style of the status label."""
    if summary is None:
        return "no summary yet", ""
    if summary.finished:
        return ("finished without a result", "part") if summary.problems else ("finished", "good")
    if summary.problems and not summary.interrupted:
        return "no result", "part"
    return "interrupted" if summary.interrupted else "not finished", "part"


def _sessions(summary: Summary) -> list[tuple[str, ...]]:
    """Returns a row for each session of a run: number, start time, steps done before, how it ended, and why.

    The result is empty if there was only one session.
    """
    rows: list[tuple[str, ...]] = [
        (str(number), one.began, str(one.step), one.ended, printable_text(one.why)[:_MAX_WHY])
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
    """Returns the success rates from `agentrl eval` or `agentrl sample`."""
    titles = {"heldout": "Held-out tasks", "heldout_real": "Held-out tasks on real data", "train": "Training tasks"}
    return [Head(title=title, before=None, after=run.evaluated[split]) for split, title in titles.items() if split in run.evaluated]


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    return [
        (f"{summary.steps:,}", "learner steps"),
        (f"{summary.episodes:,}", "training episodes"),
        (f"{summary.episodes_left_out:,}", "episodes excluded"),
        *_nonzero(summary.attempts_failed, "attempts ended by faults"),
        (f"{summary.tasks_quarantined:,}", "tasks in quarantine"),
        *_nonzero(summary.tasks_withheld, "training tasks withheld"),
        *_nonzero(summary.attempts_cancelled, "attempts cancelled"),
        *_judge_tiles(summary.judges),
        (f"{summary.updates_left_out:,}", "updates skipped"),
        (format_count(summary.tokens_trained), "tokens trained"),
        (format_optional(summary.delivered_share, lambda value: f"{value:.4g}"), "tokens delivered per sampled token"),
        (f"{summary.weight_swaps:,}", "weight swaps"),
        (format_optional(summary.swap_stall_ms_p50, lambda value: f"{value:.0f} ms"), "median swap stall"),
        (format_optional(summary.swap_probe_max_abs_diff, lambda value: f"{value:.1e}"), "largest probe difference"),
        (format_duration(sum(summary.wall_s.values())), "wall time"),
    ]


def _nonzero(count: int, label: str) -> list[tuple[str, str]]:
    return [(f"{count:,}", label)] if count else []


def _judge_tiles(usage: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the figures about the judges' usage and cost; empty if the run has no judges."""
    if not usage:
        return []
    tokens = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
    money = [(f"{usage['money']:.4g}", "judge cost")] if usage.get("money") else []
    without_verdict = usage.get("abstained", 0) + usage.get("unreadable", 0) + usage.get("failed", 0)
    return [
        (f"{usage.get('calls', 0):,.0f}", "questions to judges"),
        (format_count(int(tokens)), "judge tokens"),
        *money,
        (f"{without_verdict:,.0f}", "questions without a verdict"),
    ]


def _learning(run: RunData) -> Chart | None:
    rates = {
        key: tuple(getattr(run.summary, f"{key}_{phase}", None) for phase in ("before", "after")) for key in ("heldout", "heldout_real")
    }
    return reward_chart(run.metrics, rates)


def _learning_note(run: RunData) -> str:
    return (
        f"Training reward after each step ({_sampling(run, 'rollout')}), and success on held-out tasks"
        f" ({_sampling(run, 'evaluation')}) with 95% intervals."
    )


def _sampling(run: RunData, name: str) -> str:
    """Returns a description of the sampling settings in the section `name` of the recipe."""
    section = run.recipe.get(name)
    settings = section.get("sampling") if isinstance(section, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("temperature"), int | float):
        return "temperature unknown"
    if settings["temperature"] == 0:
        return "greedy"
    parts = [f"temperature {settings['temperature']:g}"]
    for key, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        value = settings.get(key, off)
        if isinstance(value, int | float) and value != off:
            parts.append(f"{key.replace('_', '-')} {value:g}")
    return ", ".join(parts)


def _kinds(summary: Summary) -> list[tuple[str, Rate | None, Rate | None]]:
    before, after = summary.by_kind.get("before", {}), summary.by_kind.get("after", {})
    return [(kind, before.get(kind), after.get(kind)) for kind in sorted({*before, *after})]


def _compute(run: RunData) -> list[Chart]:
    """Returns charts of success by sampled tokens for each split in the last evaluation.

    For each split, one chart compares token budgets of an attempt, and one chart compares limits on thinking.
    """
    note = "share of tasks solved, by sampled tokens per task"
    return [
        *_compute_cards(run.compute, "Within a budget", note),
        *_compute_cards(run.thinking, "With bounded thinking", f"{note}; one point per bound, and one without a bound"),
    ]


def _compute_cards(curves: Curves, title: str, note: str) -> Iterator[Chart]:
    for split in dict.fromkeys(split for split, _, _ in curves):
        lines = [(attempts, points) for other, attempts, points in curves if other == split]
        lines = [*lines[:1], *lines[1:][-(MAX_SERIES - 1) :]]
        series = [Series(label="1 attempt" if attempts == 1 else f"the best of {attempts}", points=points) for attempts, points in lines]
        name = f"{title}, {printable_text(split).replace('_', ' ')}"
        yield Chart(title=name, note=note, series=series, form="rate", y_range=(0.0, 1.0), x_name="tokens", height=200)


def _drift_note(run: RunData) -> str:
    """Returns the note for the chart of reward and audit, with all drift alerts of the run."""
    alerts = [f"step {step}: {text}" for step, text in past_alerts(run.metrics.rows())]
    return ". ".join(["mean training reward, and mean audit score, which is not used in training", *alerts])


def _excluded(run: RunData) -> list[tuple[str, int, str]]:
    """Returns triples (training or evaluation, number of excluded episodes, reason), training first."""
    counts = [("training", run.summary.left_out_reasons if run.summary else {})]
    counts += [(f"{phase}, {split}", reasons) for phase, split, reasons in run.left_out]
    return [(where, count, printable_text(reason)) for where, reasons in counts for reason, count in reasons.items()]


def _setbacks(run: RunData) -> list[tuple[str, ...]]:
    """Returns a row for each of the newest updates that were skipped and groups that were not trained on, with the reasons."""
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
        shown = [(show_episode(before, "before training"), show_episode(after, "after training")) for before, after in pairs]
        return "The same tasks before and after training.", list(shown)
    some = [item for lines in run.episodes.values() for item in lines[-_EPISODES_SHOWN // 2 :]]
    return "A sample of the episodes.", [(show_episode(item),) for item in some[:_EPISODES_SHOWN]]
