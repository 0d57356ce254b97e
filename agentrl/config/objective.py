"""Settings for the objective that the learner maximizes (`objective`, `objective.off_policy`, `critic`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from agentrl.config.section import Section
from agentrl.plugins import parts


def _weights(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Validates one weight or a pair of weights; two equal weights become one. Raises a single `ValueError`, because pydantic would report
    one error for each type that the key accepts."""
    try:
        checked = check(value)
    except ValidationError:
        checked = -1.0
    weights = checked if isinstance(checked, tuple) else (checked,)
    if min(weights) < 0:
        raise ValueError("must be a number of at least 0, or a list of two such numbers: [first, last]")
    return checked if len({*weights}) > 1 else weights[0]


@dataclass(frozen=True, slots=True)
class Correction:
    """How `objective.off_policy` handles the difference between the behaviour policy and the proximal policy."""

    recompute: bool | None  # whether the policy at the start of a step is the proximal one; None means only with several optimizer steps
    weights: Literal["truncate", "mask", "second_moment", "none"]
    level: Literal["token", "sequence"] = "token"
    floor: float = 0.0
    cap: float = 2.0


_PRESETS = {  # a mask's bounds are those in arXiv:2510.18855
    "auto": Correction(None, "truncate"),
    "behaviour": Correction(False, "truncate"),
    "truncate": Correction(True, "truncate"),
    "truncate_sequence": Correction(True, "truncate", "sequence"),
    "mask": Correction(True, "mask", "token", 0.5, 5.0),
    "mask_sequence": Correction(True, "mask", "sequence", 0.5, 5.0),
    "second_moment": Correction(True, "second_moment", cap=math.inf),
    "none": Correction(None, "none"),
}


class OffPolicyConfig(Section):
    """How the loss corrects for tokens that were sampled with different weights or arithmetic. docs/objectives.md compares the presets."""

    preset: Literal["auto", "behaviour", "truncate", "truncate_sequence", "mask", "mask_sequence", "second_moment", "none"] = "auto"
    """Denominator of the ratio, and importance weights (docs/objectives.md has the formulas). auto: behaviour, or truncate in batches of
    several optimizer steps."""
    cap: float | None = Field(None, gt=0)
    """Maximum importance weight, and ratio unless loss=cispo. None means 5 with a mask, infinite with second_moment, else 2."""
    floor: float | None = Field(None, ge=0)
    """Minimum importance weight that a mask keeps. None means 0.5."""

    @property
    def correction(self) -> Correction:
        """The correction that `preset` selects, with `cap` and `floor` if they are set."""
        preset = _PRESETS[self.preset]
        cap, floor = preset.cap if self.cap is None else self.cap, preset.floor if self.floor is None else self.floor
        return replace(preset, cap=cap, floor=floor)

    def recomputes(self, optimizer_steps: int) -> bool:
        """Whether the learner computes logprobs under the weights at the start of a batch, before the optimizer steps on the batch."""
        recompute = _PRESETS[self.preset].recompute
        return optimizer_steps > 1 if recompute is None else recompute

    @model_validator(mode="after")
    def _every_key_acts(self) -> OffPolicyConfig:
        correction = self.correction
        if self.cap is not None and correction.weights == "none":
            raise ValueError("cap does nothing with preset=none; remove it or set a different preset")
        if self.floor is not None and correction.weights != "mask":
            raise ValueError(f"floor does nothing with preset={self.preset}; set preset=mask or mask_sequence")
        if correction.floor >= correction.cap:
            raise ValueError(f"floor ({correction.floor:g}) must be below cap ({correction.cap:g}); otherwise the mask drops every token")
        return self


class ObjectiveConfig(Section):
    """The algorithm. docs/objectives.md lists the settings of each published algorithm."""

    advantage: parts.Advantage = parts.Part("grpo")
    """Baseline for a score. grpo: mean of the group. rloo: mean of the other attempts. reinforce++: mean of the batch.
    reinforce++-baseline: mean of the group, scaled over the batch. gae: values of a critic (PPO)."""
    credit: Literal["episode", "branches", "roles", "verifier", "counterfactual", "siblings"] = "episode"
    """Advantage of each trajectory if an episode has several (docs/objectives.md)."""
    normalize_std: bool | None = None
    """Divides by the standard deviation of the group (grpo, rloo) or the batch (reinforce++, gae). None means true, except for rloo."""
    turn_coef: float = Field(0.0, ge=0)
    """Weight of turn-level advantages, from `Score.turn_rewards`."""
    loss: parts.Loss = parts.Part("clip")
    """clip: PPO, ratio per token. gspo: ratio per sequence. cispo: clipped weight, full gradient."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Distance below 1 at which the importance ratio is clipped. 1 disables it."""
    clip_high: float = Field(0.2, gt=0)
    """Distance above 1 at which the importance ratio is clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token with a negative advantage is clipped (loss=clip)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: equal weight per token. sequence_mean: equal weight per rollout. constant: sum / (rollouts * policy.max_model_len)."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    kl: Literal["none", "k1", "k2", "k3", "k1_reward"] = "none"
    """Estimator of the KL divergence from version 0. k1, k2, k3: in the loss. k1_reward: subtracted from the episode's score."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence."""
    entropy_coef: Annotated[float | tuple[float, float], WrapValidator(_weights)] = 0.0
    """Weight of the entropy bonus in the loss, at least 0. `[first, last]`: changes linearly from the first step to the last."""

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by the standard deviation of their group or batch."""
        return self.advantage.ref != "rloo" if self.normalize_std is None else self.normalize_std

    def entropy_weight(self, progress: float) -> float:
        """Returns the weight of the entropy bonus at `progress`, the completed share of the run, which is 0 in the first step and 1 in the
        last."""
        if not isinstance(self.entropy_coef, tuple):
            return self.entropy_coef
        first, last = self.entropy_coef
        return first + (last - first) * min(max(progress, 0.0), 1.0)

    @property
    def ratio_cap(self) -> float:
        """Maximum importance ratio that has a gradient; infinite if there is no maximum, as with loss=cispo or preset=none."""
        correction = self.off_policy.correction
        return math.inf if self.loss.ref == "cispo" or correction.weights == "none" else correction.cap

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
        if self.dual_clip is not None and self.dual_clip >= self.ratio_cap:
            raise ValueError(
                f"dual_clip does nothing at or above off_policy.cap={self.ratio_cap:g}, because the ratio is truncated first; raise"
                " off_policy.cap, or set off_policy.preset=none"
            )
        if 1.0 + self.clip_high >= self.ratio_cap:
            raise ValueError(
                f"clip_high does nothing when 1 + clip_high reaches off_policy.cap={self.ratio_cap:g}: the ratio is truncated first; raise"
                " off_policy.cap"
            )
        if (self.kl == "none") != (self.kl_coef == 0):
            raise ValueError("kl and kl_coef go together: set kl to an estimator and kl_coef above 0, or neither")
        return self


class CriticConfig(Section):
    """The value model for `objective.advantage=gae`, which runs in the learner's processes. docs/objectives.md compares the trunks."""

    trunk: Literal["separate", "shared", "detached"] = "separate"
    """separate: a second model, initialised from the policy. shared: a value head on the policy. detached: the same, but the value loss
    has no gradient below the head."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate of AdamW (with a value head: of the head). The learner's other optimizer settings apply."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token. Tool output is not discounted."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch (trunk=separate)."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass and learner minibatch (trunk=separate)."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic learns (with a value head: only the head)."""

    @property
    def shared(self) -> bool:
        """Whether the critic is a value head on the policy's trunk."""
        return self.trunk != "separate"

    @model_validator(mode="after")
    def _every_key_acts(self) -> CriticConfig:
        if self.shared and (self.epochs, self.minibatches) != (1, 1):
            raise ValueError(
                f"epochs and minibatches do nothing with trunk={self.trunk}: the value loss is part of the policy's optimizer steps;"
                " set learner.minibatches"
            )
        return self
