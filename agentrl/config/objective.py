"""Settings of the objective that the learner maximizes: `objective`, `critic`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Needs, Section
from agentrl.plugins import parts

_STALE = Needs(
    "tokens of older versions: max_staleness above 0, and steps above 1", lambda recipe, own: recipe.max_staleness and recipe.steps > 1
)
_GROUPED = Needs(
    "advantages that are known when a batch is assembled: a critic computes them later", lambda recipe, own: recipe.critic is None
)
_MOVES = Needs(
    "several optimizer steps in a batch: epochs, minibatches or learner.minibatches above 1",
    lambda recipe, own: max(own.epochs, own.minibatches, recipe.learner.minibatches) > 1,
)


class ObjectiveConfig(Section):
    """The algorithm. docs/objectives.md lists the settings of each published algorithm."""

    advantage: parts.Advantage = parts.Part("grpo")
    """Baseline of a score. grpo: mean of the group. rloo: mean of the others. reinforce++: mean of the batch. reinforce++-baseline: mean of
    the group, scaled over the batch. gae: values of a critic (PPO)."""
    credit: Literal["episode", "branches", "roles", "verifier", "counterfactual", "siblings"] = "episode"
    """Advantage of each trajectory if an episode has several (docs/objectives.md)."""
    normalize_std: bool | None = None
    """Divides by the standard deviation of the group (grpo, rloo) or the batch (reinforce++, gae). None: true, except for rloo."""
    turn_coef: float = Field(0.0, ge=0)
    """Weight of turn-level advantages, from `Score.turn_rewards`."""
    loss: parts.Loss = parts.Part("clip")
    """clip: PPO, ratio per token. gspo: ratio per sequence. cispo: clipped weight, full gradient."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Distance below 1 at which the importance ratio is clipped. 1: never from below."""
    clip_high: float = Field(0.2, gt=0)
    """Distance above 1 at which the importance ratio is clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token with a negative advantage is clipped (loss=clip)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: equal weight per token. sequence_mean: equal weight per rollout. constant: sum / (rollouts * constant_length)."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens per rollout in the denominator of aggregation=constant. None: policy.max_model_len."""
    proximal: Literal["auto", "behaviour", "recompute"] = "auto"
    """Denominator of the ratio. behaviour: logprobs at sampling. recompute: those of the weights at the start of the step. auto: recompute
    if learner.minibatches is above 1."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weights from behaviour policy to proximal policy. truncate: capped. mask: 0 outside [is_floor, is_cap]. none: 1."""
    is_level: Literal["token", "sequence"] = "token"
    """Whether these weights are ratios per token or per sequence."""
    is_cap: float = Field(2.0, gt=0)
    """Maximum of these weights, and of the ratio unless loss=cispo or correction=none."""
    is_floor: float = Field(0.0, ge=0)
    """Smallest weight that correction=mask keeps."""
    staleness_decay: Annotated[float, _GROUPED, _STALE] = Field(1.0, gt=0, le=1)
    """Factor on a token's advantage per version that it lags behind the learner."""
    kl: Literal["none", "k1", "k2", "k3", "k1_reward"] = "none"
    """Estimator of the KL divergence from version 0. k1, k2, k3: in the loss. k1_reward: subtracted from the episode's score."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss."""

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by the standard deviation of their group."""
        return self.advantage.ref != "rloo" if self.normalize_std is None else self.normalize_std

    @property
    def caps_ratio(self) -> bool:
        """Whether the ratio that carries the gradient is truncated at `is_cap`, in addition to the correction weights."""
        return self.loss.ref != "cispo" and self.correction != "none"

    def recomputes(self, minibatches: int) -> bool:
        """Whether the proximal policy's logprobs are computed at the start of a step."""
        return self.proximal == "recompute" or (self.proximal == "auto" and minibatches > 1)

    @model_validator(mode="after")
    def _every_key_acts(self) -> ObjectiveConfig:
        if self.credit != "episode" and self.advantage.ref == "gae":
            raise ValueError(f"credit={self.credit} does nothing with advantage=gae: its critic credits every token; set credit=episode")
        if self.credit not in ("episode", "branches") and self.advantage.ref not in ("grpo", "rloo"):
            raise ValueError(f"credit={self.credit} needs the baselines of a group: set advantage=grpo or rloo")
        if self.normalize_std is not None and self.advantage.ref not in parts.ADVANTAGE.shipped and not self.turn_coef:
            raise ValueError(
                "normalize_std does nothing with a user-supplied estimator, which does its own scaling: remove it, or pass it in"
                " advantage.options"
            )
        if self.dual_clip is not None and self.loss.ref != "clip":
            raise ValueError(f"dual_clip does nothing with loss={self.loss}; leave it at None or set loss=clip")
        if self.caps_ratio and self.dual_clip is not None and self.dual_clip >= self.is_cap:
            raise ValueError(
                "dual_clip does nothing at or above is_cap, because the ratio is truncated first; raise is_cap or set correction=none"
            )
        if self.caps_ratio and 1.0 + self.clip_high >= self.is_cap:
            raise ValueError("clip_high does nothing when 1 + clip_high reaches is_cap: the ratio is truncated first; raise is_cap")
        if self.constant_length is not None and self.aggregation != "constant":
            raise ValueError(f"constant_length does nothing with aggregation={self.aggregation}; set aggregation=constant")
        if self.correction == "none" and (self.is_level == "sequence" or self.is_cap != 2.0):
            raise ValueError("is_level and is_cap do nothing with correction=none; leave them at their defaults")
        if self.is_floor and self.correction != "mask":
            raise ValueError(f"is_floor does nothing with correction={self.correction}; set correction=mask")
        if self.is_floor >= self.is_cap:
            raise ValueError("is_floor must be below is_cap; otherwise correction=mask drops every weight")
        if (self.kl == "none") != (self.kl_coef == 0):
            raise ValueError("kl and kl_coef go together: set kl to an estimator and kl_coef above 0, or neither")
        return self


class CriticConfig(Section):
    """The value model of `objective.advantage=gae`, in the learner's processes. docs/objectives.md compares the trunks."""

    trunk: Literal["separate", "shared"] = "separate"
    """separate: another model, initialised from the policy. shared: a value head on the policy."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate of AdamW (trunk=shared: of the head). Other optimizer settings are those of the learner."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token. Tool output is not discounted."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE."""
    value_clip: Annotated[float | None, _MOVES] = Field(0.2, gt=0)
    """Change of a value per step beyond which the value loss is clipped. None disables it."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch (trunk=separate)."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass and learner minibatch (trunk=separate)."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic learns (trunk=shared: only its head)."""
    vf_coef: float = Field(0.1, gt=0)
    """Weight of the value loss (trunk=shared)."""
    detach: bool = False
    """Stops the gradient of the value loss at the head (trunk=shared)."""

    @property
    def shared(self) -> bool:
        """Whether the critic shares the trunk of the policy."""
        return self.trunk == "shared"

    @model_validator(mode="after")
    def _every_key_acts(self) -> CriticConfig:
        if self.shared and (self.epochs, self.minibatches) != (1, 1):
            raise ValueError(
                "epochs and minibatches do nothing with trunk=shared: its value loss is part of the policy's optimizer steps;"
                " set learner.minibatches"
            )
        if not self.shared and (self.detach or self.vf_coef != 0.1):
            raise ValueError("detach and vf_coef do nothing with trunk=separate: that critic has a separate optimizer; remove them")
        return self
