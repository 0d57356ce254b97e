"""The JSON of a gate's verdict on a version: the cases that regressed, each before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.evaluation.results import EPISODES
from agentrl.gate.verdict import evaluation_folder, read_verdict
from agentrl.observe.rundata import Line, iter_lines
from agentrl.view.failure_data import transcript_data
from agentrl.view.source import Missing, RunSource

_MAX_EPISODES = 64 << 20
_CASES = 20


def gate_data(source: RunSource, version: int) -> dict[str, Any]:
    """Returns the verdict on a version with both transcripts of each regressed case. Raises `Missing` and `StoreError`."""
    verdict = read_verdict(source.path, version)
    if verdict is None:
        raise Missing(f"the gate has no verdict on version {version}", fix="choose a version under Gate on the run's page")
    shown = verdict.regressions[:_CASES]
    after = _episodes(source.path, version, {one.episode for one in shown})
    before = _episodes(source.path, verdict.reference, {one.before_episode for one in shown}) if verdict.reference is not None else {}
    cases = [
        {
            "case": one.case[:200],
            "turn": one.turn,
            "before": _transcript(before, one.before_episode, f"version {verdict.reference}"),
            "after": _transcript(after, one.episode, f"version {version}"),
        }
        for one in shown
    ]
    return {
        "run": source.id,
        "version": version,
        "reference": verdict.reference,
        "outcome": str(verdict.outcome),
        "reason": verdict.reason[:2000],
        "cases": cases,
        "more": max(0, len(verdict.regressions) - _CASES),
    }


def _episodes(run_dir: Path, version: int, wanted: set[str]) -> dict[str, Line]:
    path = evaluation_folder(run_dir, version) / EPISODES
    lines = iter_lines(path, {"episode": str, "messages": list}, [], most=_MAX_EPISODES, inside=run_dir)
    return {line["episode"]: line for line in lines if line["episode"] in wanted}


def _transcript(episodes: dict[str, Line], name: str, phase: str) -> dict[str, Any] | None:
    line = episodes.get(name)
    return None if line is None else transcript_data(phase, line)
