"""Residuals: late parts of scores that are applied after their group was trained.

A group whose late parts are all residual (`PendingPart.residual`) is not parked. The store splits it into two groups, in one commit:

- index `i`, the first group: the attempts with the known parts of their scores. This group is trained like any other group.
- index `-1 - i`, its residual: the same attempts. Each of its scores is the weighted sum of the late parts alone. The residual is parked
  until all late parts have arrived or expired. The residual is trained in a later step than the first group.

The advantages of GRPO and RLOO without division by the standard deviation are linear in the scores, so the two advantages of an episode add
up to the advantage of its complete score:

    A_i(early + late) = A_i(early) + A_i(late),   A_i(late) = late_i - mean(late)

The residual is trained with the behaviour logprobs of its tokens, and with the ratio, clipping and correction that the recipe configures.
This yields the policy gradient of the late part under the weights of that step. If a part of an episode expires, the episode has no
residual and is excluded from the means. Each sampled token counts once, with its first group. The tokens of residuals are reported
separately.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.recipe import Recipe
from agentrl.records import Group, Score, ScoredEpisode


def split_group(group: Group) -> tuple[Group, ...]:
    """Returns the groups that are stored for a new group: the group alone or, if all parts that it waits for are residual, two groups."""
    parts = [part for _, _, part in group.pending]
    if not parts or not all(part.residual for part in parts):
        return (group,)
    late = tuple(ScoredEpisode(episode=episode.episode, score=_late_score(episode.score)) for episode in group.episodes)
    early = tuple(replace(episode, score=_early_score(episode.score)) for episode in group.episodes)
    return replace(group, episodes=early), replace(group, index=-1 - group.index, episodes=late, cancelled=())


def _early_score(score: Score) -> Score:
    return replace(score, value=score.partial, partial=0.0, pending=(), reason="", blame=None) if score.pending else score


def _late_score(score: Score) -> Score:
    if score.pending:
        return Score(value=None, pending=score.pending)
    return Score(value=None, reason=score.reason or "no part of the score is late", blame=score.blame)


def why_no_residuals(recipe: Recipe) -> str:
    """Returns a text that names the setting that prevents residuals, and the reason; empty if no setting prevents them.

    The advantages must be linear in the scores. A setting that selects groups or tasks by score would use only the early parts.
    """
    if recipe.rollout.extra_groups or recipe.tasks.weighting:
        setting = "rollout.extra_groups" if recipe.rollout.extra_groups else "tasks.weighting"
        return f"{setting}, which would use the scores without the late parts"
    nonlinear = _why_not_linear(recipe)
    return f"{nonlinear}: advantages must be linear in the score" if nonlinear else ""


def _why_not_linear(recipe: Recipe) -> str:
    objective = recipe.objective
    if objective.advantage.ref not in ("grpo", "rloo"):
        return f"objective.advantage={objective.advantage.ref}"
    if objective.divides_by_std:
        return "division by the standard deviation (set objective.normalize_std=false)"
    if objective.turn_coef or objective.credit != "episode":
        return "objective.turn_coef and objective.credit"
    return "objective.kl=k1_reward" if objective.kl == "k1_reward" else ""
