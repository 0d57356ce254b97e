"""An outside program is trained through the gateway; server, learner and sandboxes are real."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.objective import counted_samples
from agentrl.records import Group
from tests.ledgers import indices

from .conftest import SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]


@pytest.mark.usefixtures("nothing_left")
def test_an_outside_program_is_trained_on_exactly_its_tokens(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = (f"rollout.agent.options.port={port}", f"tasks.family.options.network=127.0.0.1:{port}")
    few = ("steps=1", *SMALL, "evaluation.heldout=2", "evaluation.heldout_real=0")
    code, output = agentrl("train", "recipes/outside_agent.py", *few, *where, "--run-dir", str(run), "--sandbox", "bubblewrap", by=forked)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["episodes_left_out"], result["delivered_share"]) == (1, 0, 1.0)
    [step] = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    episodes = [scored.episode for group in groups for scored in group.episodes]
    assert {episode.trajectories[0].stop_reason for episode in episodes} <= {"answered", "failed", "turn_limit"}
    lines = [trajectory for episode in episodes for trajectory in episode.trajectories]
    assert max(len(line.turns) for line in lines) > 1 and any(turn.tool_results for line in lines for turn in line.turns)
    sampled = sum(sum(sample.loss_mask) for sample in counted_samples([group for group in groups if varied(group)]))
    assert step["tokens_captured"] == step["tokens_delivered"] == step["tokens_trained"] == sampled > 0
    assert abs(step["ratio_mean"] - 1) < 1e-3, "the learner gives these tokens the probability that they were sampled with"


def varied(group: Group) -> bool:
    return len({scored.score.value for scored in group.scored}) > 1
