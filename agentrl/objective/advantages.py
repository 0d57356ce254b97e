"""Advantages of whole episodes: how much better an attempt did than the others. Plain float64 arithmetic on scores.

An estimator is an `agentrl.protocols.AdvantageEstimator`: a function of the scores of a step's groups. `batch_advantages` applies the
one that the recipe names, one of these or anybody's, and says which groups teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.base.error_text import one_line_error, raise_location
from agentrl.base.scores import all_equal, all_negligible
from agentrl.config.recipe import ObjectiveConfig
from agentrl.errors import PluginError
from agentrl.plugins import parts
from agentrl.protocols import AdvantageEstimator
from agentrl.records import Group

STD_EPS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of one group, aligned with `Group.episodes`; either every counted episode has one or none does."""

    values: tuple[float | None, ...]  # [E] None where the episode is left out or unscored
    drop_reason: str = ""  # why the group has no learning signal; empty when it has one

    @property
    def useful(self) -> bool:
        return not self.drop_reason


Groups = Sequence[Sequence[float]]


def grpo(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """Scores against the mean of their group.

        A_i = (s_i - mean(s)) / (std(s) + 1e-4),   std with n - 1 in the denominator

    GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. Without `normalize_std` A_i = s_i - mean(s): Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783, eq. 4. A single score gives 0.
    """
    return [_centred(scores, normalize_std) for scores in groups]


def rloo(groups: Groups, *, normalize_std: bool = False) -> list[list[float]]:
    """Scores against the mean of the others in their group, which makes the baseline independent of the sample.

        A_i = s_i - sum_{j != i} s_j / (n - 1)

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 8; divided by std(s) + 1e-4 with `normalize_std`. A single score gives 0.
    """
    return [_without_itself(scores, normalize_std) for scores in groups]


def reinforce_plus_plus(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """Scores of a whole batch against the batch's mean, whatever task they belong to.

        A_i = (s_i - mean(s)) / (std(s) + 1e-4)    over all counted episodes of the batch

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: global instead of group normalization. The unit is the episode, so that long ones
    do not move the baseline more than short ones.
    """
    values = iter(_centred([score for scores in groups for score in scores], normalize_std))
    return [[next(values) for _ in scores] for scores in groups]


def reinforce_plus_plus_baseline(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """`reinforce_plus_plus` of scores that have their group's mean taken off: the paper's REINFORCE++-baseline.

    The mean of centred scores is rounding noise; it must not turn a group without a preference into one with.
    """
    centred = grpo(groups, normalize_std=False)
    made = reinforce_plus_plus(centred, normalize_std=normalize_std)
    return [found if any(before) else [0.0] * len(before) for before, found in zip(centred, made, strict=True)]


def rewards_for_a_critic(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """The scores themselves: a critic supplies the baseline, token by token, and whitening is its own (`agentrl.learner.critic`)."""
    return [list(scores) for scores in groups]


def batch_advantages(
    groups: Sequence[Group],
    objective: ObjectiveConfig,
    *,
    min_group_size: int,
    penalties: Mapping[str, float] | None = None,
) -> list[GroupAdvantages]:
    """Advantage of each episode of a step, by the estimator that `objective.advantage` names.

    Episodes that are unscored, or left out for an infrastructure or task failure, get None and count in no mean. A group is
    dropped, with the reason, when fewer than `min_group_size` episodes count, when a score is infinite, or when all its advantages
    would be zero up to rounding (`agentrl.base.scores`): with a group baseline if its scores are equal, with a batch baseline if all
    scores of the batch are.

    Args:
        penalties: subtracted from the score of the episode with that id (the KL term of the reward).

    Raises:
        PluginError: an estimator of the user's raised, or gave something of another shape.
    """
    scores = [_counted(group, penalties or {}) for group in groups]
    reasons = [_refusal(some, min_group_size) for some in scores]
    usable = [some if not reason else {} for some, reason in zip(scores, reasons, strict=True)]
    estimates = _estimate(usable, objective)
    advantages = []
    for group, some, reason, estimate in zip(groups, scores, reasons, estimates, strict=True):
        empty = reason or ("" if objective.advantage == "gae" or not all_negligible(estimate.values(), some.values()) else "all_equal")
        values = tuple(None if empty or index not in some else estimate[index] for index in range(len(group.episodes)))
        advantages.append(GroupAdvantages(values=values, drop_reason=empty))
    return advantages


def _counted(group: Group, penalties: Mapping[str, float]) -> dict[int, float]:
    """Index in the group -> score, for the episodes that count."""
    return {
        index: scored.score.value - penalties.get(scored.episode.id, 0.0)
        for index, scored in enumerate(group.episodes)
        if scored.score.value is not None and not scored.episode.left_out
    }


def _refusal(scores: Mapping[int, float], min_group_size: int) -> str:
    if len(scores) < max(min_group_size, 1):
        return f"too_few: {len(scores)} scored episodes, {max(min_group_size, 1)} needed"
    if not all(map(math.isfinite, scores.values())):
        return "non_finite_score"
    return ""


def load_estimator(objective: ObjectiveConfig) -> AdvantageEstimator:
    """The estimator that a recipe names. Raises `PluginError` for one that does not resolve or does not fulfil the protocol."""
    ours = objective.advantage in parts.ADVANTAGE.shipped
    options = {"normalize_std": objective.divides_by_std} if ours else objective.advantage_options
    found: AdvantageEstimator = parts.load_part(parts.ADVANTAGE, objective.advantage, options)
    return found


def check_advantages(made: object, groups: Groups) -> list[list[float]]:
    """What an estimator gave for these groups, as lists of floats. Raises `ValueError` saying what is wrong with its shape."""
    if not isinstance(made, Sequence) or len(made) != len(groups):
        raise ValueError(f"{len(groups)} groups want {len(groups)} lists, not {_shape(made)}")
    for number, (ours, theirs) in enumerate(zip(made, groups, strict=True)):
        if not isinstance(ours, Sequence) or isinstance(ours, str) or len(ours) != len(theirs):
            raise ValueError(f"group {number} of {len(theirs)} scores wants {len(theirs)} advantages, not {_shape(ours)}")
        for value in ours:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"group {number} holds {_shape(value)} where a float is wanted")
    return [[float(value) for value in values] for values in made]


def _shape(value: object) -> str:
    try:
        return f"a {type(value).__name__} of {len(value)}"  # type: ignore[arg-type]
    except TypeError:
        return f"a value of type {type(value).__name__}"


def _estimate(groups: Sequence[Mapping[int, float]], objective: ObjectiveConfig) -> list[dict[int, float]]:
    """Advantages of each group, aligned with its scores; groups without scores stay empty."""
    scores = [list(some.values()) for some in groups if some]
    found = iter(_called(load_estimator(objective), scores, objective.advantage) if scores else [])
    return [dict(zip(some, next(found), strict=True)) if some else {} for some in groups]


def _called(function: AdvantageEstimator, scores: list[list[float]], name: str) -> list[list[float]]:
    if name in parts.ADVANTAGE.shipped:
        return [list(values) for values in function(scores)]
    try:
        return check_advantages(function(scores), scores)
    except Exception as error:
        told = f"{one_line_error(error)} ({raise_location(error)})"
        raise PluginError(f"objective.advantage {name!r} failed on {len(scores)} groups: {told}", fix="correct it there") from error


def _centred(scores: Sequence[float], normalize_std: bool) -> list[float]:
    """Against their mean; NaN for each where the arithmetic leaves the range of a float, so that `assemble` leaves the group out."""
    try:
        mean = fmean(scores)
        return _scaled([score - mean for score in scores], scores, normalize_std)
    except (OverflowError, ValueError):  # of math.fsum, and of the square in a variance
        return [math.nan] * len(scores)


def _without_itself(scores: Sequence[float], normalize_std: bool) -> list[float]:
    n = len(scores)
    if n == 1:
        return [0.0]
    try:
        total = math.fsum(scores)
        return _scaled([score - (total - score) / (n - 1) for score in scores], scores, normalize_std)
    except (OverflowError, ValueError):
        return [math.nan] * n


def _scaled(centred: list[float], scores: Sequence[float], normalize_std: bool) -> list[float]:
    """Divides by the sample standard deviation of the scores. Scores that are equal up to rounding give exact zeros."""
    if all_equal(scores):
        return [0.0] * len(scores)
    scale = sample_std(scores) + STD_EPS if normalize_std else 1.0
    return [value / scale for value in centred]


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator; at least two values."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
