"""Limits and deltas in the whole loop, every part the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import SMALL, agentrl, steps_logged, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"


@pytest.mark.usefixtures("nothing_left")
def test_versions_travel_as_deltas_and_any_of_them_can_be_evaluated(tmp_path: Path) -> None:
    """A learning rate small enough for float32 deltas to pay."""
    run = tmp_path / "run"
    code, output = agentrl(
        *("train", RECIPE, "steps=4", *SMALL, "learner.lr=1e-7", "serving.weight_transfer=delta", "learner.full_every=3"),
        *("evaluation.heldout_real=0", "--run-dir", str(run), "--sandbox", "bubblewrap"),
    )
    assert code == 0, output
    assert (summary(run)["steps"], summary(run)["weight_swaps"]) == (4, 4)
    assert "loaded whole" not in output, "the server took the deltas as they were"
    homes = [run / "versions" / f"{number:06d}" for number in range(5)]
    assert [(home / "model.delta").exists() for home in homes] == [False, False, True, False, True]
    assert [(home / "model.safetensors").exists() for home in homes] == [True, True, False, True, True], "the last was exported"
    assert (run / "model" / "model.safetensors").exists() and not (run / "model" / "model.delta").exists()
    code, output = agentrl(
        *("eval", RECIPE, "--model", str(homes[2]), "evaluation.heldout=4", "evaluation.heldout_real=0"),
        *("--run-dir", str(tmp_path / "eval"), "--json", "--sandbox", "bubblewrap"),
    )
    assert code == 0 and json.loads(output.splitlines()[-1])["heldout"]["n"] == 4, output


@pytest.mark.usefixtures("nothing_left")
def test_rollbacks_run_out_and_other_limits_let_the_run_go_on(tmp_path: Path) -> None:
    """No policy has 50 nats of entropy, so every update is rolled back until that is no longer allowed."""
    run = tmp_path / "run"
    arguments = ("train", RECIPE, "steps=4", *SMALL, "evaluation.heldout_real=0", "--run-dir", str(run), "--sandbox", "bubblewrap")
    limit = ("learner.limits.min_entropy.at=50", "learner.limits.min_entropy.action=rollback", "learner.limits.max_rollbacks=1")
    code, output = agentrl(*arguments, *limit)
    assert code == 1, output
    assert "failed: step 1: entropy" in output and "1 rollbacks are made" in output
    assert "alert: step 1: rolled back, and set aside groups 0, 1, 2, 3" in output
    assert output.count("alert: halted") == 1
    assert steps_logged(run) == [1]
    found = summary(run)
    assert (found["rollbacks"], found["updates_set_aside"], found["finished"]) == (1, 2, False)
    assert "is below learner.limits.min_entropy.at=50" in (run / "report.html").read_text()

    code, output = agentrl(*arguments, "learner.limits.min_entropy.at=1e-9", "--resume")  # the others stay as they were
    assert code == 0, output
    found = summary(run)
    assert found["finished"] and found["steps"] == 4 and (found["rollbacks"], found["updates_set_aside"]) == (1, 1)
    code, output = agentrl("versions", str(run), "--json")
    versions = json.loads(output)
    assert [version["state"] for version in versions] == ["candidate"] * 4 + ["promoted"]
    assert [version["parent"] for version in versions] == [None, 0, 1, 2, 3]
