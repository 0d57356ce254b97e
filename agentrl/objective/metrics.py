"""Metrics of an update: sums and maxima to combine over micro-batches and ranks, and the metrics computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

SUM_NAMES = (
    *("tokens", "ratio", "weight", "weight_squared", "clipped", "clipped_high", "truncated", "kl", "entropy", "mismatch"),
    *("same", "same_kl", "kl_reference"),
)
MAX_NAMES = ("ratio", "inverse_ratio", "mismatch")
LARGEST_WEIGHT = 1e100  # largest importance weight in sums, so that the square of a sum is finite


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
