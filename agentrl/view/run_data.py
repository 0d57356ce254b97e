"""The JSON for a run (curves, alerts, parts and ledger) and for the comparison of several runs."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from agentrl.errors import StoreError
from agentrl.observe.charts import MAX_POINTS, metric_charts, reward_chart
from agentrl.observe.drift import HISTORY, past_alerts
from agentrl.observe.report_data import SETBACK
from agentrl.observe.run_comparison import compare_folders
from agentrl.observe.run_folders import run_state
from agentrl.observe.rundata import Line, as_list, as_mapping, is_finite, iter_lines, read_object, read_rate
from agentrl.observe.summary import SUMMARY_FILE, read_sessions
from agentrl.observe.timeline import PREFIX, time_by_state
from agentrl.view.gate_data import verdict_rows
from agentrl.view.source import RunSource

_ALERTED = 400  # number of newest steps whose alerts are computed
_DROPS = 8
_MAX_FILE = 2 << 20  # parsed JSON may need twenty times the size of its text in memory
_MAX_SETBACKS = 64 << 20
_SETBACKS = 50
_MAX_ENTRIES = 200  # maximum number of entries in a table in summary.json


def run_data(source: RunSource) -> dict[str, Any]:
    """Returns the data that the page of a run shows initially. Raises `Missing` if the run was removed."""
    notes = source.refresh()
    recipe, metrics = source.recipe_data(), source.metrics
    steps, total = metrics.steps, recipe.get("steps") if is_finite(recipe.get("steps")) else None
    summary = read_object(source.path / SUMMARY_FILE, notes, most=_MAX_FILE)
    state = run_state(source.path)
    return {
        "id": source.id,
        "name": source.name,
        "state": state,
        "notes": notes,
        "recipe": _recipe_facts(recipe),
        "step": steps[-1] if steps else None,
        "first_step": steps[0] if steps else None,
        "steps": total,
        "left_s": metrics.seconds_left(total) if state == "running" else None,
        "reward": metrics.curve("reward_mean", MAX_POINTS),
        "reward_chart": _reward_chart(source, summary),
        "drops": reward_drops(metrics.series("reward_mean")),
        "charts": [chart.to_data() for chart in metric_charts(metrics)],
        "alerts": _alerts(source),
        "parts": _parts(source),
        "summary": _summary_facts(summary),
        "setbacks": _setbacks(source, notes),
        "gate": verdict_rows(source, notes),
        "sessions": _sessions(source),
    }


def ledger_data(source: RunSource) -> dict[str, Any]:
    """Returns the ledger's counts, or the reason why there are none."""
    try:
        return {"counts": asdict(source.store().counts()), "problem": None}
    except StoreError as error:
        return {"counts": None, "problem": str(error)[:600]}


def curves_data(source: RunSource, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the curves of the metrics `keys`, and the names of all metrics."""
    notes = source.refresh()
    return {"notes": notes, "keys": source.metrics.keys, "curves": {key: source.metrics.curve(key, MAX_POINTS) for key in keys}}


def reward_drops(points: Sequence[tuple[int, float]]) -> list[dict[str, float]]:
    """Returns up to 8 steps with the largest falls of the reward, the largest first. A fall counts if it is at least a third of the
    standard deviation of the reward's changes between consecutive steps."""
    changes = [(step, value, value - before) for (_, before), (step, value) in pairwise(points)]
    if len(changes) < 2:
        return []
    spread = statistics.pstdev(change for _, _, change in changes)
    largest = sorted(changes, key=lambda item: item[2])[:_DROPS]
    fell = [drop for drop in largest if -drop[2] >= max(spread / 3, 1e-9)]
    return [{"step": step, "value": value, "before": value - change} for step, value, change in fell]


def _reward_chart(source: RunSource, summary: Line) -> dict[str, Any] | None:
    rates = {key: [read_rate(summary.get(f"{key}_{phase}")) for phase in ("before", "after")] for key in ("heldout", "heldout_real")}
    chart = reward_chart(source.metrics, rates)
    return None if chart is None else chart.to_data()


def _alerts(source: RunSource) -> list[dict[str, Any]]:
    """Returns the drift and limit alerts for the newest steps, the newest first."""
    recipe, _ = source.recipe()
    rows = source.metrics.rows(source.metrics.steps[-(_ALERTED + HISTORY) :])
    alerts = past_alerts(rows, newest=_ALERTED, limits=() if recipe is None else recipe.learner.limits)
    return [{"step": step, "text": text} for step, text in alerts][::-1]


def _parts(source: RunSource) -> list[dict[str, Any]]:
    """Returns the seconds that each part spent in each state: in the newest step, and over the steps with a timeline (at most the newest
    2,000)."""
    numbers = [step for step, _ in source.metrics.series(f"{PREFIX}server/busy")] or source.metrics.steps[-1:]
    newest = time_by_state(source.metrics.rows(numbers[-1:]))
    total = time_by_state(source.metrics.rows(numbers[-2000:]))
    return [{"part": part, "newest": newest.get(part, {}), "total": states} for part, states in total.items()]


def _recipe_facts(recipe: Line) -> dict[str, str]:
    def text(*path: str) -> str:
        value: Any = recipe
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        value = value.get("ref") if isinstance(value, dict) else value
        return "" if value is None else str(value)[:200]

    facts = {"model": text("policy", "model"), "tasks": text("tasks", "family"), "advantage": text("objective", "advantage")}
    facts |= {"loss": text("objective", "loss"), "learning rate": text("learner", "lr"), "staleness": text("max_staleness")}
    facts |= {"temperature": text("rollout", "sampling", "temperature"), "seed": text("seed")}
    return {name: value for name, value in facts.items() if value}


def _summary_facts(summary: Line) -> Line:
    """Returns the figures of summary.json, with at most `_MAX_ENTRIES` entries per mapping, and shortened problems."""
    facts: Line = {key: value for key, value in summary.items() if is_finite(value) or isinstance(value, bool) or read_rate(value)}
    for key in ("failures", "left_out_reasons", "tokens", "versions", "judges"):
        if isinstance(summary.get(key), dict):
            facts[key] = dict(list(summary[key].items())[:_MAX_ENTRIES])
    if times := {name: value for name, value in _entries(summary.get("wall_s")) if is_finite(value)}:
        facts["wall_s"] = times
    facts["by_kind"] = {
        phase: {kind: rate for kind, rate in _entries(kinds) if read_rate(rate)} for phase, kinds in _entries(summary.get("by_kind"))
    }
    return facts | {"problems": [str(problem)[:500] for problem in as_list(summary.get("problems"))[:20]]}


def _entries(value: Any) -> list[tuple[str, Any]]:
    return list(as_mapping(value).items())[:_MAX_ENTRIES]


def _setbacks(source: RunSource, notes: list[str]) -> list[Line]:
    """Returns the newest skipped updates and untrained groups, with the reasons."""
    path = source.path / "failures" / "updates.jsonl"
    lines = deque(iter_lines(path, SETBACK, notes, most=_MAX_SETBACKS, inside=source.path), maxlen=_SETBACKS)
    names = ("step", "what", "action")
    return [
        {name: line.get(name) for name in names if isinstance(line.get(name), int | str)}
        | {"reasons": [str(reason)[:300] for reason in line["reasons"][:8]]}
        | {"groups": [group for group in line["groups"][:50] if isinstance(group, int)]}
        for line in reversed(lines)
    ]


def _sessions(source: RunSource) -> list[Line]:
    try:
        return [session.model_dump() for session in read_sessions(source.path)[-50:]]
    except (OSError, ValueError):
        return []


CURVES = ("reward_mean", "heldout", "entropy", "kl_behaviour", "clip_fraction", "grad_norm", "completion_tokens_mean", "step_s")


def compare_runs(sources: Sequence[RunSource]) -> dict[str, Any]:
    """Returns the comparison as JSON data, with the runs in the given order. Raises `Missing` if a run was removed, and `UserError` if
    there are fewer than two."""
    notes = []
    for source in sources:
        with source.lock:
            notes += [f"{source.name}: {note}" for note in source.refresh()]
    compared = compare_folders([source.path for source in sources])
    return {
        "runs": [{"id": source.id, "name": source.name} for source in sources],
        "curves": {key: [source.metrics.curve(key, MAX_POINTS) for source in sources] for key in CURVES},
        **_shortened(compared.to_data()),
        "notes": notes,
    }


def _shortened(data: Mapping[str, Any]) -> dict[str, Any]:
    """Truncates the values of settings, which a third party may have written."""
    settings = [
        {"key": row["key"][:200], "values": [value if len(value) <= 400 else f"{value[:400]}…" for value in map(_text, row["values"])]}
        for row in data["settings"][:400]
    ]
    return {**data, "settings": settings}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
