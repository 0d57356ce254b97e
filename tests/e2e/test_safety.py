"""The learner's limits in the whole loop, with real parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import SMALL, agentrl, steps_logged, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"


@pytest.mark.usefixtures("nothing_left")
def test_rollbacks_run_out_and_the_run_continues_within_other_limits(tmp_path: Path, forked: tuple[str, ...]) -> None:
    """No policy has 50 nats of entropy, so every update is rolled back until the limit of rollbacks."""
    run = tmp_path / "run"
    arguments = ("train", RECIPE, "steps=4", *SMALL, "evaluation.heldout_real=0", "--run-dir", str(run), "--sandbox", "bubblewrap")
    arguments += ("rollout.group.size=8",)  # with 4, all attempts of the first step sometimes score equally, and there is no update
    limit = 'learner.limits=[{"metric": "entropy", "at": 50, "action": "rollback"}]'
    code, output = agentrl(*arguments, limit, by=forked)
    assert code == 1, output
    assert "failed: step 2: entropy" in output and "2 rollbacks were made" in output
    assert "alert: step 1: rolled back, and excluded groups 0, 1, 2, 3" in output
    assert output.count("alert: halted") == 1
    assert steps_logged(run) == [1, 2]
    found = summary(run)
    assert (found["rollbacks"], found["updates_left_out"], found["finished"]) == (2, 3, False)
    assert "is below its limit 50 (learner.limits)" in (run / "report.html").read_text()

    code, output = agentrl(*arguments, limit.replace("50", "1e-9"), "--resume", by=forked)
    assert code == 0, output
    found = summary(run)
    assert found["finished"] and found["steps"] == 4 and (found["rollbacks"], found["updates_left_out"]) == (2, 2)
    code, output = agentrl("versions", str(run), "--json")
    versions = json.loads(output)
    assert [version["state"] for version in versions] == ["served"] * 4 + ["promoted"]
    assert [version["parent"] for version in versions] == [None, 0, 1, 2, 3]
