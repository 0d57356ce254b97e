"""Credit for the branches of an episode: what each turn of each trajectory is given (`objective.credit`).

Notation, in one group: rollout i = 1..N has score s_i (after penalties) and advantage A_i, and trajectories b = 1..B_i that hold sampled
tokens, each by an agent with a role (`Trajectory.agent`: main, worker, summary). sigma is 1 without `objective.normalize_std`. Every mean
and every deviation counts a rollout once, however many trajectories it has (law 13).

| credit | advantage of trajectory b of rollout i |
| --- | --- |
| episode | A_i |
| branches | A_i / B_i |
| roles | (s_i - b_i) / sigma, over the rollouts that have b's role |
| verifier | (v_ib - b_i) / sigma, over the rollouts that have b's role; v_ib is `Score.branches`, or s_i where that says nothing |
| counterfactual | (value_i - w_ib) / sigma, where w_ib is `Score.without`; A_i where that says nothing |
| siblings | (mean of s over D - mean of s over P) / sigma, turn by turn |

roles, verifier: with S_ib the score of a trajectory (s_i or v_ib), u_i is the mean of S_ib over the trajectories of the role in rollout i,
n the number of rollouts that have one, and m the mean of u. b_i is m with grpo, and the mean of the others' u with rloo; u_i where n is 1.
sigma^2 = sum_i mean_b (S_ib - m)^2 / max(n - 1, 1), and 1e-4 is added to sigma: with one trajectory a rollout this is GRPO, or RLOO.

counterfactual: difference rewards (Wolpert and Tumer 2002, Optimal payoff functions for members of collectives), as advantages in
Foerster et al. 2018, arXiv:1705.08926. sigma is the deviation of s over the group (n - 1) plus 1e-4, and 1 where all scores are equal.

siblings: D are the rollouts that share the turn, P those that shared the last turn before it that more rollouts have, or the whole group:
the group at the branch point. With rloo the second mean is over P without D. The sum of a path's differences is s_i less the group's
mean. Local advantages of a tree: Hou et al. 2025, arXiv:2506.11902. sigma as for counterfactual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.base.scores import all_equal
from agentrl.config.recipe import ObjectiveConfig
from agentrl.errors import RecipeError
from agentrl.objective.advantages import STD_EPS, sample_std
from agentrl.objective.branches import TurnKey, turn_key
from agentrl.records import ScoredEpisode, Trajectory

Credit = dict[str, list[list[float]]]
"""Episode id -> [trajectory][turn]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEpisode:
    """An episode that counts."""

    scored: ScoredEpisode
    score: float  # after penalties
    advantage: float

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        return self.scored.episode.trajectories


def branch_credit(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> Credit:
    """What every turn of a group's rollouts is given; NaN where the arithmetic leaves the range of a float.

    Raises `RecipeError` where `objective.credit` needs what a score does not say.
    """
    try:
        if objective.credit == "siblings":
            return _siblings(rollouts, objective)
        if objective.credit in ("roles", "verifier"):
            return _spread(rollouts, _by_role(rollouts, objective))
        if objective.credit == "counterfactual":
            return _spread(rollouts, _counterfactual(rollouts, objective))
        shares = [max(1, sum(map(_sampled, one.trajectories))) if objective.credit == "branches" else 1 for one in rollouts]
        return _spread(rollouts, [[one.advantage / share] * len(one.trajectories) for one, share in zip(rollouts, shares, strict=True)])
    except OverflowError:  # of math.fsum, and of a square
        return _spread(rollouts, [[math.nan] * len(one.trajectories) for one in rollouts])


def _spread(rollouts: Sequence[CountedEpisode], values: Sequence[Sequence[float]]) -> Credit:
    """The value of a trajectory on each of its turns."""
    return {
        one.scored.episode.id: [[value] * len(line.turns) for line, value in zip(one.trajectories, found, strict=True)]
        for one, found in zip(rollouts, values, strict=True)
    }


def _sampled(line: Trajectory) -> bool:
    return any(turn.completion_ids for turn in line.turns)


def _by_role(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> list[list[float]]:
    scores = [_own_scores(one) if objective.credit == "verifier" else [one.score] * len(one.trajectories) for one in rollouts]
    made = [[0.0] * len(one.trajectories) for one in rollouts]
    for role in sorted({line.agent for one in rollouts for line in one.trajectories}):
        places = [[at for at, line in enumerate(one.trajectories) if line.agent == role and _sampled(line)] for one in rollouts]
        for number, advantages in _against_role(scores, places, objective).items():
            for at, value in zip(places[number], advantages, strict=True):
                made[number][at] = value
    return made


def _against_role(scores: Sequence[Sequence[float]], places: Sequence[Sequence[int]], objective: ObjectiveConfig) -> dict[int, list[float]]:
    """Rollout -> advantages of its trajectories of one role, which are at `places` in it."""
    given = {number: [scores[number][at] for at in found] for number, found in enumerate(places) if found}
    every = [score for some in given.values() for score in some]
    if not every or all_equal(every):
        return {number: [0.0] * len(some) for number, some in given.items()}
    means = {number: fmean(some) for number, some in given.items()}
    mean, n = fmean(means.values()), len(means)
    spread = math.fsum(fmean((score - mean) ** 2 for score in some) for some in given.values()) / max(n - 1, 1)
    scale = math.sqrt(spread) + STD_EPS if objective.divides_by_std else 1.0
    leaves_out = objective.advantage == "rloo" and n > 1
    total = math.fsum(means.values())
    return {
        number: [(score - ((total - means[number]) / (n - 1) if leaves_out else mean)) / scale for score in some]
        for number, some in given.items()
    }


def _own_scores(one: CountedEpisode) -> list[float]:
    """What each trajectory is worth by itself: v_ib, or s_i."""
    judged = _said(one, one.scored.score.branches, "branches")
    return [one.score if value is None else value for value in judged]


def _counterfactual(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> list[list[float]]:
    scale, made = _deviation([one.score for one in rollouts], objective), []
    for one in rollouts:
        value, without = one.scored.score.value, _said(one, one.scored.score.without, "without")
        assert value is not None, "a rollout that counts has a score"
        made.append([one.advantage if left is None else _difference(value, left) / scale for left in without])
    return made


def _said(one: CountedEpisode, given: Sequence[float | None], name: str) -> Sequence[float | None]:
    """What the score says of each trajectory. One that is alone needs nothing said."""
    if not given and sum(map(_sampled, one.trajectories)) > 1:
        raise RecipeError(
            f"objective.credit: the score of episode {one.scored.episode.id}, which has several trajectories, has no {name}",
            fix=f"return Score({name}=...) from the verifier, a number or None for each trajectory, or set objective.credit=episode",
        )
    return given or [None] * len(one.trajectories)


def _siblings(rollouts: Sequence[CountedEpisode], objective: ObjectiveConfig) -> Credit:
    """The rollouts that share each turn, against those that shared the way to it."""
    sharing: dict[TurnKey, set[int]] = {}
    for number, one in enumerate(rollouts):
        for key in _keys(one).values():
            sharing.setdefault(key, set()).add(number)
    scores, scale = [one.score for one in rollouts], _deviation([one.score for one in rollouts], objective)
    everyone = set(range(len(rollouts)))
    made: Credit = {}
    for one in rollouts:
        above: dict[tuple[int, int], set[int]] = {}  # turn -> P of it
        keys = _keys(one)
        made[one.scored.episode.id] = [[0.0] * len(line.turns) for line in one.trajectories]
        for place, key in keys.items():  # parents stand before their children
            before = _before(one, place)
            shared = sharing[key]
            group = everyone if before is None else sharing[keys[before]] if sharing[keys[before]] > shared else above[before]
            above[place] = group
            rest = group - shared if objective.advantage == "rloo" else group
            if rest:
                made[one.scored.episode.id][place[0]][place[1]] = _difference(_mean(scores, shared), _mean(scores, rest)) / scale
    return made


def _keys(one: CountedEpisode) -> dict[tuple[int, int], TurnKey]:
    """(trajectory, turn) -> what identifies the turn over the rollouts that share it."""
    episode = one.scored.episode
    return {(at, turn): turn_key(episode.id, at, line, turn) for at, line in enumerate(one.trajectories) for turn in range(len(line.turns))}


def _before(one: CountedEpisode, place: tuple[int, int]) -> tuple[int, int] | None:
    """The turn that a turn follows, in its trajectory or in that of its parent."""
    at, turn = place
    parent = one.trajectories[at].parent
    if turn:
        return at, turn - 1
    return None if parent is None else (parent.trajectory, parent.turn)


def _difference(one: float, other: float) -> float:
    """Exactly zero if two scores are equal up to rounding."""
    return 0.0 if all_equal((one, other)) else one - other


def _mean(scores: Sequence[float], numbers: set[int]) -> float:
    return fmean(scores[number] for number in sorted(numbers))


def _deviation(scores: Sequence[float], objective: ObjectiveConfig) -> float:
    """sigma of scores, one for each rollout."""
    if not objective.divides_by_std or all_equal(scores):
        return 1.0
    return sample_std(scores) + STD_EPS


def penalized_score(scored: ScoredEpisode, penalties: Mapping[str, float]) -> float:
    """s_i: an episode's score less its penalty."""
    assert scored.score.value is not None, "it counts"
    return scored.score.value - penalties.get(scored.episode.id, 0.0)
