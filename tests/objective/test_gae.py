from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.objective.values import gae


def _closed_form(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """sum_l (gamma lambda)^l delta_{t+l}, as the paper writes it, of a sequence without gaps."""
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    n = len(delta)
    return np.array([sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n)) for t in range(n)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.7, 1.0)])
def test_against_the_papers_sum_with_tool_tokens_cut_out(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, 13, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 13, generator=generator) < 0.6
    rewards[~mask] = float("nan")
    values[~mask] = float("nan")
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(5):
        keep = mask[row].numpy()
        expected = _closed_form(rewards[row].numpy()[keep], values[row].numpy()[keep], gamma, lam)
        np.testing.assert_allclose(advantages[row].numpy()[keep], expected, atol=1e-12)
        np.testing.assert_allclose(returns[row].numpy()[keep], expected + values[row].numpy()[keep], atol=1e-12)
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def test_discounting_by_turn_takes_a_tensor() -> None:
    """Only the last token of the first turn discounts; with lambda 1 the return of the first turn is gamma * the reward."""
    mask = torch.tensor([[True, True, False, False, True, True]])
    gamma = torch.tensor([[1.0, 0.5, 1.0, 1.0, 1.0, 1.0]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 8.0]])
    _, returns = gae(rewards, torch.zeros(1, 6), mask, gamma=gamma, lam=1.0)
    assert returns.tolist() == [[4.0, 4.0, 0.0, 0.0, 8.0, 8.0]]


def test_a_perfect_critic_gives_no_advantage() -> None:
    ones = torch.ones(1, 4)
    advantages, _ = gae(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), ones, ones.bool(), gamma=1.0, lam=0.95)
    assert advantages.tolist() == [[0.0] * 4]
    advantages, returns = gae(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), gamma=0.9, lam=0.9)
    assert (advantages.item(), returns.item()) == (1.0, 1.0)
