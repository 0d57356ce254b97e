"""An environment that shows images trains a vision-language model, on hosts without the driver's disk, with a resumed run."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentrl.base.media import MediaFolder
from agentrl.experience import SqliteStore
from agentrl.records.images import images_of
from agentrl.testing.tiny_vision import write_vision_model
from tests.ledgers import indices

from .conftest import ROOT, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed]

MODULE = """
import io
import random

import numpy as np

from agentrl.environment import Environment
from agentrl.records import Observation


class Look(Environment):
    instructions = "Say which half is brighter."
    actions = ("l", "r")

    def reset(self, seed):
        self.random, self.steps = random.Random(seed), 0
        return self.show()

    def show(self):
        self.right = self.random.random() < 0.5
        picture = np.zeros((self.random.choice([40, 90]), 56, 3), np.uint8)
        picture[:, 28 * self.right : 28 + 28 * self.right] = [self.random.randrange(128, 256) for _ in range(3)]
        np.save(image := io.BytesIO(), picture)
        np.save(numbers := io.BytesIO(), np.arange(self.steps + 1, dtype=np.float32) / 3)
        return Observation(text="Which half?", media=(image.getvalue(), numbers.getvalue()))

    def step(self, action):
        self.steps += 1
        reward = float((action == "r") == self.right)
        return self.show(), reward, False, self.steps == 3
"""
RECIPE = """
from agentrl.config import *

recipe = Recipe(
    name="look",
    steps=1,
    policy=PolicyConfig(model="vision", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family="mine:Look"),
    rollout=RolloutConfig(group=GroupConfig(size=4), groups_per_step=6, concurrency=8, workers=1, sampling=SamplingConfig(temperature=2.0)),
    objective=ObjectiveConfig(entropy_coef=0.1),  # trains groups with equal scores too
    evaluation=EvalConfig(heldout=0),
    serving=ServingConfig(max_num_seqs=8, kv_cache_gb=0.2, threads=1),
    learner=LearnerConfig(lr=1e-3, ranks=1, threads=1),
)
"""


@pytest.mark.usefixtures("nothing_left")
def test_images_reach_server_and_learner_exactly(tmp_path: Path, forked: tuple[str, ...]) -> None:
    for name, text in (("mine.py", MODULE), ("recipe.py", RECIPE), ("pyproject.toml", "")):
        (tmp_path / name).write_text(text)
    write_vision_model(tmp_path / "vision")
    run, disks = tmp_path / "run", tmp_path / "disks"
    by, env = ("tests.e2e.own_disks", *forked[1:]), {"AGENTRL_TEST_DISKS": str(disks), "PYTHONPATH": str(ROOT)}
    code, output = agentrl("train", "recipe.py", "--run-dir", str(run), by=by, env=env, cwd=tmp_path)
    assert code == 0, output[-4000:]
    unused = MediaFolder(run).put(b"\x89PNG of an attempt that was repeated")
    code, output = agentrl("train", "recipe.py", "steps=2", "--resume", "--run-dir", str(run), by=by, env=env, cwd=tmp_path)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["weight_swaps"], result["episodes_left_out"], result["delivered_share"]) == (2, 2, 0, 1.0)
    with closing(SqliteStore(run / "experience.sqlite")) as store:
        groups = store.groups(indices(store))
    lines = [trajectory for group in groups for scored in group.episodes for trajectory in scored.episode.trajectories]
    names = images_of(lines)
    assert {path.stem for path in (run / "media").iterdir()} == names and unused[:10] not in names and len(names) >= 6
    assert {path.stem for path in (disks / "learner" / "media").iterdir()} >= images_of(
        trajectory for group in groups[:6] for scored in group.episodes for trajectory in scored.episode.trajectories
    )
    for line in lines:
        assert [len(images_of([], [turn.prompt_ids])) for turn in line.turns] == [1, 1, 1]
        assert [result.output.rpartition(">\n")[2] for turn in line.turns for result in turn.tool_results] == [
            *("[0.0, 0.33333334]", "[0.0, 0.33333334, 0.6666667]", "[0.0, 0.33333334, 0.6666667, 1.0]")
        ]
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    for step in steps:
        assert abs(step["ratio_mean"] - 1) < 1e-3 if step["tokens_trained"] else step["step"] > 1, "the learner sees what the server saw"
        assert step["swap_probe_max_abs_diff"] < 1e-3
    before, after = (load_file(run / "versions" / number / "model.safetensors") for number in ("000000", "000001"))
    changed = {name for name in before if (before[name] != after[name]).any()}
    for part in ("model.vision_model.encoder", "model.vision_model.embeddings", "model.connector", "model.text_model.layers"):
        assert any(name.startswith(part) for name in changed), part
