"""Values of a critic: generalized advantage estimation and the value loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from agentrl.records import Sample

# The values used by Ziegler et al. 2019, arXiv:1909.08593 (github.com/openai/lm-human-preferences, `PpoHParams`), and by TRL.
VALUE_CLIP = 0.2
"""The value loss is clipped if a value changes by more than this in a step."""
VALUE_WEIGHT = 0.1
"""Weight of the value loss if the critic is a value head on the policy."""


def gae(
    samples: Sequence[Sample], values: Sequence[Sequence[float]], last_values: Mapping[int, float], *, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Computes the advantages and the returns, each [sample][trained token], of samples with rewards.

        delta_t = r_t + gamma V_{t'} - V_t,   A_t = delta_t + gamma lambda A_{t'},   return_t = A_t + V_t

    where t' is the next trained token: of the same sample or, after its last token, of the sample that continues it. After the last token
    of an episode, V and A are 0. If the environment truncated the episode, V_{t'} is the value of its last state and A_{t'} is 0: no reward
    is known after it, but the value is not 0 (Pardo et al. 2018, "Time limits in reinforcement learning", arXiv:1712.00378).

    Schulman et al. 2015, arXiv:1506.02438, eq. 16. A tool's tokens are not actions and take no time steps; the value after a tool call is
    that of the first token sampled after its output.

    Args:
        values: [sample][trained token], V_t of the state before token t.
        last_values: index of a truncated sample -> value of its last state.
        gamma, lam: in [0, 1].
    """
    number_of = {(sample.group_index, sample.episode_id, sample.trajectory): number for number, sample in enumerate(samples)}
    advantages: list[list[float]] = [[] for _ in samples]
    order = sorted(range(len(samples)), key=lambda number: -samples[number].trajectory)  # a continuation has a larger index
    for number in order:
        sample, own = samples[number], values[number]
        after = None if sample.continued_in is None else number_of.get((sample.group_index, sample.episode_id, sample.continued_in))
        next_value, next_advantage = last_values.get(number, 0.0), 0.0
        if after is not None and advantages[after]:
            next_value, next_advantage = values[after][0], advantages[after][0]
        rewards = list(compress(sample.rewards, sample.loss_mask))
        backwards: list[float] = []
        for reward, value in zip(reversed(rewards), reversed(own), strict=True):
            next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            next_value = value
            backwards.append(next_advantage)
        advantages[number] = backwards[::-1]
    returns = [[a + v for a, v in zip(row, own, strict=True)] for row, own in zip(advantages, values, strict=True)]
    return advantages, returns


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """Returns half the squared error of each token's value, clipped around the value before the step. All [N].

        v_clip = old + clamp(v - old, -VALUE_CLIP, VALUE_CLIP)
        loss = 0.5 max((v - R)^2, (v_clip - R)^2)

    Moving a value by more than `VALUE_CLIP` does not reduce its loss. Source: the PPO authors' implementation, described in Huang et al.
    2022, "The 37 implementation details of proximal policy optimization", detail 9.
    """
    error = (values - returns).square()
    clipped = (old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP) - returns).square()
    return 0.5 * torch.maximum(error, clipped)
