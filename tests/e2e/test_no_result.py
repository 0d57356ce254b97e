"""A run whose verifier returns text: nothing is scored, the command reports it, exports no model and exits with 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

FAMILY = """
from dataclasses import replace

from sandboxes.tables import Tables


async def in_words(task, episode):
    return "looks right to me"


class InWords(Tables):
    def task(self, split, index):
        return replace(super().task(split, index), verifiers=(__file__ + ":in_words",))
"""


@pytest.mark.usefixtures("nothing_left")
def test_a_run_in_which_nothing_is_scored_has_no_result(tmp_path: Path, forked: tuple[str, ...]) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    run = tmp_path / "run"
    family = f"tasks.family={tmp_path / 'family.py'}:InWords"
    none = ["evaluation.heldout=0", "evaluation.heldout_real=0", "evaluation.sampling.temperature=1"]
    code, output = agentrl(
        *("train", "recipes/quickstart.py", "steps=2", family, *SMALL, "rollout.groups_per_step=3", *none),
        *("--run-dir", str(run), "--sandbox", "bubblewrap"),
        by=forked,
    )
    assert code == 1, output[-4000:]
    assert output.count("alert: episodes are excluded: ") == 1 and "family.py:in_words: verifier returned str, not a Score" in output
    assert "alert: step 1: nothing was scored: all 12 episodes of 1 step were excluded (" in output and "alert: step 2" not in output
    assert "step 1/2  reward -  " in output and "reward 0.000" not in output
    assert "no result: nothing was scored: all 24 episodes of 2 steps were excluded (24 x " in output
    assert "Traceback" not in output
    result = summary(run)
    assert result["finished"] and result["steps"] == 2 and result["tokens_trained"] == 0
    assert list(result["left_out_reasons"].values()) == [24] and len(result["problems"]) == 1
    assert not (run / "model").exists() and "model  none" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and not any("reward_mean" in line for line in lines)
    page = (run / "report.html").read_text()
    assert "finished without a result" in page and "verifier returned str, not a Score" in page
