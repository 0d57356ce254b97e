"""A short form of the experiment in docs/failures-experiment.md, with the real commands and real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.failure.collection import Collection
from agentrl.failure.overlap import load_withheld
from agentrl.failure.practice import load_practice
from agentrl.gate.verdict import read_verdicts
from benchmarks import weakness

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap, pytest.mark.slow]


def test_a_failure_becomes_cases_practice_and_a_gate(tmp_path: Path, forked: tuple[str, ...]) -> None:
    import torch

    torch.set_num_threads(1)  # supervised training runs in this process, and other tests use the other core
    size = weakness.SHORT
    small = ("sandbox.backend=bubblewrap", "rollout.concurrency=16")
    run = weakness.Experiment(seed=0, folder=tmp_path / "seed0", overrides=(*size.overrides, *small), size=size, command=forked)
    # `before` and `after` run the same command as `final`.
    weakness.run_phases(run, [phase for phase in weakness.PHASES if phase not in ("before", "after")])

    capture = run.result("capture")
    assert capture["planted"] >= size.cases and capture["share"] >= weakness.TARGETS["tagged right"], capture
    assert run.result("promote")["cases"] == size.cases and run.result("vary") == {"tasks": size.cases * size.variants, "refused": 0}
    held = load_withheld([run.suite.name], root=run.folder)
    assert {practised.how for practised in load_practice(run.suite, withheld=held)} == {"alike", "harder", "easier"}

    repair = Path(run.result("train")["run"])
    steps = [json.loads(line) for line in (repair / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "episodes" in line] == [1, 2]
    with Collection(repair) as collection:
        captured = {trace.task.family for trace in collection.traces() if trace.task is not None}
    assert captured, "the run's own failures are captured as well"
    assert "Failures" in (repair / "report.html").read_text()

    verdicts = read_verdicts(Path(run.result("relapse")["run"]))
    assert {verdict.version for verdict in verdicts} >= {0, 1}
    final = run.result("final")
    assert final["n"] == 12 and 0.0 <= final["ci_low"] <= final["value"] <= final["ci_high"] <= 1.0
