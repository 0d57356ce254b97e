"""Settings of the learner: `learner`, `learner.lora`, `learner.limits`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Needs, Section, resumable

_ON_GPU = Needs("a learner on a GPU (device=cuda or auto)", lambda recipe, own: recipe.device != "cpu")
_DELTAS = Needs(
    "serving.weight_transfer=delta: every version is complete", lambda recipe, own: recipe.serving.weight_transfer.ref == "delta"
)
_FALLS = Needs("two steps after the warm-up", lambda recipe, own: recipe.steps > own.warmup_steps + 1)

_PLAIN = Needs(
    "policy.dtype=float32: in bfloat16 stage 0 is stage 1, whose optimizer keeps the weights in float32",
    lambda recipe, own: own.zero_stage > 0 or recipe.policy.dtype == "float32",
)


class LoraConfig(Section):
    """Trains low-rank adapters: the base weights do not change, and a version contains only the adapter."""

    rank: int = Field(16, ge=1)
    """Rank of each layer's update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | None = Field(None, min_length=1)
    """Linear layers to adapt, such as `["q_proj", "v_proj"]`. None: all except the output head."""


class Limit(Section):
    """A limit on one metric of an update, and the action if it is exceeded."""

    at: float
    """The bound."""
    action: Literal["skip", "rollback", "halt"] = "skip"
    """skip: no optimizer step; its groups are excluded. rollback: learner and server return to the newest checkpoint that met all limits.
    halt: the run stops (exit code 1), and `--resume` repeats the step."""


class LimitsConfig(Section):
    """Limits on the metrics of an update, checked before its gradient is applied. docs/objectives.md has the formulas."""

    max_kl: Limit | None = None
    """Limit on `kl_behaviour`, nats per token."""
    max_kl_reference: Limit | None = None
    """Limit on `kl_reference`, nats per token. Needs objective.kl=k1, k2 or k3."""
    min_entropy: Limit | None = None
    """Limit on `entropy`, nats per token."""
    max_clip_fraction: Limit | None = None
    """Limit on `clip_fraction`, share of tokens."""
    max_ratio: Limit | None = None
    """Limit on `ratio_max`."""
    max_mismatch_kl: Limit | None = None
    """Limit on `mismatch_kl`, nats per token. Needs max_staleness=0."""
    max_grad_norm: Limit | None = None
    """Limit on `grad_norm`, before clipping."""
    min_effective_sample_size: Limit | None = None
    """Limit on `ess`, share of tokens."""
    max_rollbacks: int = Field(2, ge=1)
    """Rollbacks over the run. The next one halts it."""

    @property
    def named(self) -> dict[str, Limit]:
        """The limits that are set, by key."""
        values = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: limit for name, limit in values if isinstance(limit, Limit)}

    @property
    def roll_back(self) -> bool:
        """Whether any limit has action=rollback."""
        return any(limit.action == "rollback" for limit in self.named.values())

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> LimitsConfig:
        ranges = {"max_ratio": (1.0, math.inf), "max_clip_fraction": (0.0, 1.0), "min_effective_sample_size": (0.0, 1.0)}
        for name, limit in self.named.items():
            low, high = ranges.get(name, (0.0, math.inf))
            if not low < limit.at < high:
                raise ValueError(f"{name}.at must be between {low:g} and {high:g}; outside it has no effect or stops every update")
        if not self.roll_back and self.max_rollbacks != 2:
            raise ValueError("max_rollbacks does nothing: no limit has action=rollback; remove it")
        return self


class LearnerConfig(Section):
    """The learner: `learner`."""

    lr: float = Field(5e-4, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _FALLS] = "constant"
    """After the warm-up: constant, or decay to nearly 0 at the last step."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices. Vectors do not decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global gradient norm; larger gradients are clipped."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], _PLAIN] = resumable(2)
    """DeepSpeed ZeRO stage. 1 shards optimizer state, 2 also gradients, 3 also weights."""
    ranks: int = resumable(1, ge=1)
    """Learner processes."""
    lora: LoraConfig | None = None
    """Trains low-rank adapters instead of the weights. Use a learning rate about ten times higher. `{}` uses the defaults."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], _ON_GPU] = "none"
    """State in CPU memory. optimizer: optimizer state and its step (zero_stage 1 to 3). parameters: the weights too (zero_stage 3)."""
    sequence_parallel: int = resumable(1, ge=1)
    """Ranks that share each sequence (Ulysses), for long contexts. Must divide ranks and the model's key heads."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch. Above 1, the later ones are off-policy."""
    max_tokens_per_microbatch: int = resumable(16384, ge=16)
    """Tokens per forward/backward pass and rank, without padding. A shared token counts once."""
    gradient_checkpointing: bool | None = resumable(None)
    """Recomputes layers in the backward pass: less memory, about a third more arithmetic. None: on CUDA only."""
    kernels: Literal["torch", "liger"] = "torch"
    """Norms, MLPs and rotary positions. liger: fused GPU kernels (package liger-kernel)."""
    threads: int = resumable(0, ge=0)
    """CPU threads per rank. 0: torch's default."""
    max_bad_updates: int = resumable(3, ge=1)
    """Optimizer steps skipped in a row (not finite, or action=skip) before the run stops."""
    max_bad_groups: int = resumable(16, ge=1)
    """Groups excluded over the run (score, logprob or advantage not finite) before it stops."""
    limits: LimitsConfig = resumable(LimitsConfig())
    keep_checkpoints: int = resumable(2, ge=1)
    """Newest checkpoints kept on disk."""
    full_every: Annotated[int, _DELTAS] = resumable(8, ge=2)
    """With serving.weight_transfer=delta, every n-th version is complete, as is one in which most bytes changed."""
    keep_versions: int = resumable(4, ge=2)
    """Newest versions kept on disk, and as many promoted ones, in addition to version 0 and the serving one."""
