"""Turn-level advantages: credit for single turns that a verifier rewards (`Score.turn_rewards`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.base.scores import all_equal
from agentrl.objective.advantages import STD_EPS, sample_std

TurnRewards = Sequence[Sequence[float]]  # [trajectory][turn]


def turn_advantages(rewards: Sequence[TurnRewards], *, normalize_std: bool) -> list[list[list[float]]]:
    """Advantage of every turn of a group's episodes: the sum of the centred rewards from this turn on.

        A_{i,k} = sum_{l >= k} (r_{i,l} - mean(R)) / (std(R) + 1e-4),    R = all turn rewards of the group

    Process supervision with GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.3; added to the advantage of the outcome as in
    turn-level credit assignment, Zeng et al. 2025, arXiv:2505.11821. A turn gets no credit for earlier rewards. Each trajectory of
    an episode has its own returns. Equal rewards give zeros.

    Args:
        rewards: [episode][trajectory][turn].
        normalize_std: divide by the standard deviation (n - 1) of R.
    """
    flat = [reward for episode in rewards for trajectory in episode for reward in trajectory]
    if all_equal(flat):
        return [[[0.0] * len(trajectory) for trajectory in episode] for episode in rewards]
    mean = sum(flat) / len(flat)
    try:
        scale = sample_std(flat) + STD_EPS if normalize_std else 1.0
    except OverflowError:  # the square in the variance; such a group is left out
        scale = math.nan
    return [[_to_come([(reward - mean) / scale for reward in trajectory]) for trajectory in episode] for episode in rewards]


def _to_come(rewards: list[float]) -> list[float]:
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total += reward
        returns.append(total)
    return returns[::-1]
