"""Runs several learner scenarios in one process group under torchrun, because starting a group takes longer than a scenario.

`script.py RUN_DIR OUT NAME...` runs each scenario; rank 0 writes its result to OUT/NAME.pt. A name consists of a method, a ZeRO
stage, and a number or the name of a variant: `stage-2`, `stage-2-3`, `resume-2-lora`.
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
from agentrl.learner.forest import register
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
        """`stage` with all ranks in one team, in micro-batches longer than the limit of one rank; gradient checkpointing at stage 3."""
        changes = {"sequence_parallel": self.ranks.size, "max_tokens_per_microbatch": 128, "gradient_checkpointing": stage == 3}
        return self.in_teams_of(self.ranks.size).stage(stage, variant, **changes)

    def teams(self, stage: int) -> dict[str, Any]:
        """`objective` with the ranks in teams of two."""
        return self.in_teams_of(2).objective(stage, 128, sequence_parallel=2)

    def exact(self, _: int) -> dict[str, float]:
        """Largest relative gap, over parameters, between a team's gradients and those of one rank alone, in float64."""
        gaps = {}
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
            gaps[kind] = max(((team - alone).abs().max() / alone.abs().max()).item() for alone, team in zip(*gradients, strict=True))
        return gaps

    def in_teams_of(self, size: int) -> Scenario:
        other = copy(self)
        other.ranks = form_teams(self.ranks, size)
        return other

    def variant(self, stage: int, name: str, **changes: Any) -> Recipe:
        """The recipe at a ZeRO stage: plain, with an adapter and a KL penalty, or with everything offloaded that the stage allows."""
        recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size, **changes)
        if name == "plain":
            return recipe
        if name == "lora":
            learner = recipe.learner.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0)})
            return recipe.model_copy(update={"learner": learner, "objective": ObjectiveConfig(kl="k3", kl_coef=0.1)})
        assert name == "offload"
        return recipe.but({"device": "auto", "learner.offload": "parameters" if stage == 3 else "optimizer"})  # auto selects the CPU here

    def engine(self, recipe: Recipe) -> PolicyEngine:
        return PolicyEngine(self.run_dir / "versions" / "000000", recipe, self.ranks)

    def stage(self, stage: int, variant: str = "plain", **changes: Any) -> dict[str, Any]:
        """Two updates; weights and metrics after them, and whether DeepSpeed offloaded optimizer and weights."""
        engine = self.engine(self.variant(stage, variant, **changes))
        updater = Updater(engine)
        metrics = [updater.update(batch) for batch in self.batches]
        offloaded = (engine.deepspeed.zero_use_cpu_optimizer(), stage == 3 and engine.deepspeed.optimizer.offload_param)
        return {"weights": gather_weights(engine), "metrics": metrics, "offloaded": offloaded}

    def objective(self, stage: int, tokens: int, **learner: Any) -> dict[str, Any]:
        """Two updates with each of OBJECTIVES, in micro-batches of `tokens`; weights and metrics after them."""
        results = {}
        for name, changes in OBJECTIVES.items():
            recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size, max_tokens_per_microbatch=tokens, **learner)
            recipe = recipe.model_copy(update={"objective": ObjectiveConfig.model_validate(changes)})
            engine = self.engine(recipe)
            updater = Updater(engine)
            metrics = []
            for step, groups in enumerate(self.groups):
                penalties = updater.score_penalties(counted_samples(groups))
                metrics.append(updater.update(assemble(step, groups, recipe, penalties=penalties).batch))
            results[name] = {"weights": gather_weights(engine), "metrics": metrics, "penalties": penalties}
        return results

    def entropy(self, stage: int) -> dict[str, Any]:
        """Two updates: with an entropy weight that changes, with both weights set one after the other, and with the first weight only."""

        def recipe_with(weight: float | tuple[float, float]) -> Recipe:
            return self.with_learner(zero_stage=stage).model_copy(update={"objective": ObjectiveConfig(entropy_coef=weight)})

        weights = {}
        for name, coefficients in {"changing": [(0.5, 0.1)] * 2, "one by one": [0.5, 0.1], "constant": [0.5, 0.5]}.items():
            engine = self.engine(recipe_with(coefficients[0]))
            for batch, coefficient in zip(self.batches, coefficients, strict=True):
                engine.recipe = recipe_with(coefficient)
                Updater(engine).update(batch)
            weights[name] = gather_weights(engine)
        return weights

    def resume(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """Update, checkpoint, update; then the second update again from the checkpoint, in a fresh engine."""
        recipe = self.variant(stage, variant, weight_decay=0.1)
        engine = self.engine(recipe)
        updater = Updater(engine)
        updater.update(self.batches[0])
        meta = CheckpointMeta(step=1, parent=0, ranks=self.ranks.size, zero_stage=stage)
        root = self._root(stage, self.ranks.size, variant)
        save(root, engine, meta, keep=2)
        noise = torch.rand(3)
        updater.update(self.batches[1])
        resumed = self.engine(recipe)
        checkpoint = newest(root)
        assert checkpoint is not None
        assert checkpoint.meta == meta
        restore(checkpoint, resumed)
        assert torch.equal(torch.rand(3), noise), "the random state is restored"
        Updater(resumed).update(self.batches[1])
        saved = {name: state for file in (checkpoint.folder / "state").glob("*.pt") for name, state in _contents(file)}
        return {"weights": gather_weights(engine), "resumed": gather_weights(resumed), "saved": saved}

    def _root(self, stage: int, ranks: int, variant: str) -> Path:
        return self.run_dir / f"checkpoints-{stage}-{ranks}-{variant}"

    def reshape(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """The second update, from the checkpoint that two ranks wrote after the first one in `resume`."""
        return self.cross(stage, stage, variant)

    def cross(self, stage: int, source: int, variant: str = "plain") -> dict[str, Any]:
        """The second update, from the checkpoint that two ranks wrote at stage `source`."""
        engine = self.engine(self.variant(stage, variant, weight_decay=0.1))
        checkpoint = newest(self._root(source, 2, variant))
        assert checkpoint is not None and checkpoint.meta.ranks == 2
        restore(checkpoint, engine)
        folders = [path.name for path in checkpoint.folder.parent.iterdir()]
        metrics = Updater(engine).update(self.batches[1])
        return {"weights": gather_weights(engine), "metrics": metrics, "checkpoints": folders}

    def crossppo(self, stage: int, source: int) -> dict[str, Any]:
        """The second update of `shared`, from another stage's checkpoint. Head and trunk have different step counts in it."""
        engine, _, updater = self._actor_and_critic(self._with_critic(stage, SHARED, weight_decay=0.1))
        checkpoint = newest(self.run_dir / f"checkpoints-shared-{source}-2" / "1")
        assert checkpoint is not None
        restore(checkpoint, engine)
        updater.update(self._ppo_batches(engine.recipe)[1])
        return {"weights": gather_weights(engine), "heads": _heads(engine)}

    def refused(self, stage: int) -> dict[str, str]:
        """Error messages for checkpoints that cannot be resumed: without a step, without a critic, of another model."""
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
        errors = {}
        for name, (recipe, root) in trials.items():
            checkpoint = newest(root)
            assert checkpoint is not None
            target, critic, _ = self._actor_and_critic(recipe) if recipe.critic else (self.engine(recipe), None, None)
            try:
                restore(checkpoint, target, critic=critic)
            except LearnerError as error:
                errors[name] = str(error)
            assert not list(root.glob(".*")), "temporary files are deleted"
        return errors

    def hostile(self, stage: int) -> dict[str, Any]:
        """Error messages for a checkpoint of `resume` with a program in one of its files, at its own stage and at another one."""
        source = newest(self._root(stage, self.ranks.size, "plain"))
        assert source is not None
        ran, errors = self.run_dir / "ran", {}
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
                    errors[target, str(file)] = str(error)
        return {"errors": errors, "files": len(list(source.folder.rglob("*.pt"))), "ran": ran.exists()}

    def ppo(self, stage: int, pieces: int = 1) -> dict[str, Any]:
        return self._ppo(stage, CriticConfig(lr=1e-2, epochs=2, minibatches=pieces, warmup_steps=1, gamma=0.97, lam=0.9))

    def shared(self, stage: int, **changes: Any) -> dict[str, Any]:
        """PPO with a head on the policy's trunk. Weight decay adds parameter groups, and would change a trunk that is not frozen."""
        return self._ppo(stage, SHARED, weight_decay=0.1, **changes)

    def _ppo(self, stage: int, config: CriticConfig, **changes: Any) -> dict[str, Any]:
        """A step that trains only the critic, one that trains both, and the second again from the checkpoint between them."""
        recipe = self._with_critic(stage, config, **changes)
        batches = self._ppo_batches(recipe)
        first, critic, updater = self._actor_and_critic(recipe)
        before = gather_weights(first)
        metrics = [updater.update(batches[0])]
        warmed = gather_weights(first)
        meta = CheckpointMeta(step=1, parent=0, ranks=self.ranks.size, zero_stage=stage)
        root = self.run_dir / f"checkpoints-{config.trunk}-{stage}-{self.ranks.size}" / str(recipe.learner.minibatches)
        save(root, first, meta, keep=1, critic=critic)
        metrics.append(updater.update(batches[1]))
        resumed, resumed_critic, resumed_updater = self._actor_and_critic(recipe)
        checkpoint = newest(root)
        assert checkpoint is not None
        restore(checkpoint, resumed, critic=resumed_critic)
        resumed_updater.update(batches[1])
        return {
            "before": before,
            "warmed": warmed,
            "weights": gather_weights(first),
            "resumed": gather_weights(resumed),
            "heads": [_heads(engine) for engine in (first, resumed)],
            "metrics": metrics,
        }

    def _with_critic(self, stage: int, config: CriticConfig, **changes: Any) -> Recipe:
        recipe = self.with_learner(zero_stage=stage, ranks=self.ranks.size, **changes)
        return recipe.model_copy(update={"objective": ObjectiveConfig(advantage="gae"), "critic": config})

    def _ppo_batches(self, recipe: Recipe) -> list[Batch]:
        return [assemble(step, groups, recipe).batch for step, groups in enumerate(self.groups)]

    def _actor_and_critic(self, recipe: Recipe) -> tuple[PolicyEngine, Critic | None, Updater]:
        engine = self.engine(recipe)
        assert recipe.critic is not None
        critic = None if recipe.critic.shared else Critic(self.run_dir / "versions" / "000000", recipe, self.ranks)
        return engine, critic, Updater(engine, critic=critic)

    def poisoned(self, stage: int, variant: str = "plain") -> dict[str, Any]:
        """An update whose gradient contains NaN, then a good update; compared with the good update alone."""
        recipe = self.variant(stage, variant)
        engine = self.engine(recipe)
        before = gather_weights(engine)
        updater = Updater(engine)
        handle = engine.lm.base_model.layers[1].register_full_backward_hook(_poison if self.ranks.rank == 0 else _keep_gradient)
        metrics = updater.update(self.batches[0])
        handle.remove()
        after = gather_weights(engine)
        updater.update(self.batches[0])
        clean = self.engine(recipe)
        Updater(clean).update(self.batches[0])
        return {"before": before, "after": after, "metrics": metrics, "after_next": gather_weights(engine), "clean": gather_weights(clean)}

    def odd(self, stage: int) -> dict[str, Any]:
        """Edge-case batches: empty, completions of one token, groups of one, a token outside the vocabulary."""
        plain = self.with_learner(zero_stage=stage, ranks=self.ranks.size)
        separate = self._with_critic(stage, CriticConfig())
        results: dict[str, Any] = {"empty": {}}
        for name, setup in (("plain", plain), ("separate", separate), ("shared", self._with_critic(stage, SHARED))):
            if setup.critic:
                engine, _, updater = self._actor_and_critic(setup)
            else:
                updater = Updater(engine := self.engine(setup))
            before = gather_weights(engine)
            metrics = updater.update(Batch(step=1, samples=(), denominator=0, group_indices=(0, 1)))
            results["empty"][name] = {"before": before, "after": gather_weights(engine), "metrics": metrics}
        short = [random_group(index, size=size, lengths=(1, 1), turns=1) for index, size in ((40, 4), (41, 1), (42, 1))]
        ungrouped = plain.model_copy(
            update={
                "objective": ObjectiveConfig(advantage="reinforce++"),
                "rollout": plain.rollout.model_copy(update={"group": {"size": 1}}),
            }
        )
        engine = self.engine(ungrouped)
        before = gather_weights(engine)
        batch = assemble(0, [replace(group, index=number) for number, group in enumerate(short)], ungrouped).batch
        metrics = Updater(engine).update(batch)
        results["short"] = {"before": before, "after": gather_weights(engine), "metrics": metrics, "samples": len(batch.samples)}
        invalid = replace(batch.samples[0], token_ids=(*batch.samples[0].token_ids[:-1], 5000))
        try:
            Updater(engine).update(replace(batch, samples=(invalid, *batch.samples[1:])))
        except LearnerError as error:
            results["unknown_token"] = str(error)
        return results

    def source(self, stage: int) -> dict[str, Any]:
        """The weights that vLLM's weight transfer would get, iterated twice on every rank."""
        from agentrl.learner.nccl_source import DeepSpeedWeightSource

        engine = self.engine(self.with_learner(zero_stage=stage, ranks=self.ranks.size))
        source = DeepSpeedWeightSource(engine)
        declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        passes = [dict(source), dict(source)]
        assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in passes[0].items()] == declared
        grouped = [name for names, _ in source.iter_groups() for name in names]
        return {"sent": passes[0], "sent_again": passes[1], "weights": gather_weights(engine), "grouped": grouped}


class _Program:
    """An object that runs a program when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _heads(engine: PolicyEngine) -> dict[str, torch.Tensor]:
    """Parameters that are trained but not published."""
    parameters = {}
    for name, parameter in engine.scorer.named_parameters():
        if name.startswith("value."):
            with engine.gathered(parameter) as full:
                parameters[name] = full.clone()
    return parameters


def _contents(file: Path) -> list[tuple[str, int]]:
    """Name and size of every weight in a file of a checkpoint, frozen ones included."""
    state = torch.load(file, weights_only=False, map_location="cpu")
    frozen = state.get("frozen_param_fragments") or {}
    return [(name, tensor.numel()) for name, tensor in {**(state.get("module") or {}), **frozen}.items()]


def _poison(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if grad is None else grad * float("nan") for grad in grad_input)


def _keep_gradient(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return None


def main(scenario_class: type[Scenario] = Scenario) -> None:
    run_dir, out, *names = sys.argv[1:]
    ranks = processes.join("cpu")
    scenario = scenario_class(Path(run_dir), ranks)
    for name in names:
        method, _, argument = name.partition("-")
        stage, _, extra = argument.partition("-")
        numbers = {"objective": "tokens", "cross": "source", "crossppo": "source", "ppo": "pieces"}
        key = numbers.get(method, "minibatches") if extra.isdecimal() else "variant"
        changes = {key: int(extra) if extra.isdecimal() else extra} if extra else {}
        result = getattr(scenario, method)(int(stage), **changes)
        if ranks.is_first:
            torch.save(result, Path(out) / f"{name}.pt")
    ranks.barrier()
    processes.leave()


if __name__ == "__main__":
    main()
