"""Sub-agents and summaries in one run, with the real server, learner and sandboxes: the short form of `recipes/splitting.py`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.observe.timeline import time_by_state
from tests.ledgers import indices
from tests.view.agreement import assert_tokens_agree_with_metrics

from .conftest import agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]


@pytest.mark.usefixtures("nothing_left")
def test_every_token_of_sub_agents_and_summaries_is_trained_once(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    few = ("steps=1", "rollout.groups_per_step=6", "rollout.concurrency=16", "evaluation.heldout=2")
    summaries = "rollout.compaction=0.6", "rollout.workers=2"
    code, output = agentrl("train", "recipes/splitting.py", *few, *summaries, "--run-dir", str(run), "--sandbox", "bubblewrap", by=forked)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["weight_swaps"], result["episodes_left_out"], result["delivered_share"]) == (1, 1, 0, 1.0)
    [step] = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    assert 0 <= step["loop_lag_ms_p99"] <= step["loop_lag_ms_max"]
    for part, spent in time_by_state([step]).items():
        assert sum(spent.values()) == pytest.approx(step["step_s"]), f"the states of {part} add up to the wall time"
        assert step[f"utilization/{part}"] * step["step_s"] == pytest.approx(spent.get("busy", 0.0))
    assert 0 < step["utilization/server"] <= 1 and 0 < step["utilization/learner"] <= 1
    assert 0 < step["loop_latency_s_mean"] <= step["loop_latency_s_max"]
    assert step["tokens_captured"] == step["tokens_delivered"] == step["tokens_trained"] > 0
    assert step["workers"] == 2 and step["worker_restarts"] == 0, "its episodes ran in other processes"
    assert abs(step["ratio_mean"] - 1) < 1e-3, "the learner gives these tokens the probability that they were sampled with"
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    lines = [trajectory for group in groups for scored in group.episodes for trajectory in scored.episode.trajectories]
    agents = Counter(line.agent for line in lines)
    assert agents["worker"] >= 8 and agents["summary"] >= 1, agents
    sampled = sum(turn.sampled for line in lines for turn in line.turns)
    assert step["tokens_captured"] <= sampled == step["tokens_sampled"]
    assert assert_tokens_agree_with_metrics(run) == step["tokens_trained"], "the view shows what was trained, token by token"
