"""Runs under torchrun: several learner scenarios in one process group, because starting one costs more than what it does.

`script.py RUN_DIR OUT NAME...` makes each named scenario; rank 0 writes its findings to OUT/NAME.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from agentrl.experience import SqliteStore
from agentrl.learner import ranks as processes
from agentrl.learner.checkpoint import CheckpointMeta, newest, restore, save
from agentrl.learner.critic import Critic
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.publish import gather
from agentrl.learner.ranks import Ranks
from agentrl.learner.update import Updater
from agentrl.objective import assemble, build_batch, counted_samples
from agentrl.recipe import CriticConfig, ObjectiveConfig, Recipe, load
from agentrl.records import Batch

OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1, "kl": "k3", "kl_coef": 0.1},
    "cispo": {
        **{"loss": "cispo", "aggregation": "constant", "entropy_coef": 0.05},
        **{"proximal": "recompute", "correction": "mask", "is_level": "sequence"},
    },
    "reinforce++": {"advantage": "reinforce++", "kl": "k1_reward", "kl_coef": 0.05, "staleness_decay": 0.5},
    "rloo": {"advantage": "rloo", "dual_clip": 1.5, "proximal": "recompute", "kl": "k2", "kl_coef": 0.2},
}


class Scenario:
    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self.run_dir = run_dir
        self.ranks = ranks
        self.recipe = load(run_dir / "recipe.json")
        store = SqliteStore(run_dir / "experience.sqlite")
        size = self.recipe.rollout.groups_per_step
        self.groups = [tuple(store.groups(range(step * size, (step + 1) * size))) for step in range(2)]
        self.batches: list[Batch] = [build_batch(step, groups, self.recipe) for step, groups in enumerate(self.groups)]
        store.close()

    def with_learner(self, **changes: Any) -> Recipe:
        return self.recipe.model_copy(update={"learner": self.recipe.learner.model_copy(update=changes)})

    def engine(self, made: Recipe) -> PolicyEngine:
        return PolicyEngine(self.run_dir / "versions" / "000000", made, self.ranks)

    def stage(self, stage: int, **changes: Any) -> dict[str, Any]:
        """Two updates; weights and metrics after them."""
        engine = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size, **changes))
        updater = Updater(engine)
        metrics = [updater.update(batch) for batch in self.batches]
        return {"weights": gather(engine), "metrics": metrics}

    def objective(self, stage: int, tokens: int) -> dict[str, Any]:
        """Two updates with each of OBJECTIVES, in micro-batches of `tokens`; weights and metrics after them."""
        found = {}
        for name, changes in OBJECTIVES.items():
            made = self.with_learner(zero_stage=stage, ranks=self.ranks.size, max_tokens_per_microbatch=tokens)
            made = made.model_copy(update={"objective": ObjectiveConfig.model_validate(changes)})
            engine = self.engine(made)
            updater = Updater(engine)
            metrics = []
            for step, groups in enumerate(self.groups):
                penalties = updater.penalties(counted_samples(groups))
                metrics.append(updater.update(assemble(step, groups, made, penalties=penalties).batch))
            found[name] = {"weights": gather(engine), "metrics": metrics, "penalties": penalties}
        return found

    def resume(self, stage: int) -> dict[str, Any]:
        """Update, checkpoint, update - and the second update again from the checkpoint, in a fresh engine."""
        made = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        engine = self.engine(made)
        updater = Updater(engine)
        updater.update(self.batches[0])
        meta = CheckpointMeta(step=1, consumed={0: (0, 1, 2)}, ranks=self.ranks.size, zero_stage=stage)
        root = self.run_dir / f"checkpoints-{stage}-{self.ranks.size}"
        save(root, engine, meta, keep=2)
        noise = torch.rand(3)
        updater.update(self.batches[1])
        again = self.engine(made)
        found = newest(root)
        assert found is not None
        assert found.meta == meta
        restore(found, again)
        assert torch.equal(torch.rand(3), noise), "the random state came back"
        Updater(again).update(self.batches[1])
        return {"weights": gather(engine), "again": gather(again)}

    def reshape(self, stage: int) -> dict[str, Any]:
        """The second update, from the checkpoint that two ranks wrote after the first one in `resume`."""
        engine = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size))
        found = newest(self.run_dir / f"checkpoints-{stage}-2")
        assert found is not None and found.meta.ranks == 2
        restore(found, engine)
        left = [path.name for path in found.folder.parent.iterdir()]
        metrics = Updater(engine).update(self.batches[1])
        return {"weights": gather(engine), "metrics": metrics, "left": left}

    def ppo(self, stage: int) -> dict[str, Any]:
        """A step in which only the critic learns, one in which both do, and the second again from the checkpoint between them."""
        made = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        changes = {
            "objective": ObjectiveConfig(advantage="gae"),
            "critic": CriticConfig(lr=1e-2, epochs=2, warmup_steps=1, gamma=0.97, lam=0.9),
        }
        made = made.model_copy(update=changes)
        store = SqliteStore(self.run_dir / "experience.sqlite")
        batches = [build_batch(step, tuple(store.groups(range(step * 3, step * 3 + 3))), made) for step in range(2)]
        store.close()
        first, critic, updater = self._actor_and_critic(made)
        before = gather(first)
        metrics = [updater.update(batches[0])]
        warmed = gather(first)
        meta = CheckpointMeta(step=1, consumed={0: (0, 1, 2)}, ranks=self.ranks.size, zero_stage=stage)
        root = self.run_dir / f"checkpoints-ppo-{stage}-{self.ranks.size}"
        save(root, first, meta, keep=1, critic=critic)
        metrics.append(updater.update(batches[1]))
        again, critic_again, updater_again = self._actor_and_critic(made)
        found = newest(root)
        assert found is not None
        restore(found, again, critic=critic_again)
        updater_again.update(batches[1])
        return {
            "before": before,
            "warmed": warmed,
            "weights": gather(first),
            "again": gather(again),
            "metrics": metrics,
        }

    def _actor_and_critic(self, made: Recipe) -> tuple[PolicyEngine, Critic, Updater]:
        engine = self.engine(made)
        torch.manual_seed(0)
        critic = Critic(self.run_dir / "versions" / "000000", made, self.ranks)
        return engine, critic, Updater(engine, critic=critic)

    def poisoned(self, stage: int) -> dict[str, Any]:
        """A gradient with a NaN in it, then a good update; compared with the good update alone."""
        made = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        engine = self.engine(made)
        before = gather(engine)
        updater = Updater(engine)
        handle = engine.lm.base_model.layers[0].register_full_backward_hook(_poison if self.ranks.rank == 0 else _leave)
        metrics = updater.update(self.batches[0])
        handle.remove()
        after = gather(engine)
        updater.update(self.batches[0])
        clean = self.engine(made)
        Updater(clean).update(self.batches[0])
        return {"before": before, "after": after, "metrics": metrics, "then": gather(engine), "clean": gather(clean)}

    def source(self, stage: int) -> dict[str, Any]:
        """What vLLM's weight transfer would be given, walked twice on every rank."""
        from agentrl.learner.weight_source import DeepSpeedWeightSource

        engine = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size))
        source = DeepSpeedWeightSource(engine)
        declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        passes = [dict(source), dict(source)]
        assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in passes[0].items()] == declared
        grouped = [name for names, _ in source.iter_groups() for name in names]
        return {"sent": passes[0], "again": passes[1], "weights": gather(engine), "grouped": grouped}


def _poison(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if grad is None else grad * float("nan") for grad in grad_input)


def _leave(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return None


def main(kind_of: type[Scenario] = Scenario) -> None:
    run_dir, out, *names = sys.argv[1:]
    ranks = processes.join("cpu")
    scenario = kind_of(Path(run_dir), ranks)
    for name in names:
        kind, _, argument = name.partition("-")
        stage, _, minibatches = argument.partition("-")
        changes = {"tokens" if kind == "objective" else "minibatches": int(minibatches)} if minibatches else {}
        result = getattr(scenario, kind)(int(stage), **changes)
        if ranks.first:
            torch.save(result, Path(out) / f"{name}.pt")
    ranks.barrier()
    processes.leave()


if __name__ == "__main__":
    main()
