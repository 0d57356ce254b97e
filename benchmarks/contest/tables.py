"""Writes the tables of docs/peers.md from the published comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.errors import UserError
from benchmarks import stored
from benchmarks.contest.comparison import Comparison, published
from benchmarks.contest.outcome import PARTS, Outcome

BEGIN, END = "<!-- made by benchmarks/peers.py --markdown: begin -->", "<!-- made by benchmarks/peers.py --markdown: end -->"
NAMES = {"ours": "agentrl", "trl": "TRL as it ships", "trl-together": "TRL, calls concurrent"}
_RUNS = ["median (range)", "minutes to target", "steps", "held-out of the model it wrote", "tokens trained", "peak GiB", "load"]


def page(path: Path, results: Path) -> None:
    """Writes the tables between the two marks of a page. Raises `UserError` if the page has no marks."""
    text = path.read_text() if path.exists() else ""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise UserError(f"{path} contains no marks for the tables", fix=f"add the lines {BEGIN} and {END} where the tables belong")
    write_atomically(path, f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}")


def tables(results: Path) -> str:
    """Markdown: the ratios of all comparisons, then for each the medians of its runs and its seconds."""
    comparisons = published(results)
    if not comparisons:
        return "No comparison that follows these rules is stored yet."
    return "\n\n".join([summary(comparisons), *(group(name, comparison) for name, comparison in comparisons.items())])


def summary(comparisons: Mapping[str, Comparison]) -> str:
    """Markdown: the ratios of each comparison and peer."""
    rows = [[name, NAMES[peer], *ratios(comparison, peer)] for name, comparison in comparisons.items() for peer in comparison.sides[1:]]
    return _table(["comparison", "peer", "time to the target / agentrl's: median (range, pairs)", "without the start"], rows)


def ratios(comparison: Comparison, peer: str) -> tuple[str, str]:
    """Returns the ratio of the peer's time to agentrl's, from the command on, and without the start. It is a bound if a run was cut off."""
    if late := sum(outcome.arrived_s is None for outcome in comparison.of("ours")):
        return (f"none: {late} of {len(comparison.rounds)} runs of ours did not reach the target",) * 2
    ratio = comparison.ratio(peer)
    return f"**{ratio}**", str(comparison.ratio(peer, lambda outcome: outcome.took_s - outcome.start_s))


def group(name: str, comparison: Comparison) -> str:
    """Markdown of one comparison."""
    setting = comparison.setting
    low, high = setting["wait"]
    wait = f", every program sleeps {low:g} to {high:g} s" if high else ""
    intro = (
        f"{setting['recipe']}, {setting['mode']} turn{'s' if setting['mode'] == 'multi' else ''}{wait}; target {setting['target']:g} of "
        f"{setting['heldout']} held-out tasks, evaluated every {setting['every']} steps; at most {setting['minutes']:g} min."
    )
    runs = [outcome for outcomes in comparison.rounds for outcome in outcomes]
    parts = [
        f"### {name}",
        intro,
        _table(_RUNS, [_runs(NAMES[side], comparison.of(side)) for side in comparison.sides]),
        _where(comparison),
        f"`{comparison.origin['command']}` at commit {comparison.origin['commit'] or 'unknown'}, in one go on "
        f"{stored.describe_machines(outcome.machine for outcome in runs)}, Python {comparison.origin['machine']['python']}. "
        f"TRL with {_options(comparison.options)}. `docs/peers/{name}.json` has each run, the versions, the state of the"
        " machine, and the settings of TRL that were timed.",
    ]
    return "\n\n".join(parts)


def _runs(name: str, runs: Sequence[Outcome]) -> list[str]:
    """The medians of one side's runs. One that did not reach the target counts with the time after which it was cut off."""
    late = sum(outcome.arrived_s is None for outcome in runs)
    return [
        name,
        _spread([outcome.took_s / 60 for outcome in runs], ".1f") + (f", {late} of {len(runs)} not reached" if late else ""),
        _spread([outcome.steps for outcome in runs], ".0f"),
        _spread([outcome.after.value for outcome in runs if outcome.after is not None], ".2f"),
        _spread([outcome.tokens_trained for outcome in runs], ",.0f"),
        _spread([outcome.peak_gib for outcome in runs], ".1f"),
        _spread([float(outcome.machine["load"]) for outcome in runs], ".1f"),
    ]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _where(comparison: Comparison) -> str:
    """Returns the mean seconds of a step per activity, and those of the start."""
    rows = []
    for side in comparison.sides:
        runs = [outcome for outcome in comparison.of(side) if outcome.steps]
        if not runs:
            continue
        steps = sum(outcome.steps for outcome in runs)
        start = statistics.fmean(outcome.start_s for outcome in runs)
        spent = [sum(outcome.parts.get(part, 0.0) for outcome in runs) / steps for part in PARTS if part != "start"]
        rows.append([NAMES[side], f"{start:.0f}", *(f"{seconds:.1f}" for seconds in spent), f"{sum(spent):.1f}"])
    head = ["seconds of a step", "start, once", *(part for part in PARTS if part != "start"), "all"]
    return _table(head, rows)


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items() if value != "" and name != "rollouts")


def _table(head: list[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
