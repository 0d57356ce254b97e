"""Surrogates of the policy gradient: what each sampled token adds to the objective, before it is aggregated.

All tensors are [N], sampled tokens only. With A the advantage and r an importance ratio whose gradient is r * grad log pi, each
function returns the term to be maximized and where its bound cut the gradient off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.objective.aggregate import Segments

Surrogate = tuple[Tensor, Tensor]  # [N] to be maximized, with gradient; [N] bool, True where the bound is what counts


def token_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """r_t = min(pi / pi_old, cap), with derivative equal to its own value also where it is truncated.

    The cap acts where the clip does not: a token with negative advantage whose ratio has grown. Its gradient keeps its direction
    with a weight of at most `cap`. Truncation: Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561.
    """
    value = log_ratio.detach().exp().clamp(max=cap)
    return value * (log_ratio - log_ratio.detach()).exp()


def sequence_ratio(log_ratio: Tensor, segments: Segments, cap: float) -> Tensor:
    """s_i = (pi(y_i) / pi_old(y_i)) ** (1 / |y_i|) for every token of sequence i, truncated at `cap`.

    In the form GSPO-token (eq. 13), whose token t carries the gradient s_i * grad log pi(y_t): under the sequence mean with equal
    advantages that is GSPO's gradient exactly, and advantages may differ between tokens. Zheng et al. 2025, arXiv:2507.18071.
    """
    value = segments.mean(log_ratio).exp().clamp(max=cap).to(log_ratio.dtype)
    return value * (log_ratio - log_ratio.detach()).exp()


def clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A).

    PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; the asymmetric range is DAPO's clip-higher, Yu et al. 2025, arXiv:2503.14476.
    With `sequence_ratio` this is GSPO.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, bounded), (bounded < free).detach()


def dual_clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float, bound: float) -> Surrogate:
    """`clip`, and for A < 0 not below bound * A: max(min(r A, clip(r) A), bound A); `bound` above 1.

    A token far more likely now than when it was sampled, with a negative advantage, stops contributing. Ye et al. 2019,
    arXiv:1912.09729, eq. 5.
    """
    inner, clipped = clip(ratio, advantages, low=low, high=high)
    floor = bound * advantages
    beyond = (advantages < 0) & (inner < floor)
    return torch.where(beyond, floor, inner), clipped | beyond.detach()


def cispo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """sg(clip(r, 1 - low, 1 + high)) A log pi: the weight is clipped, no token loses its gradient.

    CISPO, MiniMax 2025, arXiv:2506.13585, eq. 4 and 5; there without a lower bound (`low` = 1). True where the weight was clipped.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return weight * advantages * logprobs, weight != ratio
