"""`report.html`: what a run did, in one file that reads well on any screen and asks nothing of the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.observe.charts import Format, Series, legend, line_chart
from agentrl.observe.left_out import printable
from agentrl.observe.markup import Html, element, join
from agentrl.observe.page import page
from agentrl.observe.rundata import RunData, read_run
from agentrl.observe.stats import Rate
from agentrl.observe.summary import Summary
from agentrl.observe.transcripts import choose_pairs, render_pair, render_single

_EPISODES_SHOWN = 6
_SETBACKS_SHOWN = 20
_WIDE, _NARROW, _SMALL = (1030, 300), (330, 240), (300, 150)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run folder from whatever is there, also while the run goes on or after it was cut short.

    Raises `StoreError` when there is no such folder.
    """
    run = read_run(run_dir)
    sections = (
        _header(run),
        _headline(run),
        _learning(run),
        _kinds(run),
        _machinery(run),
        _left_out(run),
        _setbacks(run),
        _stages(run),
        _episodes(run),
        _configuration(run),
    )
    text = page(f"{run.name} · agentrl", *sections, element("footer", "Written by agentrl from the files of this run folder."))
    path = run_dir / "report.html"
    beside = path.with_name(".report.html.part")
    beside.write_text(text, encoding="utf-8")
    return beside.replace(path)


def _header(run: RunData) -> Html:
    summary = run.summary
    policy, tasks = run.recipe.get("policy"), run.recipe.get("tasks")
    facts = [
        str(policy["model"]) if isinstance(policy, dict) and "model" in policy else None,
        f"on {tasks['family']}" if isinstance(tasks, dict) and "family" in tasks else None,
        f"{summary.sandbox_backend} sandboxes" if summary else None,
        f"seed {summary.seed}" if summary else None,
    ]
    told = [*(summary.problems if summary else ()), *run.notes]
    notes = element("div", *(element("p", note) for note in told), class_="notes") if told else None
    line = element("p", " · ".join(fact for fact in facts if fact), class_="sub")
    return element("header", element("div", element("h1", run.name), _status(summary), class_="top"), line, notes)


def _status(summary: Summary | None) -> Html:
    if summary is None:
        return element("span", "no summary yet", class_="chip")
    if summary.problems:
        return element("span", "finished without a result" if summary.finished else "no result", class_="chip part")
    if summary.finished:
        return element("span", "finished", class_="chip good")
    return element("span", "interrupted" if summary.interrupted else "not finished", class_="chip part")


def _headline(run: RunData) -> Html | None:
    summary = run.summary
    if summary is None:
        return None
    heads = [
        _head("Held-out tasks", summary.heldout_before, summary.heldout_after),
        _head("Held-out tasks on real data", summary.heldout_real_before, summary.heldout_real_after),
    ]
    tiles = [
        (f"{summary.steps:,}", "learner steps"),
        (f"{summary.episodes:,}", "training episodes"),
        (f"{summary.episodes_left_out:,}", "left out"),
        (f"{summary.tasks_quarantined:,}", "tasks in quarantine"),
        (f"{summary.updates_set_aside:,}", "updates set aside"),
        (_short(summary.tokens_trained), "tokens trained"),
        (f"{summary.weight_swaps:,}", "weight swaps"),
        (_maybe(summary.swap_stall_ms_p50, lambda value: f"{value:.0f} ms"), "median swap stall"),
        (_maybe(summary.swap_probe_max_abs_diff, lambda value: f"{value:.1e}"), "largest probe difference"),
        (_duration(sum(summary.wall_s.values())), "wall time"),
    ]
    grid = element(
        "div", *(element("div", element("b", value), element("span", label), class_="tile") for value, label in tiles), class_="tiles"
    )
    return join((element("div", *heads, class_="heads"), grid))


def _head(title: str, before: Rate | None, after: Rate | None) -> Html | None:
    if before is None and after is None:
        return None
    figures = [
        element("span", _rate(before), class_="from"),
        element("span", "→", class_="arrow"),
        element("span", _rate(after), class_="to"),
    ]
    if before and after:
        gain = after.value - before.value
        figures.append(element("span", f"{100 * gain:+.1f} points", class_=f"gain {'up' if gain >= 0 else 'down'}"))
    tracks = [_track("before", before, "was"), _track("after", after, "now")] if _unit(before) and _unit(after) else []
    scale = element("div", element("span", "0%"), element("span", "50%"), element("span", "100%"), class_="scale") if tracks else None
    told = [f"{name} {_interval(rate)}, n = {rate.n}" for name, rate in (("before", before), ("after", after)) if rate]
    note = element("p", "95% intervals: " + "; ".join(told), class_="note")
    return element("section", element("h3", title), element("div", *figures, class_="figures"), *tracks, scale, note, class_="card head")


def _track(label: str, rate: Rate | None, style: str) -> Html | None:
    if rate is None:
        return None
    span = element("i", style=f"left:{100 * rate.ci_low:.2f}%;width:{100 * (rate.ci_high - rate.ci_low):.2f}%")
    return element(
        "div",
        element("span", label),
        element("div", span, element("b", style=f"left:{100 * rate.value:.2f}%"), class_=f"track {style}"),
        class_="rate",
    )


def _learning(run: RunData) -> Html | None:
    series = [Series(label="mean training reward", color="c4", points=run.series("reward_mean"))]
    for key, label, color, shift in (("heldout", "held-out", "c1", -5.0), ("heldout_real", "held-out on real data", "c2", 5.0)):
        series.append(_evaluations(run, key, Series(label=label, color=color, points=(), line=False, shift=shift)))
    series = [one for one in series if one.points]
    if not series:
        return None
    edges = [edge for one in series for _, y in one.points for edge in (y, y)]
    y_range = (0.0, 1.0) if min(edges) >= 0 and max(edges) <= 1 else None
    both = [
        element(
            "figure",
            line_chart(series, title="Reward by step", width=w, height=h, y_range=y_range, y_format=lambda value: f"{value:.2f}"),
            class_=name,
        )
        for name, (w, h) in (("wide", _WIDE), ("narrow", _NARROW))
    ]
    return _section(
        "Learning",
        f"Training reward after each step ({_sampled(run, 'rollout')}), and success on held-out tasks"
        f" ({_sampled(run, 'evaluation')}) with 95% intervals.",
        element("div", legend(series), *both, class_="card"),
    )


def _sampled(run: RunData, section: str) -> str:
    """How the episodes of a section of the recipe were sampled."""
    settings = run.recipe.get(section)
    temperature = settings.get("temperature") if isinstance(settings, dict) else None
    if not isinstance(temperature, int | float):
        return "temperature unknown"
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


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


def _kinds(run: RunData) -> Html | None:
    by_kind = run.summary.by_kind if run.summary else {}
    before, after = by_kind.get("before", {}), by_kind.get("after", {})
    kinds = sorted({*before, *after})
    if not kinds:
        return None
    heads = [element("th", "kind"), element("th", ""), *(element("th", name, class_="num") for name in ("before", "after", "n"))]
    rows = [_kind_row(kind, before.get(kind), after.get(kind)) for kind in kinds]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="kinds")
    return _section(
        "By kind of task", "Held-out success for each kind of question, before and after training.", element("div", table, class_="card")
    )


def _kind_row(kind: str, before: Rate | None, after: Rate | None) -> Html:
    bars = [
        element("i", class_=style, style=f"width:{100 * min(max(rate.value, 0.0), 1.0):.1f}%") if rate else None
        for style, rate in (("was", before), ("now", after))
    ]
    n = after.n if after else before.n if before else 0
    cells = [
        element("td", text, class_="num", title=_interval(rate) if rate else None)
        for text, rate in ((_rate(before), before), (_rate(after), after))
    ]
    return element(
        "tr", element("td", kind.replace("_", " ")), element("td", *bars, class_="bars"), *cells, element("td", str(n), class_="num")
    )


def _machinery(run: RunData) -> Html | None:
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
        _small(run, "Throughput", "sampled tokens per second", {"tokens_per_s": "tokens/s"}, _short),
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
            "Updates set aside",
            "not finite, or beyond a limit",
            {"updates_set_aside": "updates", "rollbacks": "rollbacks"},
            whole=True,
        ),
        _small(run, "Clipped ratios", "share of tokens", {"clip_fraction_high": "from above", "clip_fraction_low": "from below"}),
        _small(run, "Groups without signal", "all attempts scored alike", {"groups_without_signal": "groups"}, whole=True),
        _small(run, "Episodes left out", "for task or infrastructure faults", {"episodes_left_out": "episodes"}, whole=True),
    ]
    shown = [chart for chart in charts if chart]
    return _section("Inside the loop", "One value for each learner step.", element("div", *shown, class_="multiples")) if shown else None


def _left_out(run: RunData) -> Html | None:
    """Why episodes count in no figure, and how many: of training, then of each evaluation."""
    places = [("training", run.summary.left_out_reasons if run.summary else {})]
    places += [(f"{phase}, {split}", reasons) for phase, split, reasons in run.left_out]
    rows = [
        element("tr", element("td", place), element("td", f"{count:,}", class_="num"), element("td", printable(reason)))
        for place, reasons in places
        for reason, count in reasons.items()
    ]
    if not rows:
        return None
    heads = [element("th", "where"), element("th", "episodes", class_="num"), element("th", "why")]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    note = "These episodes were not scored, so they count in no mean and were not trained on."
    return _section("Left out", f"{note} failures/left_out.jsonl has the ids of those in training.", element("div", table, class_="card"))


def _setbacks(run: RunData) -> Html | None:
    """What was not trained on: the newest of it, with its groups and reasons."""
    if not run.setbacks:
        return None
    heads = [element("th", name) for name in ("step", "what happened", "groups", "episodes", "why")]
    rows = [
        element(
            "tr",
            element("td", str(line["step"]), class_="num"),
            element("td", f"{line.get('what', '')}: {line['action']}"),
            element("td", ", ".join(map(str, line["groups"]))),
            element("td", str(len(line["episodes"])), class_="num"),
            element("td", "; ".join(map(str, line["reasons"]))),
        )
        for line in run.setbacks[-_SETBACKS_SHOWN:]
    ]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    left = len(run.setbacks) - len(rows)
    note = f"{left} earlier ones are in failures/updates.jsonl, with all ids." if left else "failures/updates.jsonl has all ids."
    return _section("Set aside", f"Updates and groups that changed no weights. {note}", element("div", table, class_="card"))


def _small(
    run: RunData, title: str, note: str, keys: Mapping[str, str], y_format: Format = lambda value: f"{value:g}", *, whole: bool = False
) -> Html | None:
    """A card with one chart: `keys` names the metrics and says what each line is called; None when the run has none of them."""
    series = [Series(label=label, color=f"c{1 + n}", points=run.series(key)) for n, (key, label) in enumerate(keys.items())]
    series = [one for one in series if one.points]
    if not series:
        return None
    chart = line_chart(series, title=title, width=_SMALL[0], height=_SMALL[1], y_format=y_format, whole=whole)
    return element(
        "div", element("h3", title), element("p", note, class_="note"), legend(series) if len(series) > 1 else None, chart, class_="card"
    )


def _stages(run: RunData) -> Html | None:
    spent = {name: seconds for name, seconds in (run.summary.wall_s if run.summary else {}).items() if seconds > 0}
    total = sum(spent.values())
    if not total:
        return None
    names = list(spent)
    bars = [
        element("i", class_=f"s{n % 6}", style=f"flex:{spent[name] / total:.4f}", title=f"{name}: {_duration(spent[name])}")
        for n, name in enumerate(names)
    ]
    rows = [
        element(
            "div",
            element("i", class_=f"s{n % 6}"),
            element("span", name),
            element("b", f"{_duration(spent[name])} · {spent[name] / total:.0%}"),
        )
        for n, name in enumerate(names)
    ]
    card = element("div", element("div", *bars, class_="stages"), element("div", *rows, class_="stage-list"), class_="card")
    return _section("Where the time went", f"{_duration(total)} in all.", card)


def _episodes(run: RunData) -> Html | None:
    pairs = choose_pairs(run.episodes.get("before", ()), run.episodes.get("after", ()), _EPISODES_SHOWN)
    if pairs:
        return _section(
            "Episodes to read",
            "The same tasks before and after training. Open one to read it whole.",
            join(render_pair(*pair) for pair in pairs),
        )
    some = [item for lines in run.episodes.values() for item in lines[-_EPISODES_SHOWN // 2 :]]
    return (
        _section("Episodes to read", "Open one to read it whole.", join(render_single(item) for item in some[:_EPISODES_SHOWN]))
        if some
        else None
    )


def _configuration(run: RunData) -> Html | None:
    folds = []
    if run.recipe:
        folds.append(_fold("Recipe", _flat(run.recipe)))
    if run.summary and run.summary.versions:
        folds.append(_fold("Packages", run.summary.versions.items()))
    return join((element("h2", "Configuration"), *folds)) if folds else None


def _fold(title: str, rows: Iterable[tuple[str, str]]) -> Html:
    body = element("tbody", *(element("tr", element("td", name), element("td", value)) for name, value in rows))
    return element("details", element("summary", title), element("table", body), class_="fold")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted keys, as they are written in overrides."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _section(title: str, sub: str, body: Html) -> Html:
    return join((element("h2", title), element("p", sub, class_="sub"), body))


def _unit(rate: Rate | None) -> bool:
    return rate is None or (rate.ci_low >= 0 and rate.ci_high <= 1)


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return "n/a"
    return f"{100 * rate.value:.1f}%" if _unit(rate) else f"{rate.value:.3f}"


def _interval(rate: Rate) -> str:
    return f"{100 * rate.ci_low:.1f}-{100 * rate.ci_high:.1f}%" if _unit(rate) else f"{rate.ci_low:.3f} to {rate.ci_high:.3f}"


def _maybe(value: float | None, form: Format) -> str:
    return "n/a" if value is None else form(value)


def _short(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
