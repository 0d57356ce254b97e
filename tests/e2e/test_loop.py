"""A run survives interrupts, and the death of its server and of a rank of its learner. All parts are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.failure.collection import Collection
from tests.ledgers import assert_every_group_taken_once

from .conftest import SMALL, descendants, interrupt, start, steps_logged, summary, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"
STEPS = 6


@pytest.mark.usefixtures("nothing_left")
def test_a_run_survives_a_dead_server_a_dead_rank_and_interrupts(tmp_path: Path) -> None:
    """Two learner ranks. The server is killed, then ctrl-C once finishes the step; twice stops the next start; the resumed run
    loses a rank. In the end no step is lost and no group was trained twice."""
    run = tmp_path / "run"
    arguments = (
        *("train", RECIPE, f"steps={STEPS}", *SMALL, "learner.ranks=2", "max_staleness=2", "learner.keep_versions=4"),
        *("evaluation.heldout_real=0", "--run-dir", str(run), "--sandbox", "bubblewrap"),
    )
    first = start(*arguments)
    try:
        wait_for(lambda: 1 in steps_logged(run), first, timeout=600)
        descendants(first, "agentrl.serving.launch")[-1].kill()
        wait_for(lambda: 2 in steps_logged(run), first, timeout=600)
        interrupt(first)
        output, _ = first.communicate(timeout=600)
    finally:
        first.kill()
    assert first.returncode == 130, output[-4000:]
    assert "the inference server is replaced:" in " ".join(output.split()) and "--resume" in output
    found = summary(run)
    assert found["interrupted"] and 2 <= found["steps"] < STEPS - 1 and found["heldout_after"] is None
    assert (run / "report.html").exists() and (run / "model" / "model.safetensors").exists()

    _interrupted_twice_while_it_starts(*arguments, "--resume")

    last = start(*arguments, "--resume")
    try:
        wait_for(lambda: found["steps"] + 1 in steps_logged(run), last, timeout=600)
        descendants(last, "agentrl.learner.main")[-1].kill()
        output, _ = last.communicate(timeout=900)
    finally:
        last.kill()
    assert last.returncode == 0, output[-4000:]
    assert "the learner" in output
    found = summary(run)
    assert found["finished"] and (found["steps"], found["weight_swaps"], found["episodes_left_out"]) == (STEPS, STEPS, 0)
    assert found["heldout_after"]["n"] == 4
    assert steps_logged(run) == list(range(1, STEPS + 1))
    assert_every_group_taken_once(run, steps=STEPS, per_step=4)
    _its_failures_are_captured(run, found["failures"])


def _its_failures_are_captured(run: Path, counted: dict[str, int]) -> None:
    """Failures of all three starts are captured once each, can be promoted, and are in the report with counts over versions."""
    with Collection(run) as collection:
        traces = list(collection.traces())
    assert len({trace.id for trace in traces}) == len(traces) > 0
    assert all(trace.task is not None and trace.episode is not None and trace.tags for trace in traces)
    assert sum(counted.values()) >= len(traces) and traces[0].tags[0].name in counted
    report = (run / "report.html").read_text()
    assert "<h2>Failures</h2>" in report and all(tag.replace("_", " ") in report for tag in counted)


def _interrupted_twice_while_it_starts(*arguments: str) -> None:
    process = start(*arguments)
    wait_for(lambda: descendants(process, "agentrl.learner.launch") != [], process, timeout=600)
    interrupt(process)
    assert process.stdout is not None
    while "interrupt again to stop now" not in (line := process.stdout.readline()):  # simultaneous signals count as one
        assert line, "it ended without a message"
    interrupt(process)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and "stopped; finished work is kept" in output, output
