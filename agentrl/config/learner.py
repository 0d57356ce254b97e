"""Settings for the learner (`learner`, `learner.lora`, and the entries in `learner.limits`)."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from agentrl.config.section import Needs, Section, resumable

_ON_GPU = Needs("a learner on a GPU (device=cuda or auto)", lambda recipe, own: recipe.device != "cpu")
_FALLS = Needs("two steps after the warm-up", lambda recipe, own: recipe.step_limit > own.warmup_steps + 1)

_PLAIN = Needs(
    "policy.dtype=float32: in bfloat16, stage 0 runs as stage 1, whose optimizer keeps the weights in float32",
    lambda recipe, own: own.zero_stage > 0 or recipe.policy.dtype == "float32",
)


class LoraConfig(Section):
    """Trains low-rank adapters for all linear layers except the output head. The base weights do not change, and each published version
    consists of an adapter only."""

    rank: int = Field(16, ge=1)
    """Rank of each layer's update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""


UpdateMetric = Literal["kl_behaviour", "kl_reference", "entropy", "clip_fraction", "ratio_max", "mismatch_kl", "grad_norm", "ess"]
StepMetric = Literal[
    "reward_mean", "tokens_per_s", "step_s", "staleness_max", "loop_latency_s_mean", "swap_stall_ms", "excluded_policy_reachable"
]
_BOUNDS = {"ratio_max": (1.0, math.inf)} | dict.fromkeys(("clip_fraction", "ess", "excluded_policy_reachable"), (0.0, 1.0))
_MINIMA = ("entropy", "ess", "reward_mean", "tokens_per_s")


class Limit(Section):
    """A limit on one metric of a step, and the action if the limit is violated. docs/objectives.md has the formulas for the metrics."""

    metric: Literal[UpdateMetric, StepMetric]
    """Metric of `metrics.jsonl`. kl_reference needs objective.kl=k1, k2 or k3; mismatch_kl needs max_staleness=0. The metrics from
    reward_mean on need action=alert."""
    at: float
    """Minimum for entropy, ess, reward_mean and tokens_per_s; maximum for the other metrics."""
    action: Literal["skip", "rollback", "halt", "alert"] = "skip"
    """skip: no optimizer step; the groups are excluded. rollback: learner and server return to the newest checkpoint that met all limits,
    at most twice in a run. halt: the run stops (exit code 1), and `--resume` repeats the step. alert: the run continues and reports the
    violation."""

    @property
    def is_minimum(self) -> bool:
        """Whether the limit is a minimum, so that values below `at` violate it."""
        return self.metric in _MINIMA

    @model_validator(mode="after")
    def _step_metrics_alert(self) -> Limit:
        if self.metric in get_args(StepMetric) and self.action != "alert":
            raise ValueError(
                f"metric={self.metric} is known only after the update, so action={self.action} is impossible; use action=alert"
            )
        return self

    @model_validator(mode="after")
    def _bound_makes_sense(self) -> Limit:
        if self.metric == "reward_mean":
            return self
        low, high = _BOUNDS.get(self.metric, (0.0, math.inf))
        if not low < self.at < high:
            raise ValueError(
                f"at must be between {low:g} and {high:g} for metric={self.metric}; other values have no effect or reject every update"
            )
        return self


class LearnerConfig(Section):
    """The learner: `learner`."""

    lr: float = Field(5e-4, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    lr_schedule: Annotated[Literal["constant", "inverse_sqrt", "linear", "cosine"], _FALLS] = "constant"
    """Learning rate after the warm-up. inverse_sqrt: proportional to 1 / sqrt(step). linear, cosine: decays to nearly 0 at the last
    step."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices. Vectors do not decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global gradient norm; larger gradients are clipped."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], _PLAIN] = resumable(2)
    """DeepSpeed ZeRO stage. 1 shards optimizer state, 2 also gradients, 3 also weights."""
    ranks: int = resumable(1, ge=1)
    """Learner processes."""
    lora: LoraConfig | None = None
    """Trains low-rank adapters instead of the weights. Use about ten times the usual learning rate. `{}` uses the defaults."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], _ON_GPU] = "none"
    """State in CPU memory. optimizer: optimizer state and optimizer step (zero_stage 1 to 3). parameters: the weights too (zero_stage
    3)."""
    sequence_parallel: int = resumable(1, ge=1)
    """Ranks that share each sequence (Ulysses), for long contexts. Must divide ranks and the model's key heads."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch. Above 1, later steps are off-policy."""
    max_tokens_per_microbatch: int = resumable(16384, ge=16)
    """Tokens per forward/backward pass and rank, without padding. Shared tokens count once."""
    gradient_checkpointing: bool | None = resumable(None)
    """Recomputes layers in the backward pass: less memory, a third more arithmetic. None means on CUDA only."""
    kernels: Literal["torch", "liger"] = "torch"
    """Norms, MLPs and rotary positions. liger: fused GPU kernels (package liger-kernel)."""
    threads: int = resumable(0, ge=0)
    """CPU threads per rank. 0: torch's default."""
    limits: tuple[Limit, ...] = resumable(())
    """Limits on metrics of a step. For each metric, one limit may alert and one may reject the update: `[{"metric": "kl_behaviour", "at":
    0.1}]`."""
    keep_checkpoints: int = resumable(2, ge=1)
    """Newest checkpoints kept on disk."""
    keep_versions: int = resumable(4, ge=2)
    """Newest versions kept on disk, and as many promoted versions, in addition to version 0 and the serving version."""

    @property
    def rolls_back(self) -> bool:
        """Whether any limit has action=rollback."""
        return any(limit.action == "rollback" for limit in self.limits)

    @model_validator(mode="after")
    def _one_limit_per_metric(self) -> LearnerConfig:
        kinds = [(limit.metric, limit.action == "alert") for limit in self.limits]
        if twice := sorted({metric for metric, alerts in kinds if kinds.count((metric, alerts)) > 1}):
            raise ValueError(
                f"limits has several entries with metric={', '.join(twice)}; keep at most one per metric, and one more with action=alert"
            )
        return self
