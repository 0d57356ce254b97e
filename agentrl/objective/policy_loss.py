"""The loss that a recipe defines: surrogate, off-policy correction, KL term and entropy bonus, aggregated. Also its metrics: sums and
maxima to combine over micro-batches and ranks, and the values that are computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from agentrl.config.recipe import ObjectiveConfig
from agentrl.objective import losses
from agentrl.objective.losses import Segments, importance_weights, k3, kl_term, token_weights
from agentrl.plugins import parts
from agentrl.protocols import Loss

SUM_NAMES = (
    *("tokens", "ratio", "weight", "weight_squared", "clipped", "clipped_high", "truncated", "kl", "entropy", "mismatch"),
    *("same", "same_kl", "kl_reference"),
)
MAX_NAMES = ("ratio", "inverse_ratio", "mismatch")
LARGEST_WEIGHT = 1e100  # largest importance weight in sums, so that the square of a sum is finite


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The sampled tokens of a micro-batch, in complete sequences. All tensors are [N]."""

    logprobs: Tensor  # logprobs of the trained policy, at the sampling temperature and over the sampled support; has a gradient
    behaviour: Tensor  # logprobs of the behaviour policy
    advantages: Tensor
    sequence: Tensor  # int64; tokens with the same number are one sequence
    proximal: Tensor | None = None  # logprobs of the weights at the start of the step; None uses the behaviour policy's
    kl_reference: Tensor | None = None  # logprobs of the KL reference model, if there is a KL term
    on_policy: Tensor | None = None  # bool: sampled by the weights at the start of the step; None means unknown
    entropy: Tensor | None = None  # entropy of the trained policy in nats; has a gradient if there is an entropy bonus
    rollout_tokens: Tensor | None = None  # number of trained tokens in the token's rollout; None means that every sequence is a rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The result of `policy_loss`."""

    loss: Tensor  # [] this micro-batch's share of the loss; differentiable
    sums: Tensor  # [len(SUM_NAMES)] float64, to add over micro-batches and ranks
    maxima: Tensor  # [len(MAX_NAMES)] float64, to maximize over micro-batches and ranks
    clipped: Tensor  # [N] bool: where the surrogate's bound is active
    weight: Tensor  # [N] w, without gradient


def policy_loss(
    tokens: TrainedTokens,
    objective: ObjectiveConfig,
    *,
    denominator: float,
    surrogate: Loss | None = None,
    reach: float = math.inf,
    progress: float = 0.0,
) -> PolicyLoss:
    """Returns sum_t c_t (-w_t J_t + kl_coef * KL_t - entropy_coef * H_t) / denominator over the trained tokens of a micro-batch.

    J is the surrogate of the ratio r = pi / pi_prox, w the correction for pi_prox / mu, KL the KL term (`agentrl.objective.losses`) and
    H the entropy. c and the denominator are those of `agentrl.objective.losses`.

    If there is no proximal policy, the ratio is pi / mu and w is 1. Using pi / mu is correct for a single optimizer step per batch: with
    pi_prox = pi, the ratio would be 1 everywhere, and stale tokens would never be clipped. If a batch has several optimizer steps, pass the
    logprobs from the start of the step (the decoupled objective): the clip then bounds the change of this step, and w corrects for
    staleness and for numerical differences between server and learner.

    `surrogate`: the result of `load_loss(objective)`; None loads the loss. `reach`: the threshold of the second-moment mask, computed over
    the whole batch. `progress` is the argument of `ObjectiveConfig.entropy_weight`.

    Raises `ValueError` if the denominator is not positive, or if a required tensor is missing or lacks a gradient, and `PluginError` if the
    loss cannot be loaded or returns a wrong shape or type. Exceptions of a user-supplied loss are not converted.
    """
    if not denominator > 0:
        raise ValueError(f"denominator must be positive, got {denominator}")
    dtype = tokens.logprobs.dtype
    segments = Segments.of(tokens.sequence)
    behaviour = tokens.behaviour.to(dtype)
    centre = behaviour if tokens.proximal is None else tokens.proximal.to(dtype).detach()
    gap = tokens.logprobs - centre
    correction = objective.off_policy.correction
    weight, cut = importance_weights(centre - behaviour, segments, correction, reach=reach)
    arguments = losses.LossInput.from_config(
        objective, log_ratio=gap, logprobs=tokens.logprobs, advantages=tokens.advantages.to(dtype), sequence=tokens.sequence
    )
    gain, clipped = losses.check_surrogate((surrogate or load_loss(objective))(arguments), arguments, objective.loss.ref)
    per_token = -(weight * gain) + _penalty(tokens, objective, objective.entropy_weight(progress))
    counts = token_weights(objective.aggregation, segments, dtype, rollout_tokens=tokens.rollout_tokens)
    loss = (counts * per_token).sum() / denominator
    with torch.no_grad():
        side = segments.mean(gap) if objective.loss.ref == "gspo" else gap  # log of the ratio that is clipped and capped
        cut = cut | (side > math.log(objective.ratio_cap))
        sums, maxima = token_statistics(
            tokens.logprobs - behaviour,
            clipped=clipped,
            high=side > 0,
            cut=cut,
            entropy=tokens.entropy,
            same=_mismatch(tokens),
            kl_reference=None if tokens.kl_reference is None else k3(tokens.logprobs, tokens.kl_reference.to(dtype)),
            weight=weight * side.double().exp().clamp(max=min(objective.ratio_cap, LARGEST_WEIGHT)),
        )
    return PolicyLoss(loss=loss, sums=sums, maxima=maxima, clipped=clipped, weight=weight.detach())


def load_loss(objective: ObjectiveConfig) -> Loss:
    """Returns the loss that a recipe selects. Raises `PluginError` if the loss cannot be resolved or does not implement the protocol."""
    loss: Loss = parts.load_part(parts.LOSS, objective.loss)
    return loss


def _mismatch(tokens: TrainedTokens) -> Tensor | None:
    """Returns k3 of KL(server || learner), float64 [N]; NaN for tokens that server and learner computed with different weights.

    The learner's logprobs are those of the proximal policy. If there is no proximal policy, they are those of the policy, and the caller
    sets `on_policy` only while the policy is unchanged.
    """
    if tokens.on_policy is None:
        return None
    ours = tokens.logprobs if tokens.proximal is None else tokens.proximal
    return k3(tokens.behaviour.double(), ours.detach().double()).masked_fill(~tokens.on_policy, math.nan)


def _penalty(tokens: TrainedTokens, objective: ObjectiveConfig, entropy_coef: float) -> Tensor:
    """Returns the KL and entropy terms, [N]."""
    total = torch.zeros_like(tokens.logprobs)
    if objective.kl in ("k1", "k2", "k3"):
        if tokens.kl_reference is None:
            raise ValueError(f"objective.kl={objective.kl} needs the logprobs of the KL reference model")
        total = total + objective.kl_coef * kl_term(objective.kl, tokens.logprobs, tokens.kl_reference.to(total.dtype))
    if entropy_coef:
        if tokens.entropy is None or not (tokens.entropy.requires_grad or not torch.is_grad_enabled()):
            raise ValueError("objective.entropy_coef needs entropies with a gradient")
        total = total - entropy_coef * tokens.entropy
    return total


def token_statistics(
    log_ratio: Tensor,
    *,
    clipped: Tensor,
    high: Tensor,
    cut: Tensor,
    entropy: Tensor | None,
    same: Tensor | None,
    kl_reference: Tensor | None,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the float64 sums [len(SUM_NAMES)] and maxima [len(MAX_NAMES)] over N tokens.

    Args:
        log_ratio: log pi - log mu.
        clipped: tokens where the surrogate's bound is active; `high`: tokens whose ratio is above 1.
        cut: tokens whose importance weight was truncated or masked.
        weight: importance weight of each token: the correction's weight times the ratio, before the clip.
        same: [N] float64, k3 of KL(mu || pi) for the tokens that pi's weights sampled, NaN for the others; None means unknown for all.
        kl_reference: [N] k3 of KL(pi || pi_ref); None if there is no KL reference model.
    """
    log_ratio = log_ratio.detach().double()
    ratio = log_ratio.exp()
    weight = weight.double().clamp(max=LARGEST_WEIGHT)
    mismatch = log_ratio.abs()
    zero = ratio.new_zeros(())
    sums = torch.stack(
        (
            zero + ratio.numel(),
            ratio.sum(),
            weight.sum(),
            weight.square().sum(),
            clipped.sum().double(),
            (clipped & high).sum().double(),
            cut.sum().double(),
            (ratio - 1.0 - log_ratio).sum(),
            zero if entropy is None else entropy.detach().double().sum(),
            mismatch.sum(),
            zero if same is None else zero + (~same.isnan()).sum(),
            zero if same is None else same.nansum(),
            zero if kl_reference is None else kl_reference.detach().double().sum(),
        )
    )
    none = ratio.numel() == 0
    maxima = ratio.new_zeros(len(MAX_NAMES)) if none else torch.stack((ratio.max(), (-log_ratio).exp().max(), mismatch.max()))
    return sums, maxima


def summarize(sums: Tensor, maxima: Tensor, *, with_reference: bool = False) -> dict[str, float]:
    """Computes metrics from the combined `PolicyLoss.sums` and `.maxima`; empty if no token was trained.

    Over the n trained tokens of an optimizer step on all ranks, with mu the behaviour policy, r = pi / mu, and logs in nats:

        kl_behaviour            mean of r - 1 - log r, which is k3 of KL(mu || pi)
        kl_reference            mean of k3 of KL(pi || pi_ref), if there is a KL reference model
        mismatch_kl             mean of r - 1 - log r over the tokens that these weights sampled: server against learner. Absent if there
                                are no such tokens, and after the batch's first step if there is no proximal policy
        mismatch_tokens         share of the tokens that mismatch_kl is computed over
        mismatch_mean, _max     |log r|
        ratio_mean, _min, _max  r
        clip_fraction           share of tokens where the surrogate's bound is active; _low: ratios below 1, _high: above
        truncated_fraction      share of tokens whose importance weight was truncated or masked
        ess                     (sum w)^2 / (n sum w^2), with w the importance weight of a token after truncation and masking, before the
                                clip: effective sample size as a share of the tokens
        entropy                 mean entropy of pi
    """
    total = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    peak = dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    n = total["tokens"]
    if n == 0:
        return {}
    optional = {"kl_reference": total["kl_reference"] / n} if with_reference else {}
    if total["same"]:
        optional["mismatch_kl"] = total["same_kl"] / total["same"]
    return optional | {
        "mismatch_tokens": total["same"] / n,
        "ratio_mean": total["ratio"] / n,
        "ratio_max": peak["ratio"],
        "ratio_min": 1.0 / peak["inverse_ratio"] if peak["inverse_ratio"] else math.inf,
        "clip_fraction": total["clipped"] / n,
        "clip_fraction_low": (total["clipped"] - total["clipped_high"]) / n,
        "clip_fraction_high": total["clipped_high"] / n,
        "truncated_fraction": total["truncated"] / n,
        "kl_behaviour": total["kl"] / n,
        "entropy": total["entropy"] / n,
        "ess": total["weight"] ** 2 / (n * total["weight_squared"]) if total["weight_squared"] > 0 else 0.0,
        "mismatch_mean": total["mismatch"] / n,
        "mismatch_max": peak["mismatch"],
    }


def combine_steps(steps: Sequence[Mapping[str, float]], tokens: Sequence[int]) -> dict[str, float]:
    """Combines the metrics of a batch's optimizer steps: means weighted by the steps' `tokens`, maxima of `_max`, minima of `_min`.

    Ignores non-finite values. A metric that has no finite value is omitted.
    """
    combined: dict[str, float] = {}
    for name in sorted({name for step in steps for name in step}):
        pairs = [(step[name], n) for step, n in zip(steps, tokens, strict=True) if math.isfinite(step.get(name, math.nan))]
        if not pairs:
            continue
        values, weights = zip(*pairs, strict=True)
        if name.endswith(("_max", "_min")):
            combined[name] = max(values) if name.endswith("_max") else min(values)
        else:
            combined[name] = fmean(values, weights)
    return combined
