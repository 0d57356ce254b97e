"""Runs under torchrun, like `tests.learner.script`: updates that the guard rejects, and the state after them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from agentrl.config import CriticConfig, Limit, ObjectiveConfig
from agentrl.errors import LearnerHalted
from agentrl.learner.checkpoint import CheckpointMeta, numbered, restore, save
from agentrl.learner.publish import gather_weights
from agentrl.learner.update import Updater
from agentrl.learner.update_guard import FailureCounts
from agentrl.objective import assemble
from agentrl.records import Batch
from tests.learner.script import Scenario, main


class Setbacks(Scenario):
    def _rejected_update(self, stage: int, batch: Batch, *, bf16: bool = False, **learner: Any) -> dict[str, Any]:
        """One update that should be rejected, then a good one without limits; compared with the good one alone."""
        plain = self.recipe
        if bf16:
            self.recipe = plain.model_copy(update={"policy": plain.policy.model_copy(update={"dtype": "bfloat16"})})
        engine = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size, **learner))
        updater, before = Updater(engine), gather_weights(engine)
        halted = ""
        try:
            metrics = updater.update(batch)
        except LearnerHalted as error:
            metrics, halted = {}, str(error)
        after = gather_weights(engine)
        setbacks = updater.guard.take_failures()
        counts = updater.guard.counts
        by_rank: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(by_rank, (setbacks, counts, halted, updater.guard.rolling_back), group=self.ranks.control)
        unlimited = Updater(engine)
        unlimited.guard._limits = {}
        unlimited.update(self.batches[0])
        clean = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size, **learner | {"limits": ()}))
        reference = Updater(clean).update(self.batches[0])
        self.recipe = plain
        return {
            **{"before": before, "after": after, "after_next": gather_weights(engine), "clean": gather_weights(clean)},
            **{"metrics": metrics, "by_rank": by_rank, "setbacks": setbacks, "counts": counts, "halted": halted, "reference": reference},
        }

    def norm(self, stage: int) -> dict[str, Any]:
        """A gradient whose norm exceeds its limit, which is known only inside the optimizer step."""
        return self._rejected_update(stage, self.batches[0], max_grad_norm=0.01, limits=(Limit(metric="grad_norm", at=0.02),))

    def half(self, stage: int) -> dict[str, Any]:
        """The same as `norm` in bfloat16, which uses DeepSpeed's optimizer at every stage."""
        return self._rejected_update(stage, self.batches[0], bf16=True, max_grad_norm=0.01, limits=(Limit(metric="grad_norm", at=0.02),))

    def figure(self, stage: int) -> dict[str, Any]:
        """A metric that is known before the optimizer step."""
        return self._rejected_update(stage, self.batches[0], limits=(Limit(metric="entropy", at=50.0),))

    def halt(self, stage: int) -> dict[str, Any]:
        limits = (Limit(metric="kl_behaviour", at=1e-6, action="halt"), Limit(metric="entropy", at=50.0))
        return self._rejected_update(stage, self.batches[0], limits=limits)

    def logprob(self, stage: int) -> dict[str, Any]:
        """One token whose behaviour logprob is -inf, on one rank only."""
        return self._rejected_update(stage, self._spoiled("logprobs", -math.inf))

    def advantage(self, stage: int) -> dict[str, Any]:
        return self._rejected_update(stage, self._spoiled("advantages", math.nan))

    def _spoiled(self, field: str, value: float) -> Batch:
        batch = self.batches[0]
        sample = batch.samples[0]
        position = sample.loss_mask.index(True)
        values = list(getattr(sample, field))
        values[position] = value
        return replace(batch, samples=(replace(sample, **{field: tuple(values)}), *batch.samples[1:]))

    def undo(self, stage: int) -> dict[str, Any]:
        """Restores a checkpoint from the middle of a run, then one from before the first update; one update after each."""
        recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        engine = self.engine(recipe)
        root = self.run_dir / f"undo-{stage}-{self.ranks.size}"
        updater = Updater(engine)
        for step in range(2):
            counts, ranks = FailureCounts(rollbacks=tuple(range(step))), self.ranks.size
            meta = CheckpointMeta(step=step, parent=max(step - 1, 0), ranks=ranks, zero_stage=stage, counts=counts)
            save(root, engine, meta, keep=1, spare=lambda: {0})
            updater.update(self.batches[step])
        straight = gather_weights(engine)
        updater.update(self.batches[0])
        weights = []
        for step in (1, 0):
            checkpoint = numbered(root, step)
            assert checkpoint is not None and len(checkpoint.meta.counts.rollbacks) == step
            restore(checkpoint, engine)
            updater.update(self.batches[1 if step else 0])
            weights.append(gather_weights(engine))
        first = self.engine(recipe)
        Updater(first).update(self.batches[0])
        return {"straight": straight, "resumed": weights[0], "from_scratch": weights[1], "first": gather_weights(first)}

    def undocritic(self, stage: int) -> dict[str, Any]:
        """Restores policy and critic to the state before their first update, then repeats that update."""
        changes = {"objective": ObjectiveConfig(advantage="gae"), "critic": CriticConfig(lr=1e-2)}
        recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size).model_copy(update=changes)
        engine, critic, updater = self._actor_and_critic(recipe)
        root = self.run_dir / f"undo-critic-{stage}-{self.ranks.size}"
        save(root, engine, CheckpointMeta(step=0, parent=0, ranks=self.ranks.size, zero_stage=stage), keep=1, critic=critic)
        batch = assemble(0, self.groups[0], recipe).batch
        weights = []
        for _ in range(2):
            updater.update(batch)
            weights.append(gather_weights(engine) | {name: value.detach().clone() for name, value in critic.scorer.named_parameters()})
            checkpoint = numbered(root, 0)
            assert checkpoint is not None
            restore(checkpoint, engine, critic=critic)
        base = gather_weights(engine) | {name: value.detach().clone() for name, value in critic.scorer.named_parameters()}
        return {"first": weights[0], "resumed": weights[1], "base": base}


if __name__ == "__main__":
    main(Setbacks)
