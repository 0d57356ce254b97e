"""The output head in chunks inside a DeepSpeed engine, as with every vocabulary of a real model.

Under ZeRO-3 the head's weight is there only between hooks, and the backward pass of the chunks needs it once more. The module is its own
script for two ranks.
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
from tests.learner.building import random_group, recipe, write_run
from tests.learner.script import Scenario, main

pytestmark = pytest.mark.deepspeed


class Chunked(Scenario):
    def chunked(self, stage: int) -> dict[str, float]:
        """Two updates with a head of 7 rows at a time, on two ranks; the largest gap to the weights of a head that takes all at once."""
        made = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        made = made.model_copy(update={"objective": ObjectiveConfig(off_policy=OffPolicyConfig(preset="truncate"), entropy_coef=0.01)})
        found = []
        for rows in (10**6, 7):
            engine = self.engine(made)
            engine.scorer.head.rows = rows
            updater = Updater(engine)
            metrics = [updater.update(batch) for batch in self.batches]
            found.append(gather_weights(engine))
        whole, chunks = found
        gap = max(((whole[name] - chunks[name]).abs().max().item() for name in whole), default=0.0)
        return {"gap": gap, "trained": metrics[-1]["tokens_trained"]}


def test_chunks_give_the_same_update_at_zero_3(tmp_path: Path, host: Path) -> None:
    write_run(tmp_path, recipe(), [random_group(index, size=5) for index in range(6)])
    done = subprocess.run(
        preloaded.command(host, 2, "tests.learner.test_chunked_head", str(tmp_path), str(tmp_path), "chunked-3"),
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        **{"capture_output": True, "text": True, "timeout": 300, "check": False},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = torch.load(tmp_path / "chunked-3.pt")
    assert found["gap"] < 2e-4 and found["trained"] > 100, found


if __name__ == "__main__":
    main(Chunked)
