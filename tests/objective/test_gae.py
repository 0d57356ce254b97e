from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.config import CriticConfig, Recipe, build
from agentrl.objective import assemble
from agentrl.objective.values import gae, value_loss
from agentrl.records import Group, Sample
from tests.learner.building import episode, estimate, scored, turn


def rewarded(rewards: Sequence[float], mask: Sequence[bool]) -> Sample:
    """A sample with these rewards, whose tokens in `mask` were sampled."""
    n = len(mask)
    common = {"episode_id": "e", "group_index": 0, "token_ids": (1,) * n, "logprobs": (0.0,) * n, "versions": (0,) * n}
    return Sample(**common, loss_mask=tuple(map(bool, mask)), rewards=tuple(map(float, rewards)))  # type: ignore[arg-type]


def _closed_form(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """sum_l (gamma lambda)^l delta_{t+l}, as in the paper, for a sequence without gaps."""
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    n = len(delta)
    return np.array([sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n)) for t in range(n)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.7, 1.0)])
def test_gae_equals_the_papers_sum_without_tool_tokens(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    rewards, values, mask = rng.normal(size=(5, 13)), rng.normal(size=(5, 13)), rng.random((5, 13)) < 0.6
    mask[:, 0] = False  # the first token has no context
    samples = [replace(rewarded(row, kept), group_index=number) for number, (row, kept) in enumerate(zip(rewards, mask, strict=True))]
    advantages, returns = gae(samples, [row[kept].tolist() for row, kept in zip(values, mask, strict=True)], {}, gamma=gamma, lam=lam)
    for row in range(5):
        keep = mask[row]
        expected = _closed_form(rewards[row][keep], values[row][keep], gamma, lam)
        np.testing.assert_allclose(advantages[row], expected, atol=1e-12)
        np.testing.assert_allclose(returns[row], expected + values[row][keep], atol=1e-12)


def test_a_perfect_critic_gives_no_advantage() -> None:
    mask = (False, True, True, True, True)
    assert gae([rewarded((0.0, 0.0, 0.0, 0.0, 1.0), mask)], [[1.0] * 4], {}, gamma=1.0, lam=0.95)[0] == [[0.0] * 4]
    assert gae([rewarded((0.0, 1.0), (False, True))], [[0.0]], {}, gamma=0.9, lam=0.9) == ([[1.0]], [[1.0]])


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
        advantages, returns = estimate(batch.samples, values, CRITIC)
        expected = [0.5 * 2.25, 0.5 + 0.5 * 3.5, 1.0 + 0.5 * 5.0, 0.5 * 10.0, 10.0]
        assert returns.tolist() == expected
        assert (advantages + values).tolist() == expected
