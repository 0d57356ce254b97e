"""The tables of docs/peers.md, from the results beside it and from nothing else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.files import write
from benchmarks.contest.outcome import PARTS, SIDES, Outcome, Point, all_in

BEGIN, END = "<!-- made by benchmarks/peers.py --markdown: begin -->", "<!-- made by benchmarks/peers.py --markdown: end -->"
NAMES = {"ours": "agentrl", "trl": "TRL", "trl-together": "TRL, calls together"}
_RUNS = ["", "seed", "minutes to target", "ended", "steps", "held-out, first", "last", "of the model it left", "tokens sampled", "trained"]
_RUNS += ["peak GiB", "left out", "GFLOPS"]


def page(path: Path, results: Path) -> None:
    """Puts the tables between the two marks of a page. Raises `UserError` when it has none, or there are no results."""
    text = path.read_text() if path.exists() else ""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise UserError(f"{path} has no place for the tables", fix=f"put the lines {BEGIN} and {END} where they are to stand")
    write(path, f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}")


def tables(results: Path) -> str:
    """Markdown: for each setting its runs, what they say, and where the seconds went; then what was tried."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in all_in(results):
        groups.setdefault(_name(outcome), []).append(outcome)
    if not groups:
        raise UserError(f"no results in {results}", fix="run benchmarks/peers.py first")
    made = [_group(name, sorted(some, key=lambda one: (SIDES.index(one.side), one.seed))) for name, some in groups.items()]
    tried = [_tried(path) for path in sorted(results.glob("*-tried.json"))]
    return "\n\n".join([*made, *tried])


def verdict(outcomes: Sequence[Outcome], peer: str) -> str:
    """How a peer's times to the target compare with ours. A run that did not arrive took longer than it was given."""
    ours, theirs = ([one for one in outcomes if one.side == side] for side in ("ours", peer))
    if not ours or not theirs:
        return f"{NAMES[peer if ours else 'ours']}: still to be made."
    if late := [one for one in ours if one.arrived_s is None]:
        return f"{len(late)} of {len(ours)} runs of ours did not arrive, so the times do not compare."
    whole = [[one.clock_s if one.arrived_s is None else one.arrived_s for one in some] for some in (ours, theirs)]
    begun = [
        [seconds - one.parts.get("start", 0.0) for seconds, one in zip(times, some, strict=True)]
        for times, some in zip(whole, (ours, theirs), strict=True)
    ]
    (mine, other), (mine_begun, other_begun) = ([statistics.median(times) for times in both] for both in (whole, begun))
    censored = sum(one.arrived_s is None for one in theirs)
    beside = statistics.median(one.parts.get("evaluation", 0.0) for one in ours)
    least = f"at least (of {len(theirs)} runs {censored} did not arrive) " if censored else ""
    return (
        f"Median time to the target: agentrl {mine / 60:.1f} min, {NAMES[peer]} {other / 60:.1f} min, {least}"
        f"**{other / mine:.1f} times** ours; without the start {mine_begun / 60:.1f} and {other_begun / 60:.1f} min, "
        f"{least}{other_begun / mine_begun:.1f} times. Of ours {beside / 60:.1f} min were evaluations, which count."
    )


def _group(name: str, outcomes: list[Outcome]) -> str:
    setting = outcomes[0].setting
    low, high = setting["wait"]
    wait = f", every program sleeps {low:g} to {high:g} s" if high else ""
    bounds = " or ".join(f"{minutes:g}" for minutes in sorted({float(one.setting["minutes"]) for one in outcomes}))
    told = (
        f"{setting['recipe']}, {setting['mode']} turn{'s' if setting['mode'] == 'multi' else ''}{wait}; target {setting['target']:g} of "
        f"{setting['heldout']} held-out tasks, evaluated every {setting['every']} steps; at most {bounds} min."
    )
    if setting["overrides"]:
        told += f" Overrides: `{' '.join(setting['overrides'])}`."
    parts = [
        f"### {name}",
        told,
        _table(_RUNS, [_run(one) for one in outcomes]),
        *(verdict(outcomes, peer) for peer in SIDES[1:] if peer == "trl" or _has(outcomes, peer)),
        _where(outcomes),
        _made_with(outcomes),
    ]
    return "\n\n".join(parts)


def _has(outcomes: Sequence[Outcome], side: str) -> bool:
    return any(one.side == side for one in outcomes)


def _run(one: Outcome) -> list[str]:
    arrived = f"{one.arrived_s / 60:.1f}" if one.arrived_s is not None else f"not in {one.clock_s / 60:.1f}"
    first, last = (one.curve[0], one.curve[-1]) if one.curve else (None, None)
    return [
        NAMES[one.side],
        str(one.seed),
        arrived,
        one.ended,
        str(one.steps),
        _rate(first) + ("" if first is None or first.step == 0 else f" at step {first.step}"),
        _rate(last),
        _rate(one.after),
        f"{one.tokens_sampled:,}",
        f"{one.tokens_trained:,}",
        f"{one.peak_gib:.1f}",
        f"{one.faults} of {one.episodes}",
        str(one.machine.get("gflops", "-")),
    ]


def _where(outcomes: list[Outcome]) -> str:
    """Mean seconds of a step by part, the start apart."""
    rows = []
    for side in SIDES:
        some = [one for one in outcomes if one.side == side and one.steps]
        if not some:
            continue
        steps = sum(one.steps for one in some)
        start = statistics.fmean(one.parts.get("start", 0.0) for one in some)
        spent = [sum(one.parts.get(part, 0.0) for one in some) / steps for part in PARTS if part != "start"]
        rows.append([NAMES[side], f"{start:.0f}", *(f"{seconds:.1f}" for seconds in spent), f"{sum(spent):.1f}"])
    head = ["seconds of a step", "start, once", *(part for part in PARTS if part != "start"), "all"]
    return _table(head, rows)


def _made_with(outcomes: list[Outcome]) -> str:
    one = outcomes[-1]
    machine = one.machine
    versions = ", ".join(f"{name} {number}" for name, number in one.versions.items())
    host = f"{machine.get('cores')} cores ({machine.get('processor')}), {machine.get('memory_gib')} GiB, Python {machine.get('python')}"
    lines = [f"Made on {host}; {versions}."]
    for side in SIDES:
        if some := [made for made in outcomes if made.side == side]:
            lines.append(f"{NAMES[side]}: `{some[0].command}`" + (f" with {_options(some[0].settings)}" if some[0].settings else "") + ".")
    notes = sorted({made.note for made in outcomes if made.note})
    return "\n".join([*lines, *notes])


def _tried(path: Path) -> str:
    data = json.loads(path.read_text())
    rows = []
    for one in data["tried"]:
        seconds = f"{one['seconds_a_step']:.1f}" if one["seconds_a_step"] is not None else "failed"
        parts = [f"{one['parts'].get(name, 0.0) / max(1, one['steps']):.1f}" for name in ("rollout", "wait", "update")]
        note = one.get("failed", "")[:120].replace("|", "/")
        rows.append([_options(one["change"]) or "the settings above", seconds, *parts, f"{one['peak_gib']:.1f}", note])
    head = ["changed", "seconds a step", "rollout", "wait", "update", "peak GiB", ""]
    name = path.name.removesuffix("-tried.json")
    overrides = f", and for both sides {' '.join(data['setting']['overrides'])}" if data["setting"]["overrides"] else ""
    return f"### What was tried for TRL: {name}\n\nBeginning with {_options(data['base'])}{overrides}.\n\n{_table(head, rows)}"


def _name(outcome: Outcome) -> str:
    from benchmarks.contest.setting import Setting

    setting = {**outcome.setting, "wait": tuple(outcome.setting["wait"]), "overrides": tuple(outcome.setting["overrides"])}
    return Setting(**setting).name


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items() if value != "")


def _rate(point: Point | None) -> str:
    return f"{point.value:.2f} [{point.ci_low:.2f}, {point.ci_high:.2f}]" if point is not None else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
