"""What an update says about itself: sums and maxima that add up over micro-batches and ranks, and the figures made of them."""

from __future__ import annotations

import torch
from torch import Tensor

SUM_NAMES = ("tokens", "ratio", "weight", "weight_squared", "clipped", "truncated", "kl", "entropy", "mismatch", "kl_reference")
MAX_NAMES = ("ratio", "mismatch")


def statistics(
    log_ratio: Tensor, *, clipped: Tensor, cut: Tensor, entropy: Tensor | None, kl_reference: Tensor | None, is_cap: float
) -> tuple[Tensor, Tensor]:
    """Sums [len(SUM_NAMES)] and maxima [len(MAX_NAMES)], float64, of [N] tokens; `log_ratio` is log pi - log mu."""
    log_ratio = log_ratio.detach().double()
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
            clipped.sum().double(),
            cut.sum().double(),
            (ratio - 1.0 - log_ratio).sum(),
            zero if entropy is None else entropy.detach().double().sum(),
            mismatch.sum(),
            zero if kl_reference is None else kl_reference.detach().double().sum(),
        )
    )
    none = ratio.numel() == 0
    maxima = torch.stack((zero, zero)) if none else torch.stack((ratio.max(), mismatch.max()))
    return sums, maxima


def summarize(sums: Tensor, maxima: Tensor, *, with_reference: bool = False) -> dict[str, float]:
    """Metrics from the added-up `PolicyLoss.sums` and `.maxima`; empty when no token was trained.

    `ess` is the effective sample size of the truncated weights w = min(pi / mu, is_cap) as a share of the tokens, (sum w)^2 / (n sum w^2).
    `kl_behaviour` is k3 of KL(mu || pi), in nats. `mismatch_*` is |log pi - log mu|, in nats. `truncated_fraction` is the share of
    tokens whose importance weight was truncated or masked. `kl_reference`, where there is a reference, is k3 of KL(pi || pi_ref).
    """
    total = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    peak = dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    n = total["tokens"]
    if n == 0:
        return {}
    reference = {"kl_reference": total["kl_reference"] / n} if with_reference else {}
    return reference | {
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
