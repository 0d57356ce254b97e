"""Conversations with a simulated user, with the real server and the learner: the short form of `recipes/desk.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from tests.ledgers import indices

from .conftest import agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed]


@pytest.mark.usefixtures("nothing_left")
def test_a_policy_trains_on_conversations_but_not_on_the_messages_of_the_user(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    few = ("steps=1", "rollout.groups_per_step=8", "rollout.group.size=24", "rollout.concurrency=192", "evaluation.heldout=8")
    code, output = agentrl("train", "recipes/desk.py", *few, "--run-dir", str(run), by=forked)
    assert code == 0, output[-4000:]
    totals = summary(run)
    assert (totals["steps"], totals["weight_swaps"], totals["episodes_left_out"]) == (1, 1, 0)
    store = SqliteStore(run / "experience.sqlite")
    scored = [episode for group in store.groups(indices(store)) for episode in group.episodes]
    store.close()
    turns = [turn for episode in scored for trajectory in episode.episode.trajectories for turn in trajectory.turns]
    assert len(turns) > 2 * len(scored), "conversations have several turns"
    assert {turn.message.content for turn in turns} <= set("vfoxkC1")
    assert {episode.score.value for episode in scored} > {0.0}  # the untrained policy satisfies about one customer in twenty
    [step] = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    assert step["tokens_sampled"] == sum(turn.sampled for turn in turns) and 0 < step["tokens_trained"] <= step["tokens_sampled"]
    assert abs(step["ratio_mean"] - 1) < 1e-3
