"""A run with the plugins of a third-party package, which agentrl does not mention anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from agentrl.records import Group, codec

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("steps=2", "rollout.groups_per_step=4", "rollout.group.size=12", "rollout.concurrency=24"),
    *("evaluation.heldout=8", "evaluation.heldout_real=0"),
]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.bubblewrap
@pytest.mark.e2e
def test_a_run_trains_with_third_party_plugins(site: Path, tmp_path: Path) -> None:
    run, counts_file, journal, columns = (
        tmp_path / "run",
        tmp_path / "sandboxes.json",
        tmp_path / "ended",
        ["reward_mean", "advantage_std"],
    )
    overrides = [
        *("rollout.agent=fieldkit.agent:JournalAgent", f"rollout.agent.options={json.dumps({'journal': str(journal)})}"),
        *("sandbox.backend=fieldkit-sandboxes", f"sandbox.backend.options={json.dumps({'account': str(counts_file)})}"),
        *("serving.weight_transfer=fieldkit.channel:JournalChannel", 'serving.weight_transfer.options={"journal": "went.jsonl"}'),
        *("store=fieldkit-store", 'store.options={"folder": "kept"}'),
        f"trackers={json.dumps(['terminal', {'ref': 'fieldkit.tracker:CsvTracker', 'options': {'columns': columns}}])}",
        *("objective.advantage=leave-one-out", 'objective.advantage.options={"scale": 3.0}'),
        *("objective.loss=fieldkit.objective:soft_clip", 'objective.loss.options={"width": 0.5}'),
    ]
    command = [sys.executable, "-m", "agentrl", "train", "recipes/quickstart.py", *SMALL, *overrides, "--run-dir", str(run), "--json"]
    python_path = os.pathsep.join([str(site), str(ROOT)])
    completed = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True, timeout=1500, check=False
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    summary = json.loads(completed.stdout.splitlines()[-1])
    assert summary["finished"] and summary["sandbox_backend"] == "counted"

    counts = json.loads(counts_file.read_text())
    assert counts["opened"] >= 8 and counts["programs"] >= 8
    assert len(journal.read_text().splitlines()) >= 2 * 4 * 12 + 8, "every episode of both steps and of an evaluation"
    assert not (run / "experience.sqlite").exists() and not (run / "logs" / "tensorboard").exists()
    groups = [codec.from_json(Group, file.read_bytes()) for file in sorted((run / "kept").glob("[0-9]*.json"))]
    assert [group.index for group in groups] == list(range(8))
    consumed = json.loads((run / "kept" / "taken.json").read_text())
    assert sorted(map(int, consumed)) == list(range(8)) and sorted(entry["step"] for entry in consumed.values()) == [0] * 4 + [1] * 4
    assert all(entry["use"] is not None for entry in consumed.values())
    assert [json.loads(line)["version"] for line in (run / "went.jsonl").read_text().splitlines()] == [1, 2]

    rows = [line.split(",") for line in (run / "figures.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["before", "1", "2", "after"]
    for step in (0, 1):
        advantages = [value for group in groups[4 * step : 4 * step + 4] for value in _expected_advantages(group)]
        if advantages:  # the scores differ
            assert float(rows[step + 1][2]) == pytest.approx(pstdev(advantages), rel=1e-9)
    log = (run / "logs" / "learner.log").read_text()
    assert "fieldkit: leave-one-out over 4 groups" in log and "fieldkit: soft clip of " in log
    assert summary["tokens_trained"] > 0


def _expected_advantages(group: Group) -> list[float]:
    """Three times the leave-one-out advantages of the scored episodes, or nothing for a group of equal scores."""
    scores = [scored.score.value for scored in group.scored if scored.score.value is not None]
    advantages = [3.0 * (score - fmean(scores[:at] + scores[at + 1 :])) for at, score in enumerate(scores)] if len(scores) > 1 else []
    return advantages if any(advantages) else []
