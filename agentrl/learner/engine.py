"""The trained policy: a causal language model inside a DeepSpeed engine."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.learner import lora
from agentrl.learner.causal_lm import load_model, make_scorer
from agentrl.learner.optimizer import BETAS, EPS, RATE_SCALE, GuardedAdamW, learning_rate, parameter_groups, skip_steps_above
from agentrl.learner.packing import MicroBatch, single_sequence
from agentrl.learner.ranks import Ranks
from agentrl.learner.token_scorer import TOLERANCE, TokenScorer, ValuedScorer, check_scorer
from agentrl.learner.ulysses import check_heads
from agentrl.records import Probe
from agentrl.records.images import FIRST

_BUCKET_ELEMENTS = 50_000_000  # DeepSpeed's default would reserve 2 GB for gradients, even for a small model


class PolicyEngine:
    """Weights, optimizer and their sharding over ranks. Every method is a collective: all ranks call it in the same order.

    `folder` is a Hugging Face folder with the initial weights. Creating the engine raises `UserError` if the learner does not support the
    model, or if the model does not fit the recipe's settings.
    """

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks) -> None:
        deepspeed = _deepspeed()
        self.folder = folder
        self.ranks = ranks
        self.recipe = recipe
        self.temperature = recipe.rollout.sampling.temperature
        self.scorer = make_scorer(load_model(folder, recipe, ranks.device), recipe)
        if recipe.learner.lora is not None:
            lora.attach(self.lm, recipe.learner.lora, seed=recipe.seed)
            lora.exclude_frozen_weights(self.scorer)
        if ranks.team is not None:
            check_heads(self.lm.config.get_text_config(), ranks.team)
            if self.scorer.images is not None:
                raise UserError("learner.sequence_parallel does not support a model that reads images", fix="learner.sequence_parallel=1")
        check_scorer(self.scorer, tolerance=TOLERANCE[recipe.policy.dtype])
        head = list(self.scorer.value.parameters()) if isinstance(self.scorer, ValuedScorer) else []
        in_head = {id(parameter) for parameter in head}
        parameters: list[Tensor] = [p for p in self.scorer.parameters() if p.requires_grad and id(p) not in in_head]
        size = sum(parameter.numel() for parameter in (*parameters, *head))
        self.optimizer = make_optimizer(parameters, recipe, head=head)
        self.deepspeed, *_ = deepspeed.initialize(
            model=self.scorer, optimizer=self.optimizer, config=deepspeed_config(recipe, ranks, size), dist_init_required=False
        )

    @property
    def lm(self) -> Any:
        """The Hugging Face model. Under ZeRO-3, its parameters are empty between forward passes."""
        return self.scorer.lm

    @property
    def image_token(self) -> int | None:
        """The token id that represents a part of an image; None if the model reads only text."""
        return None if self.scorer.images is None else self.scorer.images.token

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns logprobs [N] and entropies [N] at the sampling temperature, over each token's support, both with gradient."""
        return score_tokens(self.deepspeed, batch, self.temperature)

    def probe(self, rows: tuple[tuple[int, ...], ...]) -> Probe:
        """Returns the logprobs of token rows under the current weights, and the logprobs of the most likely next tokens after each row."""
        logprobs, next_logprobs, next_ids = zip(*map(self._row, rows), strict=True)
        return Probe(token_ids=rows, logprobs=logprobs, next_ids=next_ids, next_logprobs=next_logprobs, temperature=self.temperature)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's share of the loss. Shares are summed over ranks, not averaged as in DeepSpeed."""
        self.deepspeed.backward(loss * self.ranks.size)

    def step(self, number: int, *, head_alone: bool = False, refuse_above: float = math.inf) -> tuple[bool, float]:
        """Clips and applies the accumulated gradient with the learning rate of step `number`, then clears the gradient.

        Returns whether the gradient was applied, and the gradient's global norm before clipping. A gradient whose norm is not finite or
        exceeds `refuse_above` is not applied: weights and optimizer state stay unchanged. If `head_alone` is True, only the value head is
        trained.
        """
        rate = learning_rate(self.recipe.learner, self.recipe.step_limit, number)
        return apply_gradient(self.deepspeed, self.optimizer, rate, head_alone=head_alone, refuse_above=refuse_above)

    def parameters(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """Yields the name, the local tensor and the full shape of every trained parameter, in model order.

        Tied parameters appear once, under their first name.
        """
        for name, parameter in self.lm.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, tuple(getattr(parameter, "ds_shape", parameter.shape))

    @contextmanager
    def gathered(self, parameter: Tensor) -> Iterator[Tensor]:
        """Yields the full parameter on every rank. The tensor is valid only inside the context."""
        if not hasattr(parameter, "ds_id"):
            yield parameter.detach()
            return
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=None):
            yield parameter.detach()

    def _row(self, row: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
        """Returns the logprobs of a row's tokens, and the logprobs and ids of the most likely next tokens.

        The logprobs of token t+1 given tokens <= t are at temperature 1, and those of the next tokens at the rollouts' temperature.
        """
        ids, layout = single_sequence(row, self.ranks.device)
        targets = torch.cat((ids[0, 1:], ids[0, :1])) & (FIRST - 1)  # without image tags; the last position's target is a placeholder
        positions = torch.arange(len(row), device=ids.device)
        with torch.no_grad():
            logprobs, _, next_logprobs, next_ids = self.deepspeed(ids, layout, positions, targets, 1.0, None, self.temperature)
        return tuple(logprobs[:-1].tolist()), tuple(next_logprobs[0].tolist()), tuple(next_ids[0].tolist())


def score_tokens(module: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns logprobs and entropies [N] of the batch's trained tokens from a `TokenScorer`, either bare or in a DeepSpeed engine."""
    logprobs, entropy, *_ = module(batch.input_ids, batch.layout, batch.positions, batch.targets, temperature, batch.supports)
    if batch.layout.shard is not None:
        logprobs, entropy = batch.layout.shard.gather(torch.stack((logprobs, entropy)))
    return logprobs[batch.expand], entropy[batch.expand]


def apply_gradient(
    engine: Any, optimizer: torch.optim.AdamW, rate: float, *, head_alone: bool = False, refuse_above: float = math.inf
) -> tuple[bool, float]:
    """Performs one optimizer step of a DeepSpeed engine. See `PolicyEngine.step`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_SCALE] if RATE_SCALE in group else 0.0 if head_alone else rate
    if isinstance(optimizer, GuardedAdamW):
        optimizer.skip_above = refuse_above
        engine.step()
        norm = optimizer.grad_norm
    else:
        with skip_steps_above(engine.optimizer, above=refuse_above) as norms:
            engine.step()
        norm = norms[0] if norms else math.nan  # no norm: DeepSpeed detected an overflow before computing it
    return math.isfinite(norm) and norm <= refuse_above, norm


def _deepspeed() -> Any:
    """Imports DeepSpeed without setting up a compiler for its Muon optimizer, which saves a second.

    At ZeRO stages above 0, DeepSpeed imports Muon, which is not used here. Importing it would set up a compiler for Muon's kernel.
    """
    import deepspeed
    from deepspeed.runtime import compiler

    compiled, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compiled
    return deepspeed


def make_optimizer(parameters: list[Tensor], recipe: Recipe, *, head: Sequence[Tensor] = ()) -> torch.optim.AdamW:
    """Returns an AdamW optimizer that never applies a non-finite gradient. At ZeRO stages above 0, DeepSpeed itself skips such gradients.

    `head`: parameters of a value head, which form a group with the critic's learning rate and without weight decay.
    """
    learner = recipe.learner
    groups = parameter_groups(parameters, learner.weight_decay)
    if head and recipe.critic is not None:
        groups.append({"params": list(head), "weight_decay": 0.0, RATE_SCALE: recipe.critic.lr / learner.lr})
    on_cpu = learner.offload != "none" or parameters[0].device.type == "cpu"
    fused = on_cpu or None  # on CPU the fused step is seven times faster than torch's default
    if _zero_stage(recipe) == 0:
        return GuardedAdamW(groups, lr=learner.lr, max_norm=learner.max_grad_norm, fused=fused)
    return torch.optim.AdamW(groups, lr=learner.lr, betas=BETAS, eps=EPS, fused=fused)


def _zero_stage(recipe: Recipe) -> int:
    """Returns the ZeRO stage that is used for a recipe.

    bfloat16 needs float32 master weights, which DeepSpeed keeps from stage 1 on. On one rank, stage 1 is equivalent to stage 0.
    """
    stage: int = recipe.learner.zero_stage
    return max(stage, 1) if recipe.policy.dtype == "bfloat16" else stage


def deepspeed_config(recipe: Recipe, ranks: Ranks, size: int) -> dict[str, Any]:
    """Returns DeepSpeed's settings for a model of `size` parameters."""
    stage, offload = _zero_stage(recipe), recipe.learner.offload
    offloaded = {"device": "cpu", "pin_memory": ranks.device.type == "cuda"}
    bucket = min(size + size % 2, _BUCKET_ELEMENTS)  # DeepSpeed needs an even number
    return {
        # The number of micro-batches varies between steps: backward() accumulates, step() applies, and DeepSpeed does not count them.
        "managed_gradient_accumulation": False,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.learner.max_grad_norm if stage else 0.0,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": stage == 2 and ranks.device.type == "cuda",
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            **({"offload_optimizer": offloaded} if offload != "none" else {}),
            **({"offload_param": offloaded} if offload == "parameters" else {}),
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's optimizer is as fast and needs no compilation at run time
        "bf16": {"enabled": recipe.policy.dtype == "bfloat16"},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def kl_reference_for(engine: PolicyEngine) -> Callable[[MicroBatch], Tensor]:
    """Returns a function that computes the KL reference model's logprobs [N] of a batch's trained tokens, as `PolicyEngine.logprobs` does.

    The KL reference model is version 0. In a run that trains adapters, it is the policy without its adapters, which needs no extra memory,
    and the function is a collective under ZeRO-3. Otherwise, each rank holds the unsharded weights in the engine's folder, and the function
    is a collective only if ranks form teams (`learner.sequence_parallel`).
    """
    if engine.recipe.learner.lora is not None:

        def without_adapters(batch: MicroBatch) -> Tensor:
            with torch.no_grad(), lora.disabled(engine.lm):
                return engine.logprobs(batch)[0]

        return without_adapters
    scorer = TokenScorer(load_model(engine.folder, engine.recipe, engine.ranks.device)).eval().requires_grad_(False)
    return torch.no_grad()(lambda batch: score_tokens(scorer, batch, engine.temperature)[0])
