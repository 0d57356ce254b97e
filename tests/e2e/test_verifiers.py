"""A taskset for verifiers is trained on: the real verifiers in its environment, a real server and learner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from tests.ledgers import indices

from .conftest import SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.environments]


@pytest.mark.usefixtures("nothing_left")
def test_a_taskset_is_trained_on_exactly_its_tokens(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    few = ("steps=2", *SMALL, "evaluation.heldout_real=0")
    code, output = agentrl("train", "recipes/verifiers_programs.py", *few, "--run-dir", str(run), by=forked)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["episodes_left_out"], result["delivered_share"]) == (2, 0, 1.0)
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    scored = [e for group in groups for e in group.episodes]
    posted = "agentrl.gateway:posted_reward"
    assert {name for e in scored for name in e.score.parts} == {posted, f"{posted}/right", f"{posted}/column"}
    assert max(e.score.value or 0.0 for e in scored) > 0, "the shipped policy writes some of these programs"
    assert any(turn.message.tool_calls for e in scored for trajectory in e.episode.trajectories for turn in trajectory.turns)
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    assert all(step["tokens_captured"] == step["tokens_trained"] for step in steps)
    assert all(abs(step["ratio_mean"] - 1) < 1e-3 for step in steps), "tokens are trained with the probability that they were sampled with"
