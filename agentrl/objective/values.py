"""Values of a critic: generalized advantage estimation, the value loss, and the conversion of a batch's tokens to rows."""

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


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float | Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Computes the advantages and the returns of the sampled tokens; tokens between them (tools, users) are skipped.

        delta_t = r_t + gamma_t V_{t'} - V_t,   A_t = delta_t + gamma_t lambda_t A_{t'},   return_t = A_t + V_t

    where t' is the next sampled token of the row; after the last sampled token, V and A are 0, because the episode ends.

    Schulman et al. 2015, arXiv:1506.02438, eq. 16. A tool's tokens are not actions and take no time steps; the value after a tool call is
    that of the first token sampled after its output.

    Args:
        rewards: [B, T]. Like `values`, ignored at tokens that were not sampled, even if NaN.
        values: [B, T], V_t of the state before token t.
        mask: [B, T], True if the policy sampled the token.
        gamma, lam: in [0, 1]; numbers, or tensors that broadcast to [B, T] for turn-level discounting.

    Returns:
        advantages and returns [B, T], without gradient; 0 where `mask` is False.
    """
    keep = mask.bool()
    with torch.no_grad():
        discount = torch.as_tensor(gamma, dtype=values.dtype, device=values.device).expand_as(values)
        trace = torch.as_tensor(lam, dtype=values.dtype, device=values.device).expand_as(values)
        advantages = torch.zeros_like(values)
        next_value = torch.zeros_like(values[:, 0])
        next_advantage = torch.zeros_like(next_value)
        for t in reversed(range(values.shape[1])):
            here = keep[:, t]
            delta = rewards[:, t].to(values.dtype) + discount[:, t] * next_value - values[:, t]
            next_advantage = torch.where(here, delta + discount[:, t] * trace[:, t] * next_advantage, next_advantage)
            next_value = torch.where(here, values[:, t], next_value)
            advantages[:, t] = torch.where(here, next_advantage, 0.0)
        returns = torch.where(keep, advantages + values, 0.0)
    return advantages, returns


def gae_of_episodes(
    samples: Sequence[Sample], values: Sequence[Sequence[float]], last_values: Mapping[int, float], *, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Computes the advantages and the returns, each [sample][trained token], of samples that continue one another or were truncated.

    The formulas are those of `gae`, but for a sample's last token, t' is the first token of the sample that continues it. If the
    environment truncated the episode, V_{t'} is the value of its last state and A_{t'} is 0: no reward is known after it, but the value is
    not 0 (Pardo et al. 2018, "Time limits in reinforcement learning", arXiv:1712.00378).

    Args:
        values: [sample][trained token].
        last_values: index of a truncated sample -> value of its last state.
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


def rows_of(tokens: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens [N] as rows [S, L], one per sequence, padded with 0 on the right, and the mask of real tokens.

    A sequence's tokens must be adjacent and in order; `rows[mask]` restores the tokens.
    """
    _, counts = torch.unique_consecutive(sequence, return_counts=True)
    longest = int(counts.max()) if len(counts) else 0
    mask = torch.arange(longest, device=tokens.device) < counts[:, None]
    rows = torch.zeros(len(counts), longest, dtype=tokens.dtype, device=tokens.device)
    rows[mask] = tokens
    return rows, mask
