"""An advantage estimator and a loss."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.protocols import LossTokens

log = logging.getLogger("fieldkit")


def leave_one_out(groups: Sequence[Sequence[float]], *, scale: float = 1.0) -> list[list[float]]:
    """Each score against the mean of the others in its group."""
    log.info("leave-one-out over %d groups", len(groups))
    return [[scale * (score - (sum(scores) - score) / max(len(scores) - 1, 1)) for score in scores] for scores in groups]


def soft_clip(tokens: LossTokens, *, width: float = 1.0) -> tuple[Tensor, Tensor]:
    """The ratio through a tanh around 1, so that its gradient fades where a clip would cut it off."""
    log.info("soft clip of %d tokens", len(tokens.logprobs))
    ratio = 1.0 + width * torch.tanh((tokens.log_ratio.exp() - 1.0) / width)
    beyond = (tokens.log_ratio.exp() - 1.0).abs() > width
    return ratio * tokens.advantages, beyond.detach()
