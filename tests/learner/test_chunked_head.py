"""The output head in chunks inside a DeepSpeed engine, as for the vocabulary of a real model.

Under ZeRO-3 the head's weight is available only between hooks, and the backward pass of the chunks needs it again. This module is also
the script that runs on two ranks.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from agentrl.config import ObjectiveConfig, OffPolicyConfig
from agentrl.learner.publish import gather_weights
from agentrl.learner.update import Updater
from tests.learner import preloaded
from tests.learner.building import build_recipe, random_group, write_run
from tests.learner.script import Scenario, main

pytestmark = pytest.mark.deepspeed


class Chunked(Scenario):
    def chunked(self, stage: int) -> dict[str, float]:
        """Two updates with 7 rows of the head at a time, on two ranks; the largest difference to the weights with all rows at once."""
        recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        recipe = recipe.model_copy(update={"objective": ObjectiveConfig(off_policy=OffPolicyConfig(preset="truncate"), entropy_coef=0.01)})
        weights = []
        for rows in (10**6, 7):
            engine = self.engine(recipe)
            engine.scorer.head.rows = rows
            updater = Updater(engine)
            metrics = [updater.update(batch) for batch in self.batches]
            weights.append(gather_weights(engine))
        single, chunks = weights
        gap = max(((single[name] - chunks[name]).abs().max().item() for name in single), default=0.0)
        return {"gap": gap, "trained": metrics[-1]["tokens_trained"]}


def test_chunks_give_the_same_update_at_zero_3(tmp_path: Path, host: Path) -> None:
    write_run(tmp_path, build_recipe(), [random_group(index, size=5) for index in range(6)])
    result = subprocess.run(
        preloaded.command(host, 2, "tests.learner.test_chunked_head", str(tmp_path), str(tmp_path), "chunked-3"),
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        **{"capture_output": True, "text": True, "timeout": 300, "check": False},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    update = torch.load(tmp_path / "chunked-3.pt")
    assert update["gap"] < 2e-4 and update["trained"] > 100, update


if __name__ == "__main__":
    main(Chunked)
