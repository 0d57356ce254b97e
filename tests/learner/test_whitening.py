"""Whitening of a critic's advantages where the usual arithmetic has nothing to divide by."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from agentrl.learner.critic import advantage_moments
from agentrl.learner.ranks import Ranks


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Ranks(rank=0, size=1, device=torch.device("cpu"), control=dist.group.WORLD)
    dist.destroy_process_group()


def test_advantages_are_whitened_over_all_micro_batches_at_once(alone: Ranks) -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([6.0])]
    shift, scale = advantage_moments(parts, alone)
    assert (shift, scale) == pytest.approx((3.0, math.sqrt(14 / 3)))


@pytest.mark.parametrize("count", [1, 7])
def test_equal_advantages_become_zeros(alone: Ranks, count: int) -> None:
    """All episodes scored alike under a critic that tells nothing apart: no token is better than another, so none is reinforced."""
    equal = torch.full((count,), 0.7)
    shift, scale = advantage_moments([equal], alone)
    assert ((equal - shift) / scale).tolist() == [0.0] * count


def test_a_non_finite_advantage_makes_all_non_finite(alone: Ranks) -> None:
    """Not only its own minibatch: what the others would be divided by is not known."""
    shift, scale = advantage_moments([torch.tensor([1.0, 2.0]), torch.tensor([math.nan])], alone)
    assert not ((torch.ones(3) - shift) / scale).isfinite().any()
