"""How the learner steps, and when it does not: `learner`, `learner.lora`, `learner.limits`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Needs, Section, resumable

_ON_GPU = Needs("a learner on a GPU (device=cuda or auto)", lambda recipe, own: recipe.device != "cpu")
_DELTAS = Needs("serving.weight_transfer=delta: every version is complete", lambda recipe, own: recipe.serving.weight_transfer == "delta")
_FALLS = Needs("two steps after the warm-up", lambda recipe, own: recipe.steps > own.warmup_steps + 1)

_PLAIN = Needs(
    "policy.dtype=float32: in bfloat16 stage 0 is stage 1, whose optimizer keeps the weights in float32",
    lambda recipe, own: own.zero_stage > 0 or recipe.policy.dtype == "float32",
)


class LoraConfig(Section):
    """Low-rank adapters in place of full training: the base weights stay as they are, and a version is the adapter alone."""

    rank: int = Field(16, ge=1)
    """Rank of each adapted layer's update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the linear layers that are adapted, e.g. `["q_proj", "v_proj"]`; None: every one but the output head."""


class Limit(Section):
    """A bound on one figure of an update, and what happens beyond it."""

    at: float
    """The bound."""
    action: Literal["skip", "rollback", "halt"] = "skip"
    """skip: the optimizer step is not made, its groups are left out. rollback: weights and optimizer return to the newest checkpoint that
    no limit objected to, and the server with them. halt: the run stops (exit code 1); `--resume` makes the step again."""


class LimitsConfig(Section):
    """Bounds on what an update may look like, judged before its gradient is applied. docs/objectives.md gives the formulas."""

    max_kl: Limit | None = None
    """On `kl_behaviour`: the divergence of the policy from the one that sampled, nats per token."""
    max_kl_reference: Limit | None = None
    """On `kl_reference`: the divergence from version 0, nats per token (needs objective.kl=k1, k2 or k3)."""
    min_entropy: Limit | None = None
    """On `entropy`: nats per token."""
    max_clip_fraction: Limit | None = None
    """On `clip_fraction`: the share of tokens whose ratio is clipped."""
    max_ratio: Limit | None = None
    """On `ratio_max`: the largest ratio of the policy to the one that sampled."""
    max_mismatch_kl: Limit | None = None
    """On `mismatch_kl`: server against learner with the same weights, nats per token (needs max_staleness=0)."""
    max_grad_norm: Limit | None = None
    """On `grad_norm`: the gradient's global norm before clipping."""
    min_effective_sample_size: Limit | None = None
    """On `ess`: the effective sample size, as a share of the tokens."""
    max_rollbacks: int = Field(2, ge=1)
    """Rollbacks in the whole run; the next one halts it instead."""

    @property
    def named(self) -> dict[str, Limit]:
        """The limits that are set, by the name of their key."""
        found = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: limit for name, limit in found if isinstance(limit, Limit)}

    @property
    def roll_back(self) -> bool:
        return any(limit.action == "rollback" for limit in self.named.values())

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> LimitsConfig:
        ranges = {"max_ratio": (1.0, math.inf), "max_clip_fraction": (0.0, 1.0), "min_effective_sample_size": (0.0, 1.0)}
        for name, limit in self.named.items():
            low, high = ranges.get(name, (0.0, math.inf))
            if not low < limit.at < high:
                raise ValueError(f"{name}.at must lie between {low:g} and {high:g}; beyond them it does nothing, or stops every update")
        if not self.roll_back and self.max_rollbacks != 2:
            raise ValueError("max_rollbacks does nothing: no limit has action=rollback")
        return self


class LearnerConfig(Section):
    lr: float = Field(5e-4, gt=0)
    """Learning rate of AdamW, at its highest."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _FALLS] = "constant"
    """After the warm-up: stays, or falls to nearly 0 at the last of `steps`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices; vectors do not decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient's global norm is clipped to this."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], _PLAIN] = resumable(2)
    """DeepSpeed ZeRO stage: 1 shards optimizer state over the ranks, 2 also gradients, 3 also weights."""
    ranks: int = resumable(1, ge=1)
    """Learner processes (torchrun --nproc-per-node)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; `{}` takes their defaults. They want a learning rate about ten times higher."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], _ON_GPU] = "none"
    """What lives in the CPU's memory instead of the GPU's. optimizer: master weights, Adam's moments and its step (zero_stage 1 to 3).
    parameters: these and the weights, fetched layer by layer (zero_stage 3)."""
    sequence_parallel: int = resumable(1, ge=1)
    """Ranks that share every sequence (Ulysses), for contexts too long for one. Divides `ranks`, and the model's key heads."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch; above 1 the later ones are off-policy and the ratio clip matters."""
    max_tokens_per_microbatch: int = resumable(16384, ge=16)
    """Tokens in one forward/backward pass on one rank; there is no padding, and a shared token counts once."""
    share_prefixes: bool = True
    """Tokens that samples begin with in common (a group's prompt, the history of turns) are computed once, forward and backward."""
    gradient_checkpointing: bool | None = resumable(None)
    """Recompute layers in the backward pass: less memory, about a third more arithmetic. None: on CUDA only."""
    kernels: Literal["torch", "liger"] = "torch"
    """What computes norms, MLPs and rotary positions. liger: fused GPU kernels of the package liger-kernel, checked at the start."""
    threads: int = resumable(0, ge=0)
    """CPU threads per rank; 0: torch's default."""
    max_bad_updates: int = resumable(3, ge=1)
    """Optimizer steps left out in a row, because something was not finite or a limit said skip, before the run stops."""
    max_bad_groups: int = resumable(16, ge=1)
    """Groups left out in the whole run, because a score, logprob or advantage was not finite, before the run stops."""
    limits: LimitsConfig = resumable(LimitsConfig())
    keep_checkpoints: int = resumable(2, ge=1)
    """Newest checkpoints kept on disk."""
    full_every: Annotated[int, _DELTAS] = resumable(8, ge=2)
    """With serving.weight_transfer=delta: every so many versions one is published whole, and so is one that changed in most bytes."""
    keep_versions: int = resumable(4, ge=2)
    """Newest exported policy versions kept on disk, and as many promoted ones, besides version 0 and the serving one."""
