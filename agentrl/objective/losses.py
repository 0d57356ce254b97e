"""The policy-gradient loss: clipped importance ratio with truncated importance sampling, over explicit tensors.

Every tensor argument has the same shape, `[N]` or `[B, T]`; masked positions contribute nothing, not even a NaN. Sums are returned
rather than means, so that micro-batches and ranks add up to exactly what one big batch gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SUM_NAMES = ("tokens", "ratio", "weight", "weight_squared", "clipped", "truncated", "kl", "entropy", "mismatch")
MAX_NAMES = ("ratio", "mismatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What one call of `policy_loss` gives."""

    loss: Tensor  # [] sum over trained tokens / denominator; differentiable
    sums: Tensor  # [len(SUM_NAMES)] float64, add over micro-batches and ranks
    maxima: Tensor  # [len(MAX_NAMES)] float64, maximum over micro-batches and ranks


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    clip_low: float,
    clip_high: float,
    is_cap: float,
    proximal: Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """Sum over trained tokens of the clipped surrogate, divided by the global `denominator`.

    With pi the policy being trained, mu the behaviour policy that sampled the token, and pi_prox the proximal policy (the weights
    at the start of the step) around which the ratio is clipped:

        w = min(pi_prox / mu, is_cap)                                   constant; truncated importance sampling
        r = min(pi / pi_prox, is_cap)                                   truncated in value, its gradient scaled with it
        loss = -sum_t w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / denominator

    `proximal=None` means pi_prox = mu: the ratio is taken against the behaviour logprobs themselves and w is 1. That is the right
    choice when a batch makes a single optimizer step: with pi_prox = pi the ratio would be 1 everywhere, and stale tokens would
    never be clipped. With several optimizer steps per batch, pass the logprobs recomputed at the start of the step (the decoupled
    objective): then the clip bounds the change made here, and w corrects for the lag and for the difference in arithmetic
    between server and learner.

    The cap on r acts where the clip does not: a token with negative advantage whose ratio has grown. Its gradient keeps its
    direction with a weight of at most `is_cap` (and where advantages are positive the clip is reached first).

    Sources: clipped surrogate, Schulman et al. 2017 (arXiv:1707.06347); asymmetric clip, Yu et al. 2025 (arXiv:2503.14476);
    decoupled proximal policy, Hilton et al. 2022 (arXiv:2110.00641); truncated importance weights, Ionides 2008 and Espeholt
    et al. 2018 (arXiv:1802.01561); the k3 estimator of the KL divergence, Schulman 2020 (joschu.net/blog/kl-approx.html).

    Args:
        logprobs: of the policy being trained, at the sampling temperature; carries the gradient.
        behaviour: of the policy that sampled the token, at the same temperature.
        advantages: constant.
        mask: True where the token was sampled by the policy.
        denominator: trained tokens of the whole optimizer step, over all micro-batches and ranks; positive.
        entropy: of the policy at each position, for the metrics only.
    """
    if denominator <= 0:
        raise ValueError(f"denominator must be positive, got {denominator}")
    keep = mask.bool()
    current = logprobs[keep]
    sampled = behaviour[keep].to(current.dtype)
    weighted = advantages[keep].to(current.dtype)
    centre = sampled if proximal is None else proximal[keep].to(current.dtype).detach()
    correction = (centre - sampled).exp()
    weight = correction.clamp(max=is_cap)
    ratio = _truncated_ratio(current - centre, is_cap)
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * weighted, clipped_ratio * weighted)
    loss = -(weight * surrogate).sum() / denominator
    with torch.no_grad():
        binding = clipped_ratio * weighted < ratio * weighted
        truncated = (correction > is_cap) | (current - centre > math.log(is_cap))
        spread = None if entropy is None else entropy[keep]
        sums, maxima = _statistics(current.detach(), sampled, binding, truncated, spread, is_cap)
    return PolicyLoss(loss=loss, sums=sums, maxima=maxima)


def summarize(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """Metrics from the added-up `PolicyLoss.sums` and `.maxima`; empty when no token was trained.

    `ess` is the effective sample size of the truncated weights w = min(pi / mu, is_cap) as a share of the tokens, (sum w)^2 / (n sum w^2).
    `kl_behaviour` is k3 of KL(mu || pi), in nats. `mismatch_*` is |log pi - log mu|, in nats.
    """
    total = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    peak = dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    n = total["tokens"]
    if n == 0:
        return {}
    return {
        "ratio_mean": total["ratio"] / n,
        "ratio_max": peak["ratio"],
        "clip_fraction": total["clipped"] / n,
        "truncated_fraction": total["truncated"] / n,
        "kl_behaviour": total["kl"] / n,
        "entropy": total["entropy"] / n,
        "ess": total["weight"] ** 2 / (n * total["weight_squared"]) if total["weight_squared"] > 0 else 0.0,
        "mismatch_mean": total["mismatch"] / n,
        "mismatch_max": peak["mismatch"],
    }


def _truncated_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """min(exp(log_ratio), cap), with derivative equal to its own value also where it is truncated."""
    value = log_ratio.detach().exp().clamp(max=cap)
    return value * (log_ratio - log_ratio.detach()).exp()


def _statistics(
    current: Tensor, sampled: Tensor, binding: Tensor, truncated: Tensor, entropy: Tensor | None, is_cap: float
) -> tuple[Tensor, Tensor]:
    log_ratio = (current - sampled).double()
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=is_cap)
    mismatch = log_ratio.abs()
    zero = ratio.new_zeros(())
    sums = torch.stack(
        (
            zero + ratio.numel(),
            ratio.sum(),
            weight.sum(),
            weight.square().sum(),
            binding.sum().double(),
            truncated.sum().double(),
            (ratio - 1.0 - log_ratio).sum(),
            zero if entropy is None else entropy.double().sum(),
            mismatch.sum(),
        )
    )
    none = ratio.numel() == 0
    maxima = torch.stack((zero, zero)) if none else torch.stack((ratio.max(), mismatch.max()))
    return sums, maxima
