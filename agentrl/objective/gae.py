"""Generalized advantage estimation over sampled tokens, from a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float | Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns of the sampled tokens; tokens between them (tools, users) are skipped.

        delta_t = r_t + gamma_t V_{t'} - V_t,   A_t = delta_t + gamma_t lambda_t A_{t'},   return_t = A_t + V_t

    where t' is the next sampled token of the row; after the last one V and A are 0, because the episode ends.

    Schulman et al. 2015, arXiv:1506.02438, eq. 16. A tool's tokens are not actions and take no time steps; the value after a tool call is
    that of the first token sampled after its output.

    Args:
        rewards: [B, T], on sampled tokens; like `values` ignored elsewhere, even if NaN.
        values: [B, T], V_t of the state before token t.
        mask: [B, T], True if the policy sampled the token.
        gamma, lam: in [0, 1]; numbers, or tensors that broadcast to [B, T] for turn-level discounting.

    Returns:
        advantages and returns [B, T], without gradient, 0 where masked.
    """
    keep = mask.bool()
    with torch.no_grad():
        discount = torch.as_tensor(gamma, dtype=values.dtype, device=values.device).expand_as(values)
        trace = torch.as_tensor(lam, dtype=values.dtype, device=values.device).expand_as(values)
        advantages = torch.zeros_like(values)
        next_value = torch.zeros_like(values[:, 0])
        next_advantage = torch.zeros_like(next_value)
        for t in reversed(range(values.shape[1])):
            here = keep[:, t]
            delta = rewards[:, t].to(values.dtype) + discount[:, t] * next_value - values[:, t]
            next_advantage = torch.where(here, delta + discount[:, t] * trace[:, t] * next_advantage, next_advantage)
            next_value = torch.where(here, values[:, t], next_value)
            advantages[:, t] = torch.where(here, next_advantage, 0.0)
        returns = torch.where(keep, advantages + values, 0.0)
    return advantages, returns
