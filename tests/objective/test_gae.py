from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.config import CriticConfig, Recipe, build
from agentrl.learner.critic import critic_advantages
from agentrl.learner.packing import build_micro_batch
from agentrl.objective import assemble
from agentrl.objective.values import gae, rows_of, value_loss
from agentrl.records import Group
from tests.learner.building import episode, scored, turn


def _closed_form(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """sum_l (gamma lambda)^l delta_{t+l}, as in the paper, for a sequence without gaps."""
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    n = len(delta)
    return np.array([sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n)) for t in range(n)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.7, 1.0)])
def test_gae_equals_the_papers_sum_without_tool_tokens(gamma: float, lam: float) -> None:
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


def test_the_value_clip_bounds_the_gain() -> None:
    shift = 3.0  # added to all values; changes no loss
    old = torch.tensor([shift] * 5, dtype=torch.float64)
    returns = shift + torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    values = (shift + torch.tensor([0.1, 0.9, 0.5, 2.0, -0.9], dtype=torch.float64)).requires_grad_()
    loss = value_loss(values, old, returns)
    expected = [0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2, 0.5, 0.5 * 0.8**2]
    assert loss.tolist() == pytest.approx(expected)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.5, 1.0, 0.0]), "0 if the clip applies, else the error"


def test_rows_restore_the_tokens() -> None:
    tokens = torch.arange(1.0, 7.0)
    rows, mask = rows_of(tokens, torch.tensor([7, 7, 7, 2, 9, 9]))
    assert rows.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert torch.equal(rows[mask], tokens)
    empty, empty_mask = rows_of(torch.empty(0), torch.empty(0, dtype=torch.long))
    assert empty.shape == (0, 0) and empty_mask.shape == (0, 0)


# With a critic, scores and turn rewards are on sampled tokens only, never on tool output between them.
CRITIC = CriticConfig(gamma=0.5, lam=1.0)


def _recipe(**objective: object) -> Recipe:
    sections = {"objective": {"advantage": "gae", **objective}, "critic": {}, "rollout": {"group": {"size": 1}}}
    return build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, **sections})


def _group(*, cut_off: bool = False) -> Group:
    turns = [turn([1, 2], [3, 4], [-1.0] * 2), turn([5, 6, 7], [8], [-1.0]), turn([9], [10, 11], [-1.0] * 2)]
    if cut_off:
        turns[-1] = replace(turns[-1], finish_reason="length")
    base = scored(episode("e", turns), 8.0)
    return Group(index=0, task_id="t", task_key="k", episodes=(replace(base, score=replace(base.score, turn_rewards=((1.0, 2.0, 4.0),))),))


def test_rewards_are_on_the_last_sampled_tokens() -> None:
    (plain,) = assemble(0, [_group()], _recipe()).batch.samples
    assert (plain.rewards, plain.advantages) == ((0.0,) * 10 + (8.0,), ())
    (credited,) = assemble(0, [_group()], _recipe(turn_coef=0.5)).batch.samples
    assert credited.loss_mask == (False, False, True, True, False, False, False, True, False, True, True)
    assert credited.rewards == (0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 10.0)


def test_returns_skip_tool_output_and_end_at_the_cut() -> None:
    """Five sampled tokens with a discount of 0.5 per token; the same if the last turn was cut off."""
    for cut_off in (False, True):
        batch = assemble(0, [_group(cut_off=cut_off)], _recipe(turn_coef=0.5)).batch
        values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
        advantages, returns = critic_advantages(build_micro_batch(batch.samples, torch.device("cpu")), values, CRITIC)
        expected = [0.5 * 2.25, 0.5 + 0.5 * 3.5, 1.0 + 0.5 * 5.0, 0.5 * 10.0, 10.0]
        assert returns.tolist() == expected
        assert (advantages + values).tolist() == expected
