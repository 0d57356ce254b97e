"""Off-policy correction: weights for tokens that another policy sampled (older, or with the server's arithmetic).

The decoupled objective (Hilton et al. 2022, arXiv:2110.00641; for language models Fu et al. 2025, arXiv:2505.24298) clips around a
proximal policy pi_prox, the weights at the start of the step, and multiplies each token's surrogate by a weight for pi_prox / mu,
with mu the behaviour policy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.objective.aggregate import Segments

Correction = Literal["truncate", "mask", "none"]
Level = Literal["token", "sequence"]


def importance_weights(
    log_ratio: Tensor, segments: Segments, *, correction: Correction, level: Level, cap: float, floor: float
) -> tuple[Tensor, Tensor]:
    """Returns weights [N] without gradient, and a mask of the truncated or masked ratios.

    With rho_t = pi_prox / mu of the token (`level` token) or the product of them over its sequence (`level` sequence):

        truncate:  w = min(rho, cap)                         slightly biased, bounded variance
        mask:      w = rho if floor <= rho <= cap else 0     tokens too far off-policy are ignored
        none:      w = 1                                     no correction

    Truncated: Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561. Masked token by token: IcePop, Ling Team 2025, arXiv:2510.18855.
    TRL calls both, at both levels, its vLLM importance sampling correction. `log_ratio`: [N] log pi_prox - log mu.
    """
    if correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    whole = log_ratio.detach() if level == "token" else segments.sum(log_ratio).to(log_ratio.dtype)
    ratio = whole.exp()
    if correction == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio > cap) | (ratio < floor)
    return ratio.masked_fill(outside, 0.0), outside
