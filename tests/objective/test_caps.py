"""The bounds of a ratio, two bounds that meet, and the metrics that count them."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from agentrl.config import ObjectiveConfig, OffPolicyConfig
from agentrl.config.objective import Correction
from agentrl.objective.losses import Segments, dual_clip, importance_weights, k3
from agentrl.objective.policy_loss import TrainedTokens, policy_loss, summarize


def _tokens(gaps: list[float], sequence: list[int]) -> TrainedTokens:
    return TrainedTokens(
        logprobs=torch.tensor(gaps, requires_grad=True),
        behaviour=torch.zeros(len(gaps)),
        advantages=torch.ones(len(gaps)),
        sequence=torch.tensor(sequence),
    )


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_a_clip_range_that_ends_at_the_cap_raises(loss: str) -> None:
    """A truncated ratio keeps its gradient, and a ratio at the edge of the range is inside it."""
    with pytest.raises(ValidationError, match=r"clip_high does nothing when 1 \+ clip_high reaches off_policy\.cap=2"):
        ObjectiveConfig(loss=loss, clip_high=1.0)  # type: ignore[arg-type]
    below = ObjectiveConfig(loss=loss, clip_high=0.99)  # type: ignore[arg-type]
    tokens = _tokens([3.0, 0.5], [0, 1])
    policy_loss(tokens, below, denominator=1).loss.backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad[0] == 0.0 > tokens.logprobs.grad[1]
    assert ObjectiveConfig(loss=loss, clip_high=1.0, off_policy=OffPolicyConfig(preset="none")).clip_high == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("loss", "truncated"), [("clip", 2 / 6), ("gspo", 3 / 6)])
def test_the_truncated_fraction_counts_the_ratios_that_were_truncated(loss: str, truncated: float) -> None:
    """Two tokens are above the cap of 2. The sequences' ratios are the cube roots of 8 * 1 * 1/4 and 9 * 1 * 1; the second is above."""
    tokens = _tokens([math.log(8), 0.0, -math.log(4), math.log(9), 0.0, 0.0], [0, 0, 0, 1, 1, 1])
    result = policy_loss(tokens, ObjectiveConfig(loss=loss), denominator=1)  # type: ignore[arg-type]
    assert summarize(result.sums, result.maxima)["truncated_fraction"] == pytest.approx(truncated)


def test_k3_near_the_reference_is_accurate_and_never_negative_in_float32() -> None:
    gaps = torch.linspace(-1e-3, 1e-3, 2001)
    estimate = k3(torch.zeros_like(gaps), gaps)
    exact = gaps.double().square() / 2 + gaps.double() ** 3 / 6
    assert (estimate >= 0).all()
    assert (estimate.double() - exact).abs().max() < 1e-3 * exact.max()


def test_a_ratio_at_a_bound_is_not_beyond_it() -> None:
    """A ratio equal to the cap is not truncated, and one equal to `dual_clip` keeps its gradient."""
    bound = torch.tensor(math.log(2.0), dtype=torch.float64)
    objective = ObjectiveConfig()
    tokens = TrainedTokens(
        logprobs=bound.reshape(1), behaviour=torch.zeros(1, dtype=torch.float64), advantages=torch.ones(1), sequence=torch.zeros(1)
    )
    result = policy_loss(tokens, objective, denominator=1)
    assert summarize(result.sums, result.maxima)["truncated_fraction"] == 0.0
    gap, segments = torch.zeros(3), Segments.of(torch.arange(3))
    for correction in (Correction(True, "truncate", cap=1.0), Correction(True, "mask", floor=1.0, cap=1.0)):
        weight, truncated = importance_weights(gap, segments, correction)
        assert weight.tolist() == [1.0] * 3 and not truncated.any()
    ratio = torch.tensor([3.0], requires_grad=True)
    term, clipped = dual_clip(ratio, torch.tensor([-1.0]), low=0.2, high=0.2, bound=3.0)
    term.sum().backward()
    assert term.tolist() == [-3.0] and not clipped.any()
    assert ratio.grad is not None and ratio.grad.tolist() == [-1.0]
