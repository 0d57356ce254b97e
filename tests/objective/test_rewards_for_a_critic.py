"""Where score and turn rewards lie when a critic makes advantages of them: on sampled tokens alone, whatever tools said in between."""

from __future__ import annotations

from dataclasses import replace

import torch

from agentrl.config import CriticConfig, Recipe, build
from agentrl.learner.critic import critic_advantages
from agentrl.learner.packing import build_micro_batch
from agentrl.objective import assemble
from agentrl.records import Group
from tests.learner.building import episode, scored, turn

CRITIC = CriticConfig(gamma=0.5, lam=1.0)


def _recipe(**objective: object) -> Recipe:
    sections = {"objective": {"advantage": "gae", **objective}, "critic": {}, "rollout": {"group": {"size": 1}}}
    return build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, **sections})


def _group(*, cut_off: bool = False) -> Group:
    turns = [turn([1, 2], [3, 4], [-1.0] * 2), turn([5, 6, 7], [8], [-1.0]), turn([9], [10, 11], [-1.0] * 2)]
    if cut_off:
        turns[-1] = replace(turns[-1], finish_reason="length")
    made = scored(episode("e", turns), 8.0)
    return Group(index=0, task_id="t", task_key="k", episodes=(replace(made, score=replace(made.score, turn_rewards=((1.0, 2.0, 4.0),))),))


def test_rewards_are_on_the_last_sampled_tokens() -> None:
    (plain,) = assemble(0, [_group()], _recipe()).batch.samples
    assert (plain.rewards, plain.advantages) == ((0.0,) * 10 + (8.0,), ())
    (credited,) = assemble(0, [_group()], _recipe(turn_coef=0.5)).batch.samples
    assert credited.loss_mask == (False, False, True, True, False, False, False, True, False, True, True)
    assert credited.rewards == (0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 10.0)


def test_returns_skip_tool_output_and_end_at_the_cut() -> None:
    """Five sampled tokens, each half a step's discount from the next; the same when the last turn ran out of tokens."""
    for cut_off in (False, True):
        batch = assemble(0, [_group(cut_off=cut_off)], _recipe(turn_coef=0.5)).batch
        values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
        advantages, returns = critic_advantages(build_micro_batch(batch.samples, torch.device("cpu")), values, CRITIC)
        expected = [0.5 * 2.25, 0.5 + 0.5 * 3.5, 1.0 + 0.5 * 5.0, 0.5 * 10.0, 10.0]
        assert returns.tolist() == expected
        assert (advantages + values).tolist() == expected
