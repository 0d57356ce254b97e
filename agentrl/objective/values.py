"""The loss of a value function, and a batch's tokens as rows, one per sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Returns half the squared error of each token's value, clipped around the value before the step. All [N].

        v_clip = old + clamp(v - old, -clip, clip)
        loss = 0.5 max((v - R)^2, (v_clip - R)^2)

    A value gains nothing from moving further than `clip`; None disables the clip. Source: the PPO authors' implementation, described in
    Huang et al. 2022, "The 37 implementation details of proximal policy optimization", detail 9.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(error, clipped)


def rows_of(tokens: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens [N] as rows [S, L], one per sequence, padded with 0 on the right, and the mask of real tokens.

    A sequence's tokens must be adjacent and in order; `rows[mask]` restores them.
    """
    _, counts = torch.unique_consecutive(sequence, return_counts=True)
    longest = int(counts.max()) if len(counts) else 0
    mask = torch.arange(longest, device=tokens.device) < counts[:, None]
    rows = torch.zeros(len(counts), longest, dtype=tokens.dtype, device=tokens.device)
    rows[mask] = tokens
    return rows, mask
