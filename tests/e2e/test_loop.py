"""The whole loop, every part the real one: vLLM, a sandbox, the verifier, DeepSpeed and the swap."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from .conftest import SMALL, agentrl, descendants, interrupt, start, steps_logged, summary, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed]

RECIPE = "recipes/quickstart.py"


@pytest.mark.docker
@pytest.mark.usefixtures("nothing_left")
def test_docker_run_from_evaluation_to_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = agentrl("train", RECIPE, "steps=3", *SMALL, "--run-dir", str(run), "--sandbox", "docker")
    assert code == 0, output
    found = summary(run)
    assert found["sandbox_backend"] == "docker"
    assert (found["steps"], found["weight_swaps"], found["episodes"]) == (3, 3, 48)
    for key in ("heldout_before", "heldout_after", "heldout_real_before", "heldout_real_after"):
        rate = found[key]
        assert 0.0 <= rate["ci_low"] <= rate["value"] <= rate["ci_high"] <= 1.0
        assert rate["n"] == (6 if "real" in key else 12)
    assert found["swap_probe_max_abs_diff"] <= 1e-3
    assert found["episodes_left_out"] == 0 and found["tokens_trained"] > 0
    report = (run / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "") and len(report) > 10_000
    code, output = agentrl("eval", RECIPE, "--model", str(run / "model"), "evaluation.heldout=4", "evaluation.heldout_real=0",
                           "--run-dir", str(tmp_path / "eval"), "--json")  # fmt: skip
    assert code == 0 and json.loads(output.splitlines()[-1])["heldout"]["n"] == 4, output


@pytest.mark.bubblewrap
@pytest.mark.usefixtures("nothing_left")
def test_interrupt_resume_and_interrupt_twice(tmp_path: Path) -> None:
    """Ctrl-C once finishes the step; a resumed run goes on from there and trains on every group exactly once."""
    run = tmp_path / "run"
    arguments = ("train", RECIPE, "steps=4", *SMALL, "--run-dir", str(run), "--sandbox", "bubblewrap")
    process = start(*arguments)
    wait_for(lambda: 1 in steps_logged(run), process, timeout=600)
    interrupt(process)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    first = summary(run)
    assert first["interrupted"] and 1 <= first["steps"] < 4 and first["heldout_after"] is None
    assert "--resume" in output and (run / "report.html").exists() and (run / "model" / "model.safetensors").exists()

    twice = start(*arguments, "--resume")
    wait_for(lambda: descendants(twice, "agentrl.learner.launch") != [], twice, timeout=600)
    interrupt(twice)
    assert twice.stdout is not None
    while "interrupt again to stop now" not in (line := twice.stdout.readline()):  # signals that meet on the way are one
        assert line, "it ended without a word"
    interrupt(twice)
    output, _ = twice.communicate(timeout=600)
    assert twice.returncode == 130 and "stopped; what was finished is kept" in output, output

    code, output = agentrl(*arguments, "--resume")
    assert code == 0, output
    last = summary(run)
    assert last["finished"] and last["steps"] == 4 and last["heldout_after"]["n"] == 12
    assert steps_logged(run) == [1, 2, 3, 4]
    with sqlite3.connect(run / "experience.sqlite") as store:
        consumed = store.execute("SELECT idx, step FROM consumed ORDER BY idx").fetchall()
    assert [index for index, _ in consumed] == list(range(16))


@pytest.mark.bubblewrap
@pytest.mark.usefixtures("nothing_left")
def test_a_run_outlives_its_server_and_its_learner(tmp_path: Path) -> None:
    """Two ranks of the learner; first the inference server is killed, then one of the ranks. No step is lost, no group trained twice."""
    run = tmp_path / "run"
    process = start(
        *("train", RECIPE, "steps=5", *SMALL, "learner.ranks=2", "max_staleness=2", "learner.keep_versions=4"),
        *("evaluation.heldout_real=0", "--run-dir", str(run), "--sandbox", "bubblewrap"),
    )
    try:
        for step, victim in ((1, "agentrl.serving.launch"), (3, "agentrl.learner.worker")):
            wait_for(lambda step=step: step in steps_logged(run), process, timeout=600)  # type: ignore[misc]
            descendants(process, victim)[-1].kill()
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    found = summary(run)
    assert found["finished"] and (found["steps"], found["weight_swaps"]) == (5, 5)
    assert found["episodes_left_out"] == 0
    assert steps_logged(run) == [1, 2, 3, 4, 5]
    with sqlite3.connect(run / "experience.sqlite") as store:
        consumed = store.execute("SELECT idx, step FROM consumed ORDER BY idx").fetchall()
    assert consumed == [(index, index // 4) for index in range(20)]
    assert "the inference server died" in output and "the learner" in output
