"""The JSON for a run's gate: the verdict on each version, and both transcripts of each regressed case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.evaluation.results import EPISODES
from agentrl.gate.verdict import evaluation_folder, read_verdict
from agentrl.observe.rundata import Line, as_mapping, is_finite, iter_lines, read_object
from agentrl.view.failure_data import transcript_data
from agentrl.view.source import Missing, RunSource

_MAX_EPISODES = 64 << 20
_MAX_VERDICT = 2 << 20  # parsed JSON may need twenty times the size of its text in memory
_GATE_CASES = 20


def verdict_rows(source: RunSource, notes: list[str]) -> list[Line]:
    """Returns the 200 newest verdicts of the gate, the newest first; empty if there is no gate. Unreadable files are added to `notes`."""
    folder = source.path / "gate"
    try:
        numbers = sorted((int(path.name) for path in folder.iterdir() if path.name.isdecimal() and len(path.name) < 12), reverse=True)
    except OSError:
        return []
    rows = []
    for number in numbers[:200]:
        verdict = read_object(folder / f"{number:06d}" / "verdict.json", notes, most=_MAX_VERDICT, inside=source.path)
        if verdict:
            fields = {name: verdict.get(name) for name in ("outcome", "reason", "compared_with")}
            figures = as_mapping(verdict.get("figures"))
            rates = {name: figures.get(name) for name in ("pass_at_1", "low", "high", "attempts", "tokens") if is_finite(figures.get(name))}
            rows.append({"version": number, **{name: str(value)[:600] for name, value in fields.items() if value is not None}, **rates})
    return rows


def gate_data(source: RunSource, version: int) -> dict[str, Any]:
    """Returns the verdict on a version, with both transcripts of the first 20 regressed cases. Raises `Missing` if there is no verdict
    on this version, and `StoreError` if the verdict cannot be read."""
    verdict = read_verdict(source.path, version)
    if verdict is None:
        raise Missing(f"the gate has no verdict on version {version}", fix="choose a version under Gate on the run's page")
    shown = verdict.regressions[:_GATE_CASES]
    after = _gate_episodes(source.path, version, {regression.episode for regression in shown})
    before = (
        _gate_episodes(source.path, verdict.reference, {regression.before_episode for regression in shown})
        if verdict.reference is not None
        else {}
    )
    cases = [
        {
            "case": regression.case[:200],
            "turn": regression.turn,
            "before": _transcript(before, regression.before_episode, f"version {verdict.reference}"),
            "after": _transcript(after, regression.episode, f"version {version}"),
        }
        for regression in shown
    ]
    return {
        "run": source.id,
        "version": version,
        "reference": verdict.reference,
        "outcome": str(verdict.outcome),
        "reason": verdict.reason[:2000],
        "cases": cases,
        "more": max(0, len(verdict.regressions) - _GATE_CASES),
    }


def _gate_episodes(run_dir: Path, version: int, wanted: set[str]) -> dict[str, Line]:
    path = evaluation_folder(run_dir, version) / EPISODES
    lines = iter_lines(path, {"episode": str, "messages": list}, [], most=_MAX_EPISODES, inside=run_dir)
    return {line["episode"]: line for line in lines if line["episode"] in wanted}


def _transcript(episodes: dict[str, Line], name: str, phase: str) -> dict[str, Any] | None:
    line = episodes.get(name)
    return None if line is None else transcript_data(phase, line)
