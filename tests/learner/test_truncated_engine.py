"""Updates on tokens drawn from supports, in complete engines: ranks, ZeRO stages, chunks, teams, a KL reference model and a critic.

The behaviour logprobs are computed by transformers in float64, over each token's support, so before the first step the learner must
compute a ratio of 1, a KL of 0, and the same entropy. This module is also the script that runs on two ranks.
"""

from __future__ import annotations

import os
import random
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.learner.publish import gather_weights
from agentrl.learner.update import Updater
from agentrl.objective import assemble
from agentrl.records import Group, ScoredEpisode, Turn
from agentrl.records.sampling import Supports
from tests.learner import preloaded
from tests.learner.building import VOCABULARY, build_recipe, random_group, write_run
from tests.learner.script import SHARED, Scenario, main

pytestmark = pytest.mark.deepspeed
TEMPERATURE, TOP_K = 0.7, 6
NAMES = ("truncated-0", "truncated-2", "truncated-3-chunked", "truncated-2-team", "truncated-0-shared")


class Truncated(Scenario):
    def truncated(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """Two updates; their metrics, the weights after them, the expected entropy of the first, and the probe before it."""
        objective = {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01, "off_policy": {"preset": "truncate"}}
        setting = {"rollout.sampling.temperature": TEMPERATURE, "rollout.sampling.top_k": TOP_K, "rollout.sampling.top_p": 0.9}
        recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size).but(setting, objective=objective)
        if variant == "shared":
            recipe = recipe.but({"objective.advantage": "gae", "critic": SHARED.but(warmup_steps=0)})
        if variant == "team":
            recipe = recipe.but({"learner.sequence_parallel": self.ranks.size})
        scenario = self.in_teams_of(self.ranks.size) if variant == "team" else self
        engine = scenario.engine(recipe)
        if variant == "chunked":
            engine.scorer.head.rows = 7
        updater, batches, entropies = Updater(engine), [], []
        for step, groups in enumerate(self.groups):
            drawn = [_drawn(group, self.run_dir, entropies if step == 0 else []) for group in groups]
            batches.append(assemble(step, drawn, recipe).batch)
        probe = engine.probe(((5, 6, 7, 8), (9, 10)))
        metrics = [updater.update(batch) for batch in batches]
        trained = [entropy for key, entropy in entropies if key in {sample.episode_id for sample in batches[0].samples}]
        return {"metrics": metrics, "weights": gather_weights(engine), "entropy": sum(trained) / len(trained), "probe": probe}


@cache
def _model(run_dir: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(run_dir / "versions" / "000000").double()


def _drawn(group: Group, run_dir: Path, entropies: list[tuple[str, float]]) -> Group:
    return replace(group, episodes=tuple(_drawn_episode(scored, run_dir, entropies) for scored in group.episodes))


def _drawn_episode(scored: ScoredEpisode, run_dir: Path, entropies: list[tuple[str, float]]) -> ScoredEpisode:
    """The same tokens, as if drawn from random supports; one in five from the full vocabulary."""
    rng = random.Random(scored.episode.id)
    trajectory = scored.episode.trajectories[0]
    ids = [token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
    with torch.no_grad():
        logits = _model(run_dir)(torch.tensor([ids])).logits[0] / TEMPERATURE
    turns: list[Turn] = []
    position = 0
    for turn in trajectory.turns:
        position += len(turn.prompt_ids)
        rows, logprobs = [], []
        for token in turn.completion_ids:
            row = sorted({token, *rng.sample(range(VOCABULARY), rng.randrange(TOP_K))}) if rng.random() < 0.8 else []
            over = row or list(range(VOCABULARY))
            logp = logits[position - 1, over].log_softmax(-1)
            entropies.append((scored.episode.id, -(logp.exp() * logp).sum().item()))
            logprobs.append(logp[over.index(token)].item())
            rows.append(row)
            position += 1
        turns.append(replace(turn, logprobs=tuple(logprobs), supports=Supports.from_rows(rows)))
    return replace(scored, episode=replace(scored.episode, trajectories=(replace(trajectory, turns=tuple(turns)),)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, host: Path) -> dict[str, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir, build_recipe(), [random_group(index, size=5) for index in range(6)])
    process = subprocess.run(
        preloaded.command(host, 2, "tests.learner.test_truncated_engine", str(run_dir), str(run_dir), *NAMES),
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        **{"capture_output": True, "text": True, "timeout": 300, "check": False},
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    return {name: torch.load(run_dir / f"{name}.pt", weights_only=False) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_learner_scores_over_the_sampled_supports(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    first, second = result["metrics"]
    assert first["mismatch_max"] < 1e-4 and first["mismatch_tokens"] == 1.0
    assert first["kl_reference"] < 1e-8
    assert first["entropy"] == pytest.approx(result["entropy"], rel=1e-4)
    assert 0.5 < first["entropy"] < 2.5, "most supports have a few tokens, some have 97"
    assert second["kl_reference"] > 1e-6 and second["kl_behaviour"] > 1e-6


@pytest.mark.parametrize("name", NAMES[1:4])
def test_ranks_stages_chunks_and_teams_give_the_same_update(results: dict[str, dict[str, Any]], name: str) -> None:
    result, expected = results[name], results[NAMES[0]]
    gap = max((result["weights"][key] - expected["weights"][key]).abs().max().item() for key in expected["weights"])
    assert gap < 2e-4
    assert result["metrics"][1]["loss"] == pytest.approx(expected["metrics"][1]["loss"], rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_has_next_tokens_at_the_rollouts_temperature(results: dict[str, dict[str, Any]], name: str) -> None:
    probe, expected = results[name]["probe"], results[NAMES[0]]["probe"]
    assert [len(ids) for ids in probe.next_ids] == [VOCABULARY, VOCABULARY], "all of them, because the vocabulary is small"
    for ids, logprobs, expected_logprobs in zip(probe.next_ids, probe.next_logprobs, expected.next_logprobs, strict=True):
        assert sorted(ids) == list(range(VOCABULARY)) and list(logprobs) == sorted(logprobs, reverse=True)
        assert sum(torch.tensor(logprobs).exp()).item() == pytest.approx(1.0, abs=1e-5)
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
    assert [len(row) for row in probe.logprobs] == [3, 1]


if __name__ == "__main__":
    main(Truncated)
