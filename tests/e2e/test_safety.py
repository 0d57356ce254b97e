"""The learner's limits, and a manual rollback, in the whole loop with real parts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import SMALL, agentrl, start, steps_logged, summary, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"


@pytest.mark.usefixtures("nothing_left")
def test_a_run_fails_at_its_limit_of_rollbacks_and_continues_with_another_limit(tmp_path: Path, forked: tuple[str, ...]) -> None:
    """No policy has 50 nats of entropy, so every update is rolled back until the limit of rollbacks. Then a user rolls the live run back to
    an earlier version: learner and server return to it together."""
    run = tmp_path / "run"
    arguments = ("train", RECIPE, "steps=4", *SMALL, "evaluation.heldout_real=0", "--run-dir", str(run), "--sandbox", "bubblewrap")
    arguments += ("rollout.group.size=8",)  # with 4, all attempts of the first step sometimes score equally, and there is no update
    limit = 'learner.limits=[{"metric": "entropy", "at": 50, "action": "rollback"}]'
    code, output = agentrl(*arguments, limit, by=forked)
    assert code == 1, output
    assert "failed: step 2: entropy" in output and "2 rollbacks occurred" in output
    assert re.search(r"alert: step 1: rolled back, and excluded groups \d+, \d+, \d+, \d+ ", output), output
    assert output.count("alert: halted") == 1
    assert steps_logged(run) == [1, 2]
    result = summary(run)
    assert (result["rollbacks"], result["updates_left_out"], result["finished"]) == (2, 3, False)
    assert "is below its limit 50 (learner.limits)" in (run / "report.html").read_text()

    code, output = agentrl("versions", "pin", str(run), "2")
    assert (code, output) == (0, "version 2 is pinned\n"), "its checkpoint is kept, no matter how many steps precede the rollback"
    resumed = start(*arguments, "steps=6", limit.replace("50", "1e-9"), "--resume", by=forked)
    wait_for(lambda: (run / "versions" / "000003" / "version.json").exists(), resumed, timeout=300)
    code, output = agentrl("versions", "rollback", str(run), "2")
    assert code == 0 and "the learner performs it at its next step" in output, output
    output, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, output
    result = summary(run)
    assert result["finished"] and result["steps"] == 6 and (result["rollbacks"], result["updates_left_out"]) == (3, 2)
    code, output = agentrl("versions", "list", str(run), "--json")
    versions = json.loads(output)
    restored = next(version["number"] for version in versions if version["number"] > 3 and version["parent"] == 2)
    undone = range(3, restored)
    assert [version["number"] for version in versions if version["state"] == "rolled_back"] == list(undone)
    assert [version["parent"] for version in versions] == [None, *(2 if n == restored else n - 1 for n in range(1, 7))]
    assert versions[restored]["sha256"] == versions[2]["sha256"] != versions[3]["sha256"]
    assert versions[6]["state"] == "promoted", "the server loaded the restored version and continued from it"
    code, output = agentrl("store", str(run), "--verify")
    assert code == 0 and "without trained tokens: rolled_back" in output, output

    compare_command = ("versions", "compare", str(run), "2", "6", "rollout.concurrency=16", "--cases", "20")
    code, output = agentrl(*compare_command, "--run-dir", str(tmp_path / "ab"), "--sandbox", "bubblewrap", "--json", by=forked)
    comparison = json.loads(output.splitlines()[-1])
    assert (
        code == (comparison["verdict"] == "worse") and comparison["cases"] + comparison["unscored"] in (16, 20) and comparison["most"] == 20
    ), output
    code, output = agentrl("compare", *comparison["folders"], "--json")
    assert code == 0 and json.loads(output)["effect"] == pytest.approx(comparison["interval"]["value"]), output
