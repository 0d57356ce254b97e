from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.errors import StoreError
from agentrl.evaluation.results import EPISODES
from agentrl.gate.verdict import FILE, CaseRegression, GateOutcome, GateVerdict, evaluation_folder
from agentrl.records import codec
from agentrl.view.gate_data import gate_data
from agentrl.view.source import Missing, RunSource


def write(run: Path, version: int, verdict: GateVerdict | None, episodes: dict[str, str]) -> None:
    folder = evaluation_folder(run, version)
    folder.mkdir(parents=True)
    if verdict is not None:
        (folder / FILE).write_bytes(codec.to_json(verdict))
    lines = [
        {"episode": name, "score": 0.0, "answer": answer, "messages": [{"role": "user", "content": "q"}]}
        for name, answer in episodes.items()
    ]
    (folder / EPISODES).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_verdict_has_each_regressed_case_before_and_after(tmp_path: Path) -> None:
    regressions = (
        CaseRegression(case="sum-1", turn=2, before_episode="b1", episode="a1"),
        CaseRegression(case="sum-2", turn=None, before_episode="lost", episode="a2"),
    )
    verdict = GateVerdict(
        version=8, sha256="0", outcome=GateOutcome.BLOCKED, reason="two cases fell", at="", reference=4, regressions=regressions
    )
    write(tmp_path, 4, None, {"b1": "112", "other": "0"})
    write(tmp_path, 8, verdict, {"a1": "97", "a2": "5"})
    source = RunSource(tmp_path, run_id="r", name="r")
    data = gate_data(source, 8)
    assert (data["outcome"], data["reference"], data["reason"]) == ("blocked", 4, "two cases fell")
    first, second = data["cases"]
    assert (first["case"], first["turn"], first["before"]["answer"], first["after"]["answer"]) == ("sum-1", 2, "112", "97")
    assert first["before"]["phase"] == "version 4" and second["before"] is None and second["after"]["answer"] == "5"
    with pytest.raises(Missing, match="no verdict on version 4"):
        gate_data(source, 4)
    (evaluation_folder(tmp_path, 8) / FILE).write_text("{}")
    with pytest.raises(StoreError, match="is not a verdict"):
        gate_data(source, 8)
