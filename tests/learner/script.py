"""Runs under torchrun: several learner scenarios in one process group, because starting one costs more than what it does.

`script.py RUN_DIR OUT NAME...` makes each named scenario; rank 0 writes its findings to OUT/NAME.pt. A name is that of a method, a
ZeRO stage, and a number or the name of a variant: `stage-2`, `stage-2-3`, `resume-2-lora`.
"""

from __future__ import annotations

import os
import shutil
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.config import CriticConfig, LoraConfig, ObjectiveConfig, Recipe, load
from agentrl.errors import LearnerError
from agentrl.experience import SqliteStore
from agentrl.learner import ranks as processes
from agentrl.learner.checkpoint import CheckpointMeta, newest, restore, save
from agentrl.learner.critic import Critic
from agentrl.learner.engine import PolicyEngine, score_tokens
from agentrl.learner.forest_attention import register
from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.learner.publish import gather_weights
from agentrl.learner.ranks import Ranks
from agentrl.learner.token_scorer import TokenScorer
from agentrl.learner.ulysses import form_teams
from agentrl.learner.update import Updater
from agentrl.objective import assemble, counted_samples
from agentrl.records import Batch
from tests.learner.building import random_group
from tests.learner.test_forest import _model, _samples

OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1, "kl": "k3", "kl_coef": 0.1},
    "cispo": {
        **{"loss": "cispo", "aggregation": "constant", "entropy_coef": 0.05},
        "off_policy": {"preset": "mask_sequence", "floor": 0, "cap": 2},
    },
    "reinforce++": {"advantage": "reinforce++", "kl": "k1_reward", "kl_coef": 0.05},
    "rloo": {"advantage": "rloo", "off_policy": {"preset": "truncate"}, "kl": "k2", "kl_coef": 0.2},
}

SHARED = CriticConfig(trunk="shared", lr=2e-2, warmup_steps=1, gamma=0.97, lam=0.9)


class Scenario:
    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self.run_dir = run_dir
        self.ranks = ranks
        self.recipe = load(run_dir / "recipe.json")
        store = SqliteStore(run_dir / "experience.sqlite")
        size = self.recipe.rollout.groups_per_step
        self.groups = [tuple(store.groups(range(step * size, (step + 1) * size))) for step in range(2)]
        self.batches: list[Batch] = [assemble(step, groups, self.recipe).batch for step, groups in enumerate(self.groups)]
        store.close()

    def with_learner(self, **changes: Any) -> Recipe:
        return self.recipe.model_copy(update={"learner": self.recipe.learner.model_copy(update=changes)})

    def ulysses(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """As `stage`, with all ranks in one team, in micro-batches that are longer than what one rank may hold; recomputed at stage 3."""
        changes = {"sequence_parallel": self.ranks.size, "max_tokens_per_microbatch": 128, "gradient_checkpointing": stage == 3}
        return self.in_teams_of(self.ranks.size).stage(stage, variant, **changes)

    def teams(self, stage: int) -> dict[str, Any]:
        """As `objective`, with the ranks in teams of two."""
        return self.in_teams_of(2).objective(stage, 128, sequence_parallel=2)

    def exact(self, _: int) -> dict[str, float]:
        """Largest relative gap, over parameters, between a team's gradients and those of one rank alone, in float64."""
        found = {}
        for kind in ("qwen3", "qwen3 sliding", "llama"):
            model = _model(kind, register())
            gradients = []
            for ranks in (self.ranks, self.in_teams_of(self.ranks.size).ranks):
                model.zero_grad()
                for rows in plan_micro_batches(_samples(1), rank=0, ranks=1, max_tokens=300):
                    batch = build_micro_batch(rows, ranks.device, team=ranks.team)
                    logprobs, entropy = score_tokens(TokenScorer(model), batch, 0.7)
                    (logprobs * batch.advantages + 0.1 * entropy).sum().backward()
                for parameter in model.parameters() if ranks.team else ():
                    dist.all_reduce(parameter.grad)
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            found[kind] = max(((team - alone).abs().max() / alone.abs().max()).item() for alone, team in zip(*gradients, strict=True))
        return found

    def in_teams_of(self, size: int) -> Scenario:
        other = copy(self)
        other.ranks = form_teams(self.ranks, size)
        return other

    def variant(self, stage: int, name: str, **changes: Any) -> Recipe:
        """The recipe at a ZeRO stage: plain, with an adapter held near the base policy, or with all that the stage allows put aside."""
        made = self.with_learner(zero_stage=stage, ranks=self.ranks.size, **changes)
        if name == "plain":
            return made
        if name == "lora":
            learner = made.learner.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0)})
            return made.model_copy(update={"learner": learner, "objective": ObjectiveConfig(kl="k3", kl_coef=0.1)})
        assert name == "offload"
        return made.but(
            {"device": "auto", "learner.offload": "parameters" if stage == 3 else "optimizer"}
        )  # auto: here a CPU, which it is for

    def engine(self, made: Recipe) -> PolicyEngine:
        return PolicyEngine(self.run_dir / "versions" / "000000", made, self.ranks)

    def stage(self, stage: int, variant: str = "plain", **changes: Any) -> dict[str, Any]:
        """Two updates; weights and metrics after them, and whether DeepSpeed put optimizer and weights aside."""
        engine = self.engine(self.variant(stage, variant, **changes))
        updater = Updater(engine)
        metrics = [updater.update(batch) for batch in self.batches]
        aside = (engine.deepspeed.zero_use_cpu_optimizer(), stage == 3 and engine.deepspeed.optimizer.offload_param)
        return {"weights": gather_weights(engine), "metrics": metrics, "aside": aside}

    def objective(self, stage: int, tokens: int, **others: Any) -> dict[str, Any]:
        """Two updates with each of OBJECTIVES, in micro-batches of `tokens`; weights and metrics after them."""
        found = {}
        for name, changes in OBJECTIVES.items():
            made = self.with_learner(zero_stage=stage, ranks=self.ranks.size, max_tokens_per_microbatch=tokens, **others)
            made = made.model_copy(update={"objective": ObjectiveConfig.model_validate(changes)})
            engine = self.engine(made)
            updater = Updater(engine)
            metrics = []
            for step, groups in enumerate(self.groups):
                penalties = updater.score_penalties(counted_samples(groups))
                metrics.append(updater.update(assemble(step, groups, made, penalties=penalties).batch))
            found[name] = {"weights": gather_weights(engine), "metrics": metrics, "penalties": penalties}
        return found

    def entropy(self, stage: int) -> dict[str, Any]:
        """Two updates with an entropy weight that changes, with both weights one after the other, and with the first one."""

        def made(weight: float | tuple[float, float]) -> Recipe:
            return self.with_learner(zero_stage=stage).model_copy(update={"objective": ObjectiveConfig(entropy_coef=weight)})

        weights = {}
        for name, coefficients in {"changing": [(0.5, 0.1)] * 2, "one by one": [0.5, 0.1], "constant": [0.5, 0.5]}.items():
            engine = self.engine(made(coefficients[0]))
            for batch, coefficient in zip(self.batches, coefficients, strict=True):
                engine.recipe = made(coefficient)
                Updater(engine).update(batch)
            weights[name] = gather_weights(engine)
        return weights

    def resume(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """Update, checkpoint, update - and the second update again from the checkpoint, in a fresh engine."""
        made = self.variant(stage, variant, weight_decay=0.1)
        engine = self.engine(made)
        updater = Updater(engine)
        updater.update(self.batches[0])
        meta = CheckpointMeta(step=1, parent=0, ranks=self.ranks.size, zero_stage=stage)
        root = self._root(stage, self.ranks.size, variant)
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
        saved = {name: state for file in (found.folder / "state").glob("*.pt") for name, state in _contents(file)}
        return {"weights": gather_weights(engine), "again": gather_weights(again), "saved": saved}

    def _root(self, stage: int, ranks: int, variant: str) -> Path:
        return self.run_dir / f"checkpoints-{stage}-{ranks}-{variant}"

    def reshape(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """The second update, from the checkpoint that two ranks wrote after the first one in `resume`."""
        return self.cross(stage, stage, variant)

    def cross(self, stage: int, source: int, variant: str = "plain") -> dict[str, Any]:
        """The same from the checkpoint of stage `source`."""
        engine = self.engine(self.variant(stage, variant, weight_decay=0.1))
        found = newest(self._root(source, 2, variant))
        assert found is not None and found.meta.ranks == 2
        restore(found, engine)
        left = [path.name for path in found.folder.parent.iterdir()]
        metrics = Updater(engine).update(self.batches[1])
        return {"weights": gather_weights(engine), "metrics": metrics, "left": left}

    def crossppo(self, stage: int, source: int) -> dict[str, Any]:
        """The second update of `shared`, in which head and trunk have made different numbers of steps, from another stage's checkpoint."""
        engine, _, updater = self._actor_and_critic(self._with_critic(stage, SHARED, weight_decay=0.1))
        found = newest(self.run_dir / f"checkpoints-shared-{source}-2" / "1")
        assert found is not None
        restore(found, engine)
        updater.update(self._ppo_batches(engine.recipe)[1])
        return {"weights": gather_weights(engine), "heads": _heads(engine)}

    def refused(self, stage: int) -> dict[str, str]:
        """What is said of checkpoints that cannot be gone on from: never trained, without a critic, of another model."""
        fresh = self.run_dir / "checkpoints-fresh"
        engine = self.engine(self.with_learner(zero_stage=3, ranks=self.ranks.size))
        save(fresh, engine, CheckpointMeta(step=1, parent=0, ranks=self.ranks.size, zero_stage=3), keep=1)
        plain = self.with_learner(zero_stage=stage, ranks=self.ranks.size, weight_decay=0.1)
        separate, shared = self._with_critic(stage, CriticConfig(), weight_decay=0.1), self._with_critic(stage, SHARED, weight_decay=0.1)
        trials = {
            "fresh": (plain, fresh),
            "no critic": (separate, self._root(stage, 2, "plain")),
            "no head": (shared, self._root(3, 2, "plain")),
            "other groups": (shared, self._root(0, 2, "plain")),
        }
        said = {}
        for name, (made, root) in trials.items():
            found = newest(root)
            assert found is not None
            target, critic, _ = self._actor_and_critic(made) if made.critic else (self.engine(made), None, None)
            try:
                restore(found, target, critic=critic)
            except LearnerError as error:
                said[name] = str(error)
            assert not list(root.glob(".*")), "what was written on the way is gone"
        return said

    def hostile(self, stage: int) -> dict[str, Any]:
        """What is said of a checkpoint of `resume` with a program in one of its files, at its own stage and at another one."""
        source = newest(self._root(stage, self.ranks.size, "plain"))
        assert source is not None
        ran, said = self.run_dir / "ran", {}
        for target in (stage, 0 if stage else 3):
            engine = self.engine(self.variant(target, "plain", weight_decay=0.1))
            for file in sorted(path.relative_to(source.folder) for path in source.folder.rglob("*.pt")):
                folder = self.run_dir / "hostile" / source.folder.name
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(source.folder, folder)
                torch.save({"module": _Program(ran)}, folder / file)
                try:
                    restore(replace(source, folder=folder), engine)
                except LearnerError as error:
                    said[target, str(file)] = str(error)
        return {"said": said, "files": len(list(source.folder.rglob("*.pt"))), "ran": ran.exists()}

    def ppo(self, stage: int, pieces: int = 1) -> dict[str, Any]:
        return self._ppo(stage, CriticConfig(lr=1e-2, epochs=2, minibatches=pieces, warmup_steps=1, gamma=0.97, lam=0.9))

    def shared(self, stage: int, **changes: Any) -> dict[str, Any]:
        """PPO with a head on the policy's trunk. Weight decay makes more groups of parameters, and would show in a frozen trunk."""
        return self._ppo(stage, SHARED, weight_decay=0.1, **changes)

    def _ppo(self, stage: int, config: CriticConfig, **changes: Any) -> dict[str, Any]:
        """A step in which only the critic learns, one in which both do, and the second again from the checkpoint between them."""
        made = self._with_critic(stage, config, **changes)
        batches = self._ppo_batches(made)
        first, critic, updater = self._actor_and_critic(made)
        before = gather_weights(first)
        metrics = [updater.update(batches[0])]
        warmed = gather_weights(first)
        meta = CheckpointMeta(step=1, parent=0, ranks=self.ranks.size, zero_stage=stage)
        root = self.run_dir / f"checkpoints-{config.trunk}-{stage}-{self.ranks.size}" / str(made.learner.minibatches)
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
            "weights": gather_weights(first),
            "again": gather_weights(again),
            "heads": [_heads(engine) for engine in (first, again)],
            "metrics": metrics,
        }

    def _with_critic(self, stage: int, config: CriticConfig, **changes: Any) -> Recipe:
        made = self.with_learner(zero_stage=stage, ranks=self.ranks.size, **changes)
        return made.model_copy(update={"objective": ObjectiveConfig(advantage="gae"), "critic": config})

    def _ppo_batches(self, made: Recipe) -> list[Batch]:
        return [assemble(step, groups, made).batch for step, groups in enumerate(self.groups)]

    def _actor_and_critic(self, made: Recipe) -> tuple[PolicyEngine, Critic | None, Updater]:
        engine = self.engine(made)
        assert made.critic is not None
        critic = None if made.critic.shared else Critic(self.run_dir / "versions" / "000000", made, self.ranks)
        return engine, critic, Updater(engine, critic=critic)

    def poisoned(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """A gradient with a NaN in it, then a good update; compared with the good update alone."""
        made = self.variant(stage, variant)
        engine = self.engine(made)
        before = gather_weights(engine)
        updater = Updater(engine)
        handle = engine.lm.base_model.layers[1].register_full_backward_hook(_poison if self.ranks.rank == 0 else _leave)
        metrics = updater.update(self.batches[0])
        handle.remove()
        after = gather_weights(engine)
        updater.update(self.batches[0])
        clean = self.engine(made)
        Updater(clean).update(self.batches[0])
        return {"before": before, "after": after, "metrics": metrics, "then": gather_weights(engine), "clean": gather_weights(clean)}

    def odd(self, stage: int) -> dict[str, Any]:
        """Batches at the edge of what there is: empty ones, completions of one token, groups of one, a token that no model has."""
        plain = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        separate = self._with_critic(stage, CriticConfig())
        found: dict[str, Any] = {"empty": {}}
        for name, made in (("plain", plain), ("separate", separate), ("shared", self._with_critic(stage, SHARED))):
            engine, _, updater = self._actor_and_critic(made) if made.critic else (self.engine(made), None, Updater(self.engine(made)))
            before = gather_weights(engine)
            metrics = updater.update(Batch(step=1, samples=(), denominator=0, group_indices=(0, 1)))
            found["empty"][name] = {"before": before, "after": gather_weights(engine), "metrics": metrics}
        short = [random_group(index, size=size, lengths=(1, 1), turns=1) for index, size in ((40, 4), (41, 1), (42, 1))]
        alone = plain.model_copy(
            update={
                "objective": ObjectiveConfig(advantage="reinforce++"),
                "rollout": plain.rollout.model_copy(update={"group": {"size": 1}}),
            }
        )
        engine = self.engine(alone)
        before = gather_weights(engine)
        batch = assemble(0, [replace(group, index=place) for place, group in enumerate(short)], alone).batch
        metrics = Updater(engine).update(batch)
        found["short"] = {"before": before, "after": gather_weights(engine), "metrics": metrics, "samples": len(batch.samples)}
        strange = replace(batch.samples[0], token_ids=(*batch.samples[0].token_ids[:-1], 5000))
        try:
            Updater(engine).update(replace(batch, samples=(strange, *batch.samples[1:])))
        except LearnerError as error:
            found["strange"] = str(error)
        return found

    def source(self, stage: int) -> dict[str, Any]:
        """What vLLM's weight transfer would be given, walked twice on every rank."""
        from agentrl.learner.nccl_source import DeepSpeedWeightSource

        engine = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size))
        source = DeepSpeedWeightSource(engine)
        declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        passes = [dict(source), dict(source)]
        assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in passes[0].items()] == declared
        grouped = [name for names, _ in source.iter_groups() for name in names]
        return {"sent": passes[0], "again": passes[1], "weights": gather_weights(engine), "grouped": grouped}


class _Program:
    """Whoever unpickles one runs a program."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _heads(engine: PolicyEngine) -> dict[str, torch.Tensor]:
    """Parameters that are trained and not published."""
    found = {}
    for name, parameter in engine.scorer.named_parameters():
        if name.startswith("value."):
            with engine.gathered(parameter) as full:
                found[name] = full.clone()
    return found


def _contents(file: Path) -> list[tuple[str, int]]:
    """Name and size of every weight in a file of a checkpoint, frozen ones included."""
    state = torch.load(file, weights_only=False, map_location="cpu")
    frozen = state.get("frozen_param_fragments") or {}
    return [(name, tensor.numel()) for name, tensor in {**(state.get("module") or {}), **frozen}.items()]


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
        stage, _, extra = argument.partition("-")
        numbers = {"objective": "tokens", "cross": "source", "crossppo": "source", "ppo": "pieces"}
        key = numbers.get(kind, "minibatches") if extra.isdecimal() else "variant"
        changes = {key: int(extra) if extra.isdecimal() else extra} if extra else {}
        result = getattr(scenario, kind)(int(stage), **changes)
        if ranks.is_first:
            torch.save(result, Path(out) / f"{name}.pt")
    ranks.barrier()
    processes.leave()


if __name__ == "__main__":
    main()
