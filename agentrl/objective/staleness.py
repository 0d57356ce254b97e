"""Weights of tokens that an older policy version sampled."""

from __future__ import annotations


def staleness_weight(lag: int, decay: float) -> float:
    """Returns decay ** |lag| for a token sampled `lag` versions before the trained one.

    Staleness-aware asynchronous SGD (Zhang et al. 2015, arXiv:1511.05950) divides the learning rate by the lag instead. The lag is negative
    after the learner resumed from an older checkpoint.
    """
    weight: float = decay ** abs(lag)
    return weight
