"""Weights for experience sampled by an older policy version."""

from __future__ import annotations


def staleness_weight(lag: int, decay: float) -> float:
    """decay ** lag for a token sampled `lag` versions before the one being trained; 1 for fresh tokens.

    Gradients computed from older weights count less, as in staleness-aware asynchronous SGD (Zhang et al. 2015, arXiv:1511.05950,
    which divides the learning rate by the lag; a power acts from the first version on). A negative lag (after the
    learner resumed from an older checkpoint) counts by its absolute value.
    """
    weight: float = decay ** abs(lag)
    return weight
