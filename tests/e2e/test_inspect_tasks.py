"""A task set of inspect_ai is trained; inspect, gateway, server, learner and sandboxes are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.objective import counted_samples
from tests.ledgers import indices

from .conftest import SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap, pytest.mark.environments]


@pytest.mark.usefixtures("nothing_left")
def test_a_task_set_of_inspect_is_trained_on_exactly_its_tokens(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    few = ("steps=2", *SMALL, "evaluation.heldout_real=0", "max_staleness=0")
    code, output = agentrl("train", "recipes/inspect_tables.py", *few, "--run-dir", str(run), "--sandbox", "bubblewrap", by=forked)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["episodes_left_out"], result["delivered_share"]) == (2, 0, 1.0)
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    scored = [e for group in groups for e in group.episodes]
    assert {e.score.value for e in scored} == {0.0, 1.0}
    turns = [turn for e in scored for trajectory in e.episode.trajectories for turn in trajectory.turns]
    assert any(turn.tool_results for turn in turns)
    varied = [group for group in groups if len({e.score.value for e in group.scored}) > 1]
    sampled = sum(sum(sample.loss_mask) for sample in counted_samples(varied))
    assert sum(step["tokens_trained"] for step in steps) == sampled > 0
    assert all(abs(step["ratio_mean"] - 1) < 1e-3 for step in steps), (
        "the learner gives these tokens the probability they were sampled with"
    )
