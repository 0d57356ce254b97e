"""Credit for each turn in each trajectory of an episode (`objective.credit`).

Notation, in one group: rollout i = 1..N has score s_i (after penalties) and advantage A_i, and trajectories b = 1..B_i with sampled
tokens, each by an agent with a role (`Trajectory.agent`: main, worker, summary). sigma is 1 if `objective.normalize_std` is False. Every
mean and standard deviation counts a rollout once, however many trajectories it has.

| credit | advantage of trajectory b of rollout i |
| --- | --- |
| episode | A_i |
| branches | A_i / B_i |
| roles | (s_i - b_i) / sigma, over the rollouts with b's role |
| verifier | (v_ib - b_i) / sigma, over the rollouts with b's role; v_ib is `Score.branches`, or s_i if that is None |
| counterfactual | (value_i - w_ib) / sigma, where w_ib is `Score.without`; A_i if that is None |
| siblings | (mean of s over D - mean of s over P) / sigma, turn by turn |

roles, verifier: with S_ib the score of a trajectory (s_i or v_ib), u_i is the mean of S_ib over the trajectories of the role in rollout i,
n is the number of rollouts with such a trajectory, and m is the mean of u. With grpo, b_i is m. With rloo, b_i is the mean of u over the
other rollouts, or u_i if n is 1. sigma^2 = sum_i mean_b (S_ib - m)^2 / max(n - 1, 1), and 1e-4 is added to sigma. With one trajectory per
rollout, this is GRPO or RLOO.

counterfactual: difference rewards (Wolpert and Tumer 2002, Optimal payoff functions for members of collectives), as advantages in
Foerster et al. 2018, arXiv:1705.08926. sigma is the standard deviation of s over the group (n - 1) plus 1e-4, and 1 if all scores are
equal.

siblings: D contains the rollouts that share the turn. P contains the rollouts at the branch point: those that share the last earlier turn
shared by more rollouts, or the group if there is no such turn. With rloo, the second mean is over P without D. The differences along a path
add up to s_i minus the group's mean. Local advantages of a tree: Hou et al. 2025, arXiv:2506.11902. sigma is the same as for
counterfactual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from agentrl.base.numbers import all_equal
from agentrl.config.recipe import ObjectiveConfig
from agentrl.errors import RecipeError
from agentrl.objective.advantages import STD_EPS, sample_std
from agentrl.records import ScoredEpisode, Trajectory, TurnKey, turn_key
from agentrl.records.trajectory import CONTINUED

Credit = dict[str, list[list[float]]]
"""Episode id -> [trajectory][turn]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEpisode:
    """A counted episode, with its score and its advantage."""

    scored: ScoredEpisode
    score: float  # after penalties
    advantage: float

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """The episode's trajectories."""
        return self.scored.episode.trajectories


def branch_credit(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> Credit:
    """Returns the credit of every turn of a group's rollouts; NaN if the arithmetic overflows.

    Raises `RecipeError` if a score lacks a value that `objective.credit` needs.
    """
    try:
        if objective.credit == "siblings":
            return _siblings(rollouts, objective)
        if objective.credit in ("roles", "verifier"):
            return _spread(rollouts, _by_role(rollouts, objective))
        if objective.credit == "counterfactual":
            return _spread(rollouts, _counterfactual(rollouts, objective))
        shares = [max(1, sum(map(_sampled, rollout.trajectories))) if objective.credit == "branches" else 1 for rollout in rollouts]
        return _spread(rollouts, [[r.advantage / share] * len(r.trajectories) for r, share in zip(rollouts, shares, strict=True)])
    except OverflowError:  # raised by math.fsum or a square
        return _spread(rollouts, [[math.nan] * len(rollout.trajectories) for rollout in rollouts])


def _spread(rollouts: Sequence[CountedEpisode], values: Sequence[Sequence[float]]) -> Credit:
    """Returns credit in which each turn has the value of its trajectory."""
    return {
        rollout.scored.episode.id: [[value] * len(trajectory.turns) for trajectory, value in zip(rollout.trajectories, own, strict=True)]
        for rollout, own in zip(rollouts, values, strict=True)
    }


def _sampled(trajectory: Trajectory) -> bool:
    return any(turn.completion_ids for turn in trajectory.turns)


def _by_role(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> list[list[float]]:
    if objective.credit == "verifier":
        scores = [[r.score if v is None else v for v in _per_trajectory(r, r.scored.score.branches, "branches")] for r in rollouts]
    else:
        scores = [[rollout.score] * len(rollout.trajectories) for rollout in rollouts]
    credit = [[0.0] * len(rollout.trajectories) for rollout in rollouts]
    for role in sorted({trajectory.agent for rollout in rollouts for trajectory in rollout.trajectories}):
        own_scores: dict[int, dict[int, float]] = {}  # rollout -> trajectory of this role -> score
        for number, rollout in enumerate(rollouts):
            for index, trajectory in enumerate(rollout.trajectories):
                if trajectory.agent == role and _sampled(trajectory):
                    own_scores.setdefault(number, {})[index] = scores[number][index]
        for number, advantages in _against_role({n: list(own.values()) for n, own in own_scores.items()}, objective).items():
            for index, advantage in zip(own_scores[number], advantages, strict=True):
                credit[number][index] = advantage
    return credit


def _against_role(scores: Mapping[int, list[float]], objective: ObjectiveConfig) -> dict[int, list[float]]:
    """Returns a mapping from rollout to the advantages of its trajectories with one role."""
    if all_equal([score for own in scores.values() for score in own]):
        return {number: [0.0] * len(own) for number, own in scores.items()}
    means = {number: fmean(own) for number, own in scores.items()}
    mean, n, total = fmean(means.values()), len(means), math.fsum(means.values())
    variance = math.fsum(fmean((score - mean) ** 2 for score in own) for own in scores.values()) / max(n - 1, 1)
    scale = math.sqrt(variance) + STD_EPS if objective.divides_by_std else 1.0
    rloo = objective.advantage.ref == "rloo" and n > 1
    baselines = {number: (total - own) / (n - 1) if rloo else mean for number, own in means.items()}
    return {number: [(score - baselines[number]) / scale for score in own] for number, own in scores.items()}


def _counterfactual(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> list[list[float]]:
    scale, credit = _deviation(rollouts, objective), []
    for rollout in rollouts:
        value, without = rollout.scored.score.value, _per_trajectory(rollout, rollout.scored.score.without, "without")
        assert value is not None, "a counted episode has a score"
        credit.append([rollout.advantage if other is None else _difference(value, other) / scale for other in without])
    return credit


def _per_trajectory(rollout: CountedEpisode, values: Sequence[float | None], name: str) -> Sequence[float | None]:
    """Returns the score's value for each trajectory. Raises `RecipeError` if an episode with several trajectories has no values."""
    if not values and sum(map(_sampled, rollout.trajectories)) > 1:
        raise RecipeError(
            f"objective.credit: the score of episode {rollout.scored.episode.id} has no {name}, but the episode has several trajectories",
            fix=f"return Score({name}=...) from the verifier, with a number or None for each trajectory, or set objective.credit=episode",
        )
    return values or [None] * len(rollout.trajectories)


def _siblings(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> Credit:
    """Returns credit that compares the rollouts that share a turn with the rollouts at its branch point."""
    keys_of = [_keys(rollout) for rollout in rollouts]
    sharing: dict[TurnKey, set[int]] = {}
    for number, keys in enumerate(keys_of):
        for key in keys.values():
            sharing.setdefault(key, set()).add(number)
    scale = _deviation(rollouts, objective)
    credit: Credit = {}
    for rollout, keys in zip(rollouts, keys_of, strict=True):
        branch_points: dict[tuple[int, int], set[int]] = {}  # turn -> P
        own = credit[rollout.scored.episode.id] = [[0.0] * len(trajectory.turns) for trajectory in rollout.trajectories]
        for turn, key in keys.items():  # parents come before their children
            before, shared = _before(rollout, turn), sharing[key]
            if before is None:
                group = set(range(len(rollouts)))
            else:
                group = sharing[keys[before]] if sharing[keys[before]] > shared else branch_points[before]
            branch_points[turn] = group
            if rest := group - shared if objective.advantage.ref == "rloo" else group:
                means = (fmean(rollouts[number].score for number in sorted(numbers)) for numbers in (shared, rest))
                own[turn[0]][turn[1]] = _difference(*means) / scale
    return credit


def _keys(rollout: CountedEpisode) -> dict[tuple[int, int], TurnKey]:
    """Returns a mapping (trajectory, turn) -> identity of the turn across the rollouts that share it."""
    episode_id, trajectories = rollout.scored.episode.id, rollout.trajectories
    return {
        (i, turn): turn_key(episode_id, i, trajectory, turn)
        for i, trajectory in enumerate(trajectories)
        for turn in range(len(trajectory.turns))
    }


def _before(rollout: CountedEpisode, turn: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the turn that a turn follows, in its own or its parent trajectory, or None if it follows no turn."""
    trajectory, number = turn
    if number:
        return trajectory, number - 1
    parent = rollout.trajectories[trajectory].parent
    return None if parent is None else (parent.trajectory, parent.turn)


def _difference(score: float, other: float) -> float:
    """Returns the difference of two scores: exactly zero if they are equal up to rounding."""
    return 0.0 if all_equal((score, other)) else score - other


def _deviation(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> float:
    """Returns sigma for the rollouts' scores."""
    scores = [rollout.score for rollout in rollouts]
    return 1.0 if not objective.divides_by_std or all_equal(scores) else sample_std(scores) + STD_EPS


def penalized_score(scored: ScoredEpisode, penalties: Mapping[str, float]) -> float:
    """Returns s_i: an episode's score minus its penalty."""
    assert scored.score.value is not None, "a counted episode has a score"
    return scored.score.value - penalties.get(scored.episode.id, 0.0)


TurnRewards = Sequence[Sequence[float]]  # [trajectory][turn]


def continuations(trajectories: Sequence[Trajectory]) -> list[int | None]:
    """Returns, for each trajectory, the index of the trajectory that continues it from its environment's last observation, or None."""
    following: list[int | None] = [None] * len(trajectories)
    for index, trajectory in enumerate(trajectories):
        parent = trajectory.parent
        if parent is not None and parent.call is None and trajectories[parent.trajectory].stop_reason == CONTINUED and trajectory.turns:
            following[parent.trajectory] = index
    return following


def turn_advantages(
    rewards: Sequence[TurnRewards], *, normalize_std: bool, following: Sequence[Sequence[int | None]] | None = None
) -> list[list[list[float]]]:
    """Returns the advantage of every turn of a group's episodes: the sum of the centred rewards from this turn on.

        A_{i,k} = sum_{l >= k} (r_{i,l} - mean(R)) / (std(R) + 1e-4),    R = all turn rewards of the group

    Process supervision with GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.3. The result is added to the advantage of the outcome,
    as in turn-level credit assignment, Zeng et al. 2025, arXiv:2505.11821. Each trajectory of an episode has its own returns, plus those of
    its continuation. If all rewards are equal, all advantages are 0. If the variance overflows, they are NaN.

    Args:
        rewards: [episode][trajectory][turn].
        normalize_std: whether to divide by the standard deviation (n - 1) of R.
        following: [episode][trajectory] index of the trajectory that continues it (`continuations`); None means that no trajectory is
        continued.
    """
    flat = [reward for episode in rewards for trajectory in episode for reward in trajectory]
    if all_equal(flat):
        return [[[0.0] * len(trajectory) for trajectory in episode] for episode in rewards]
    mean = sum(flat) / len(flat)
    try:
        scale = sample_std(flat) + STD_EPS if normalize_std else 1.0
    except OverflowError:  # raised by the variance; the group is dropped
        scale = math.nan
    chains = [[None] * len(episode) for episode in rewards] if following is None else following
    return [
        _returns([[(reward - mean) / scale for reward in trajectory] for trajectory in episode], after)
        for episode, after in zip(rewards, chains, strict=True)
    ]


def _returns(rewards: list[list[float]], following: Sequence[int | None]) -> list[list[float]]:
    """Returns, for each turn, the sum of rewards to the end of its trajectory and its continuations, which have larger indices."""
    sums: list[list[float]] = [[]] * len(rewards)
    for index in reversed(range(len(rewards))):
        after = following[index]
        rest = sums[after][0] if after is not None and sums[after] else 0.0
        sums[index] = [value + rest for value in accumulate(reversed(rewards[index]))][::-1]
    return sums
