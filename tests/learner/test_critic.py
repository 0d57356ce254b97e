"""A critic learns the returns that the tokens determine, and none that they do not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import transformers

from agentrl.config import CriticConfig
from agentrl.learner.critic import ValueScorer, advantage_moments
from agentrl.learner.forest import register
from agentrl.learner.packing import build_micro_batch
from agentrl.learner.ranks import Ranks
from agentrl.objective.values import value_loss
from agentrl.records import Sample
from tests.learner.building import estimate, tiny_config

CPU = torch.device("cpu")


def _samples(seed: int, informative: bool) -> tuple[Sample, ...]:
    """64 episodes of 6 sampled tokens; the third is 10 or 11 and determines the score if `informative`; else the score is random."""
    rng = random.Random(seed)
    samples = []
    for number in range(64):
        prompt, completion = [rng.randrange(20, 40) for _ in range(4)], [rng.randrange(8) for _ in range(6)]
        completion[2] = rng.choice((10, 11))
        score = float(completion[2] == 10) if informative else float(rng.random() < 0.5)
        samples.append(
            Sample(
                episode_id=str(number),
                group_index=number,
                token_ids=(*prompt, *completion),
                loss_mask=(False,) * 4 + (True,) * 6,
                logprobs=(0.0,) * 10,
                versions=(-1,) * 4 + (0,) * 6,
                rewards=(0.0,) * 9 + (score,),
            )
        )
    return tuple(samples)


@pytest.mark.slow
@pytest.mark.parametrize("informative", [True, False])
def test_values_change_from_the_informative_token_on(informative: bool) -> None:
    """After 40 batches, on unseen episodes. Before the third token every state has the value 0.5; after it, 0 or 1."""
    torch.manual_seed(0)
    config = CriticConfig()
    scorer = ValueScorer(transformers.Qwen3ForCausalLM(tiny_config(attn_implementation=register(), initializer_range=0.2)))
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-2, weight_decay=0.0)
    for seed in range(40):
        samples = _samples(seed, informative)
        batch = build_micro_batch(samples, CPU)
        values = scorer(batch.input_ids, batch.layout, batch.positions)[batch.expand]
        _, returns = estimate(samples, values.detach(), config)
        value_loss(values, values.detach(), returns).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    samples = _samples(1000, informative)
    batch = build_micro_batch(samples, CPU)
    with torch.no_grad():
        values = scorer(batch.input_ids, batch.layout, batch.positions)[batch.expand].view(64, 6)
    advantages, returns = (tensor.view(64, 6) for tensor in estimate(samples, values.flatten(), config))
    torch.testing.assert_close(advantages, returns - values)
    explained = 1 - (returns - values).var(0) / returns.var(0)
    assert (explained[:3].abs() < 0.2).all(), "all states before the third token have the same value"
    assert (explained[3:] > 0.8).all() if informative else (explained[3:] < 0.2).all()


# Whitening of a critic's advantages, also if their standard deviation is zero or not finite.
@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Ranks(rank=0, size=1, device=torch.device("cpu"), control=dist.group.WORLD)
    dist.destroy_process_group()


def test_advantages_are_whitened_over_all_micro_batches_at_once(one_rank: Ranks) -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([6.0])]
    shift, scale = advantage_moments(parts, one_rank)
    assert (shift, scale) == pytest.approx((3.0, math.sqrt(14 / 3)))


@pytest.mark.parametrize("count", [1, 7])
def test_equal_advantages_become_zeros(one_rank: Ranks, count: int) -> None:
    """Equal scores under a critic with equal values: no token is better than another, so none is reinforced."""
    equal = torch.full((count,), 0.7)
    shift, scale = advantage_moments([equal], one_rank)
    assert ((equal - shift) / scale).tolist() == [0.0] * count


def test_a_non_finite_advantage_makes_all_non_finite(one_rank: Ranks) -> None:
    """Not only in its own minibatch: the scale of the others is not known."""
    shift, scale = advantage_moments([torch.tensor([1.0, 2.0]), torch.tensor([math.nan])], one_rank)
    assert not ((torch.ones(3) - shift) / scale).isfinite().any()
