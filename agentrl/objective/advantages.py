"""Advantages of episodes, in float64.

An estimator (`agentrl.protocols.AdvantageEstimator`) is a function of the scores of a step's groups. `batch_advantages` applies the
estimator in the recipe, built-in or user-supplied, and drops groups without a learning signal. If the arithmetic overflows, a built-in
estimator returns NaN, and `agentrl.objective.samples.assemble` drops the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from agentrl.base.error_text import one_line_error, raise_location
from agentrl.base.numbers import all_equal, all_negligible
from agentrl.base.user_code import raising_as
from agentrl.config.recipe import ObjectiveConfig
from agentrl.errors import PluginError
from agentrl.plugins import parts
from agentrl.protocols import AdvantageEstimator
from agentrl.records import Group

STD_EPS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of one group, aligned with `Group.episodes`. Either every counted episode has an advantage, or none has."""

    values: tuple[float | None, ...]  # [E] None if the episode is excluded or unscored
    drop_reason: str = ""  # why the group has no learning signal; empty if it has one


Groups = Sequence[Sequence[float]]


def grpo(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """Compares each score with the mean of its group.

        A_i = (s_i - mean(s)) / (std(s) + 1e-4),   std with n - 1 in the denominator

    GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. If `normalize_std` is False, A_i = s_i - mean(s): Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783, eq. 4. The advantage of a single score is 0.
    """
    return [_centred(scores, normalize_std) for scores in groups]


def rloo(groups: Groups, *, normalize_std: bool = False) -> list[list[float]]:
    """Compares each score with the mean of the other scores in its group, so the baseline is independent of the sample.

        A_i = s_i - sum_{j != i} s_j / (n - 1)

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 8. If `normalize_std` is True, A_i is divided by std(s) + 1e-4. The advantage of a
    single score is 0.
    """
    return [_without_itself(scores, normalize_std) for scores in groups]


def reinforce_plus_plus(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """Compares each score with the mean over all counted episodes of the batch.

        A_i = (s_i - mean(s)) / (std(s) + 1e-4)

    REINFORCE++, Hu et al. 2025, arXiv:2501.03262: global instead of group normalization. Long episodes count as much as short ones.
    """
    values = iter(_centred([score for scores in groups for score in scores], normalize_std))
    return [[next(values) for _ in scores] for scores in groups]


def reinforce_plus_plus_baseline(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """Applies `reinforce_plus_plus` to the scores minus the mean of their group: the paper's REINFORCE++-baseline.

    The mean of the centred scores is rounding noise, so a group whose centred scores are all zero is assigned zeros.
    """
    centred = grpo(groups, normalize_std=False)
    scaled = reinforce_plus_plus(centred, normalize_std=normalize_std)
    return [values if any(before) else [0.0] * len(before) for before, values in zip(centred, scaled, strict=True)]


def rewards_for_a_critic(groups: Groups, *, normalize_std: bool = True) -> list[list[float]]:
    """Returns the scores unchanged, because a critic supplies the baseline for each token and the whitening (`agentrl.learner.critic`)."""
    return [list(scores) for scores in groups]


def batch_advantages(
    groups: Sequence[Group], objective: ObjectiveConfig, *, min_group_size: int, penalties: Mapping[str, float] | None = None
) -> list[GroupAdvantages]:
    """Computes the advantage of each episode of a step with the estimator in `objective.advantage`.

    Unscored or excluded episodes are assigned None and are not included in any mean. A group is dropped, with the reason, if fewer than
    `min_group_size` episodes (or none) count, if a score is not finite, or, except with `gae`, if all its advantages would be zero up to
    rounding (`agentrl.base.numbers`).

    Args:
        penalties: episode id -> penalty (the KL term of the reward), which is subtracted from the episode's score.

    Raises:
        PluginError: the estimator cannot be loaded, raised an exception, or returned a wrong shape or type.
    """
    scores = [_counted(group, penalties or {}) for group in groups]
    reasons = [_drop_reason(counted, min_group_size) for counted in scores]
    usable = [list(counted.values()) for counted, reason in zip(scores, reasons, strict=True) if not reason]
    estimates = iter(_estimate(load_estimator(objective), usable, objective.advantage.ref) if usable else [])
    advantages = []
    for group, counted, reason in zip(groups, scores, reasons, strict=True):
        estimate = {} if reason else dict(zip(counted, next(estimates), strict=True))
        if not reason and objective.advantage.ref != "gae" and is_zero_credit(estimate.values(), counted.values(), objective):
            reason, estimate = "all_equal", {}
        values = tuple(estimate.get(index) for index in range(len(group.episodes)))
        advantages.append(GroupAdvantages(values=values, drop_reason=reason))
    return advantages


def is_zero_credit(credits: Iterable[float], scores: Iterable[float], objective: ObjectiveConfig) -> bool:
    """Whether all credits are zero up to rounding. The bound grows with the scores unless credits are divided by a standard deviation."""
    return all_negligible(credits, () if objective.divides_by_std else scores)


def _counted(group: Group, penalties: Mapping[str, float]) -> dict[int, float]:
    """Returns a mapping from the index of each counted episode in the group to its score minus its penalty."""
    return {
        index: scored.score.value - penalties.get(scored.episode.id, 0.0)
        for index, scored in enumerate(group.episodes)
        if scored.score.value is not None and not scored.episode.left_out
    }


def _drop_reason(scores: Mapping[int, float], min_group_size: int) -> str:
    if len(scores) < max(min_group_size, 1):
        return f"too_few: {len(scores)} scored episodes, {max(min_group_size, 1)} needed"
    if not all(map(math.isfinite, scores.values())):
        return "non_finite_score"
    return ""


def load_estimator(objective: ObjectiveConfig) -> AdvantageEstimator:
    """Returns the estimator that a recipe selects. Raises `PluginError` if the estimator cannot be resolved or does not implement the
    protocol."""
    function = parts.load_part(parts.ADVANTAGE, objective.advantage)
    shipped = objective.advantage.ref in parts.ADVANTAGE.shipped
    estimator: AdvantageEstimator = partial(function, normalize_std=objective.divides_by_std) if shipped else function
    return estimator


def check_advantages(result: object, groups: Groups) -> list[list[float]]:
    """Returns an estimator's result for these groups as lists of floats. Raises `ValueError` if the shape or a type in the result is
    wrong."""
    if not isinstance(result, Sequence) or len(result) != len(groups):
        raise ValueError(f"{len(groups)} groups need {len(groups)} lists, not {_shape(result)}")
    for number, (values, scores) in enumerate(zip(result, groups, strict=True)):
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(scores):
            raise ValueError(f"group {number} of {len(scores)} scores needs {len(scores)} advantages, not {_shape(values)}")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"group {number} contains {_shape(value)} instead of a float")
    return [[float(value) for value in values] for values in result]


def _shape(value: object) -> str:
    try:
        return f"a {type(value).__name__} of {len(value)}"  # type: ignore[arg-type]
    except TypeError:
        return f"a value of type {type(value).__name__}"


def _estimate(function: AdvantageEstimator, scores: list[list[float]], name: str) -> list[list[float]]:
    def failed(error: BaseException) -> PluginError:
        cause = f"{one_line_error(error)} ({raise_location(error)})"
        return PluginError(f"objective.advantage {name!r} failed on {len(scores)} groups: {cause}", fix="correct it there")

    with raising_as(failed):
        return check_advantages(function(scores), scores)


def _centred(scores: Sequence[float], normalize_std: bool) -> list[float]:
    """Returns the scores minus their mean, or NaN for each score if the arithmetic overflows, so that `assemble` excludes the group."""
    try:
        mean = fmean(scores)
        return _scaled([score - mean for score in scores], scores, normalize_std)
    except (OverflowError, ValueError):  # raised by math.fsum, and by the square in a variance
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
    """Returns `centred` divided by the sample standard deviation of the scores. If the scores are equal up to
    rounding, returns exact zeros."""
    if all_equal(scores):
        return [0.0] * len(scores)
    scale = sample_std(scores) + STD_EPS if normalize_std else 1.0
    return [value / scale for value in centred]


def sample_std(values: Sequence[float]) -> float:
    """Returns the standard deviation of at least two values, with n - 1 in the denominator. Raises `OverflowError` if a square is too
    large."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
