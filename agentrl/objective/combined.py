"""The loss of a recipe: surrogate, off-policy correction, KL term and entropy bonus, aggregated as `ObjectiveConfig` says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.objective import losses
from agentrl.objective.aggregate import Segments, token_weights
from agentrl.objective.corrections import importance_weights
from agentrl.objective.kl import k3, kl_term
from agentrl.objective.losses import Surrogate
from agentrl.objective.metrics import statistics
from agentrl.recipe import ObjectiveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The sampled tokens of a micro-batch; whole sequences. All tensors are [N]."""

    logprobs: Tensor  # of the policy being trained, at the sampling temperature; carries the gradient
    behaviour: Tensor  # of the policy that sampled the token, at the same temperature
    advantages: Tensor  # constant
    sequence: Tensor  # int64; tokens with the same number are one sequence
    proximal: Tensor | None = None  # of the weights at the start of the step; None: the behaviour policy takes their place
    reference: Tensor | None = None  # of the reference policy, where there is a KL term
    same: Tensor | None = None  # bool: sampled by the weights of the start of the step; None: not known of any token
    entropy: Tensor | None = None  # of the policy being trained, nats; carries a gradient where there is an entropy bonus


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What one call of `policy_loss` gives."""

    loss: Tensor  # [] this micro-batch's share of the loss; differentiable
    sums: Tensor  # [len(metrics.SUM_NAMES)] float64, add over micro-batches and ranks
    maxima: Tensor  # [len(metrics.MAX_NAMES)] float64, maximum over micro-batches and ranks


def policy_loss(tokens: TrainedTokens, objective: ObjectiveConfig, *, denominator: float) -> PolicyLoss:
    """sum_t c_t (-w_t J_t + kl_coef * KL_t - entropy_coef * H_t) / denominator, over the trained tokens of a micro-batch.

    J is the surrogate (`agentrl.objective.losses`) of the ratio r = pi / pi_prox, w the correction for pi_prox / mu
    (`agentrl.objective.corrections`), KL the term of `agentrl.objective.kl`, H the entropy, c and the denominator those of
    `agentrl.objective.aggregate`.

    Without a proximal policy the ratio is taken against the behaviour logprobs themselves and w is 1. That is the right choice when a
    batch makes a single optimizer step: with pi_prox = pi the ratio would be 1 everywhere, and stale tokens would never be clipped.
    With several optimizer steps per batch, pass the logprobs recomputed at the start of the step (the decoupled objective): then the
    clip bounds the change made here, and w corrects for the lag and for the difference in arithmetic between server and learner.

    Raises `ValueError` when the denominator is not positive, or a tensor that the objective needs is missing.
    """
    if not denominator > 0:
        raise ValueError(f"denominator must be positive, got {denominator}")
    dtype = tokens.logprobs.dtype
    segments = Segments.of(tokens.sequence)
    behaviour = tokens.behaviour.to(dtype)
    centre = behaviour if tokens.proximal is None else tokens.proximal.to(dtype).detach()
    gap = tokens.logprobs - centre
    weight, cut = importance_weights(
        centre - behaviour,
        segments,
        correction=objective.correction,
        level=objective.is_level,
        cap=objective.is_cap,
        floor=objective.is_floor,
    )
    surrogate, clipped = _surrogate(gap, tokens.logprobs, tokens.advantages.to(dtype), segments, objective)
    per_token = -(weight * surrogate) + _penalty(tokens, objective)
    loss = (token_weights(objective.aggregation, segments, dtype) * per_token).sum() / denominator
    with torch.no_grad():
        side = segments.mean(gap) if objective.loss == "gspo" else gap  # the logarithm of the ratio that is clipped and capped
        if objective.caps_ratio:
            cut = cut | (side > math.log(objective.is_cap))
        sums, maxima = statistics(
            tokens.logprobs - behaviour,
            clipped=clipped,
            high=side > 0,
            cut=cut,
            entropy=tokens.entropy,
            same=_mismatch(tokens),
            kl_reference=None if tokens.reference is None else k3(tokens.logprobs, tokens.reference.to(dtype)),
            is_cap=objective.is_cap,
        )
    return PolicyLoss(loss=loss, sums=sums, maxima=maxima)


def _surrogate(gap: Tensor, logprobs: Tensor, advantages: Tensor, segments: Segments, objective: ObjectiveConfig) -> Surrogate:
    low, high = objective.clip_low, objective.clip_high
    cap = objective.is_cap if objective.caps_ratio else math.inf
    match objective.loss:
        case "cispo":
            return losses.cispo(gap, logprobs, advantages, low=low, high=high)
        case "gspo":
            return losses.clip(losses.sequence_ratio(gap, segments, cap), advantages, low=low, high=high)
        case "clip" if objective.dual_clip is not None:
            return losses.dual_clip(losses.token_ratio(gap, cap), advantages, low=low, high=high, bound=objective.dual_clip)
        case "clip":
            return losses.clip(losses.token_ratio(gap, cap), advantages, low=low, high=high)


def _mismatch(tokens: TrainedTokens) -> Tensor | None:
    """[N] float64: k3 of KL(server || learner) where both had the same weights, NaN elsewhere.

    The learner's side of it is the proximal policy, which is the weights at the start of the step; without one it is the policy itself,
    and the caller gives `same` only while that has not been changed yet.
    """
    if tokens.same is None:
        return None
    ours = tokens.logprobs if tokens.proximal is None else tokens.proximal
    return k3(tokens.behaviour.double(), ours.detach().double()).masked_fill(~tokens.same, math.nan)


def _penalty(tokens: TrainedTokens, objective: ObjectiveConfig) -> Tensor:
    """The terms besides the surrogate, [N]."""
    total = torch.zeros_like(tokens.logprobs)
    if objective.kl in ("k1", "k2", "k3"):
        if tokens.reference is None:
            raise ValueError(f"objective.kl={objective.kl} needs the reference policy's logprobs")
        total = total + objective.kl_coef * kl_term(objective.kl, tokens.logprobs, tokens.reference.to(total.dtype))
    if objective.entropy_coef:
        if tokens.entropy is None or not (tokens.entropy.requires_grad or not torch.is_grad_enabled()):
            raise ValueError("objective.entropy_coef needs entropies that carry a gradient")
        total = total - objective.entropy_coef * tokens.entropy
    return total
