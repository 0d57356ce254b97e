"""Advantages of whole episodes: how much better an attempt did than others. Plain float64 arithmetic on scores.

The three estimators are functions of a list of scores. `batch_advantages` applies the one that the recipe chose to the groups of a
step and says which groups teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.recipe import ObjectiveConfig
from agentrl.records import Group

STD_EPS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of one group, aligned with `Group.episodes`; either every counted episode has one or none has."""

    values: tuple[float | None, ...]  # [E] None where the episode is left out or unscored
    dropped: str = ""  # why the group teaches nothing; empty when it does

    @property
    def useful(self) -> bool:
        return not self.dropped


def grpo(scores: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Scores of one group against their mean.

        A_i = (s_i - mean(s)) / (std(s) + 1e-4),   std with n - 1 in the denominator

    GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. Without `normalize_std` A_i = s_i - mean(s): Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783, eq. 4. One score alone gives 0.
    """
    mean = fmean(scores)
    return _scaled([score - mean for score in scores], scores, normalize_std)


def rloo(scores: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Scores of one group, each against the mean of the others, which makes the baseline independent of the sample.

        A_i = s_i - sum_{j != i} s_j / (n - 1)

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 8; divided by std(s) + 1e-4 where `normalize_std` asks for it. One score alone
    has no others and gives 0.
    """
    n, total = len(scores), math.fsum(scores)
    if n == 1:
        return [0.0]
    return _scaled([score - (total - score) / (n - 1) for score in scores], scores, normalize_std)


def reinforce_plus_plus(scores: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Scores of a whole batch against the batch's mean, whatever task they belong to.

        A_i = (s_i - mean(s)) / (std(s) + 1e-4)    over all counted episodes of the batch

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: global instead of group normalization. The unit is the episode, so that long ones
    do not move the baseline more than short ones. Given scores that already have their group's mean taken off, this is the paper's
    REINFORCE++-baseline.
    """
    return grpo(scores, normalize_std=normalize_std)


def batch_advantages(
    groups: Sequence[Group],
    objective: ObjectiveConfig,
    *,
    min_group_size: int,
    penalties: Mapping[str, float] | None = None,
) -> list[GroupAdvantages]:
    """Advantage of each episode of a step, by the estimator `objective.advantage`.

    Episodes that are unscored, or left out for an infrastructure or task failure, get None and are part of no mean. A group is
    dropped, with the reason, when fewer than `min_group_size` episodes count, when a score is infinite, or when all its advantages
    would be zero: under a group baseline when all its scores are equal, under the batch's when all scores of the batch are.

    Args:
        penalties: subtracted from the score of the episode with that id (the KL term of the reward).
    """
    taken = penalties or {}
    scores = [_counted(group, taken) for group in groups]
    reasons = [_refusal(some, min_group_size) for some in scores]
    usable = [some if not reason else {} for some, reason in zip(scores, reasons, strict=True)]
    estimates = _estimate(usable, objective)
    made = []
    for group, some, reason, estimate in zip(groups, scores, reasons, estimates, strict=True):
        empty = reason or ("" if objective.advantage == "gae" or any(estimate.values()) else "all_equal")
        values = tuple(None if empty or place not in some else estimate[place] for place in range(len(group.episodes)))
        made.append(GroupAdvantages(values=values, dropped=empty))
    return made


def _counted(group: Group, penalties: Mapping[str, float]) -> dict[int, float]:
    """Place in the group -> score, of the episodes that count."""
    return {
        place: scored.score.value - penalties.get(scored.episode.id, 0.0)
        for place, scored in enumerate(group.episodes)
        if scored.score.value is not None and not scored.episode.left_out
    }


def _refusal(scores: Mapping[int, float], min_group_size: int) -> str:
    if len(scores) < max(min_group_size, 1):
        return f"too_few: {len(scores)} scored episodes, {max(min_group_size, 1)} needed"
    if not all(map(math.isfinite, scores.values())):
        return "non_finite_score"
    return ""


def _estimate(groups: Sequence[Mapping[int, float]], objective: ObjectiveConfig) -> list[dict[int, float]]:
    """Advantages of each group, aligned with its scores; groups without scores stay empty."""
    by_std = objective.divides_by_std
    match objective.advantage:
        case "grpo":
            return [_keyed(some, _or_nan(grpo, _listed(some), by_std)) if some else {} for some in groups]
        case "rloo":
            return [_keyed(some, _or_nan(rloo, _listed(some), by_std)) if some else {} for some in groups]
        case "gae":  # the scores themselves: a critic supplies the baseline, token by token
            return [dict(some) for some in groups]
        case "reinforce++":
            return _over_batch(groups, by_std)
        case "reinforce++-baseline":
            centred = [_keyed(some, _or_nan(grpo, _listed(some), False)) if some else {} for some in groups]
            made = _over_batch(centred, by_std)
            # The mean of centred scores is rounding noise; it must not turn a group without a preference into one with.
            return [found if any(some.values()) else dict.fromkeys(found, 0.0) for some, found in zip(centred, made, strict=True)]


def _over_batch(groups: Sequence[Mapping[int, float]], normalize_std: bool) -> list[dict[int, float]]:
    flat = [score for some in groups for score in some.values()]
    values = iter(_or_nan(reinforce_plus_plus, flat, normalize_std) if flat else ())
    return [{place: next(values) for place in some} for some in groups]


def _or_nan(estimator: Callable[..., list[float]], scores: Sequence[float], normalize_std: bool) -> list[float]:
    """NaN for each score where the arithmetic leaves the range of a float; `assemble` sets such groups aside."""
    try:
        return estimator(scores, normalize_std=normalize_std)
    except (OverflowError, ValueError):  # of math.fsum, and of the square in a variance
        return [math.nan] * len(scores)


def _listed(scores: Mapping[int, float]) -> list[float]:
    return list(scores.values())


def _keyed(scores: Mapping[int, float], values: Sequence[float]) -> dict[int, float]:
    return dict(zip(scores, values, strict=True))


def _scaled(centred: list[float], scores: Sequence[float], normalize_std: bool) -> list[float]:
    """Divided by the sample standard deviation of the scores. Equal scores give exact zeros, not rounding noise made large."""
    if min(scores) == max(scores):
        return [0.0] * len(scores)
    scale = sample_std(scores) + STD_EPS if normalize_std else 1.0
    return [value / scale for value in centred]


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator; at least two values."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
