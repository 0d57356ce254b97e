"""Group-relative advantages: how much better an episode did than the other attempts at the same task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

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


def group_advantages(group: Group, *, normalize_std: bool, min_group_size: int) -> GroupAdvantages:
    """Advantage of each episode over its group's mean score, in float64.

    With scores s of the n episodes that count (scored, and not left out for an infrastructure or task failure):

        A_i = (s_i - mean(s)) / (std(s) + 1e-4),   std with n - 1 in the denominator

    (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 2); without `normalize_std` A_i = s_i - mean(s) (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783). Episodes that do not count get None and are not part of the mean.

    A group is dropped, with the reason, when fewer than `min_group_size` episodes count, when a score is infinite, or when all
    scores are equal: then there is no preference to learn from.
    """
    counted = [(e.score.value if not e.episode.left_out else None) for e in group.episodes]
    scores = [value for value in counted if value is not None]
    reason = _refusal(scores, min_group_size)
    if reason:
        return GroupAdvantages(values=(None,) * len(counted), dropped=reason)
    mean = fmean(scores)
    scale = _sample_std(scores, mean) + STD_EPS if normalize_std else 1.0
    return GroupAdvantages(values=tuple(None if value is None else (value - mean) / scale for value in counted))


def _refusal(scores: list[float], min_group_size: int) -> str:
    if len(scores) < max(min_group_size, 1):
        return f"too_few: {len(scores)} scored episodes, {max(min_group_size, 1)} needed"
    if not all(map(math.isfinite, scores)):
        return "non_finite_score"
    if min(scores) == max(scores):
        return "all_equal"
    return ""


def _sample_std(scores: list[float], mean: float) -> float:
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
