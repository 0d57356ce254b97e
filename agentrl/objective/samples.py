"""Turns scored groups into the token sequences of one learner step.

Every sampled token of a counted episode is trained exactly once, with the id and logprob that it was sampled with. Prompts, tool output and
inserted tokens (`Turn.forced`) are context and are never trained. Turns that branched episodes share are trained in one of these episodes
(`agentrl.objective.branches`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.config.recipe import ObjectiveConfig, Recipe
from agentrl.errors import RecipeError
from agentrl.objective.advantages import GroupAdvantages, batch_advantages, is_zero_credit
from agentrl.objective.branches import CreditedTrajectory, assign_shared_turns
from agentrl.objective.credit import CountedEpisode, branch_credit, continuations, penalized_score, turn_advantages
from agentrl.records import Batch, Episode, Group, Sample, Trajectory
from agentrl.records.sampling import Supports

_LARGEST = 3.4028234663852886e38  # largest float32, the dtype of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledBatch:
    """A batch, and the reason for each of its groups that has no samples."""

    batch: Batch
    drop_reasons: Mapping[int, str]  # group index -> reason


def assemble(step: int, groups: Sequence[Group], recipe: Recipe, *, penalties: Mapping[str, float] | None = None) -> AssembledBatch:
    """Returns one sample per trajectory that trains a token, for every counted episode, and the reason for each group without samples.

    A group is dropped if its task is broken, if it has a non-finite score or logprob, or if a trajectory starts without a prompt or exceeds
    the policy's context. Such a group is dropped completely, before any mean is computed, because dropping individual episodes would shift
    its baseline. A group is also dropped if too few of its episodes count, if it has no learning signal, or if its advantages are not
    finite in float32. `Batch.group_indices` contains all groups, because the step consumes them.

    Args:
        penalties: episode id -> penalty, which is subtracted from the episode's score; see `counted_samples`.

    Raises:
        RecipeError: a score lacks what `objective.turn_coef` or `objective.credit` needs.
        PluginError: see `batch_advantages`.
    """
    dropped = {group.index: reason for group in groups if (reason := _unfit(group, recipe.policy.max_model_len))}
    fit = [group for group in groups if group.index not in dropped]
    samples: list[Sample] = []
    advantages = batch_advantages(fit, recipe.objective, min_group_size=recipe.rollout.group.min_size, penalties=penalties)
    for group, estimate in zip(fit, advantages, strict=True):
        own, reason = _group_samples(group, estimate, recipe.objective, penalties or {})
        samples.extend(_with_rollout_tokens(own))
        if reason:
            dropped[group.index] = reason
    batch = Batch(
        step=step,
        samples=tuple(samples),
        denominator=sum(sum(sample.loss_mask) for sample in samples),
        group_indices=tuple(group.index for group in groups),
    )
    return AssembledBatch(batch=batch, drop_reasons=dropped)


def scale_for_residuals(batch: Batch, recipe: Recipe) -> Batch:
    """Returns the batch of one optimizer step with scaled advantages, so that residuals (samples of groups with a negative index) do not
    dilute the tokens of other groups.

    The loss divides by D, which counts tokens or rollouts of all samples. The tokens and rollouts of residuals were already
    counted in the step of their first group. Therefore, the scaled loss divides by the residuals' share of D or by the share of the other
    samples, whichever is larger.
    """
    samples = batch.samples
    residual = [sample for sample in samples if sample.group_index < 0]
    if not residual:
        return batch
    from agentrl.objective.losses import loss_denominator  # imports torch

    others = [sample for sample in samples if sample.group_index >= 0]
    aggregation, length = recipe.objective.aggregation, recipe.policy.max_model_len
    every, *shares = (loss_denominator(part, aggregation, length=length) for part in (samples, residual, others))
    factor = every / max(shares)
    scaled = (replace(sample, advantages=tuple(factor * value for value in sample.advantages)) for sample in samples)
    return replace(batch, samples=tuple(scaled))


def counted_samples(groups: Sequence[Group], *, longest: int | None = None) -> tuple[Sample, ...]:
    """Returns the token sequences of every counted episode, with advantages of zero, for computing penalties on scores. Excludes the groups
    that `assemble` drops whatever their scores.

    `longest`: length of the policy's context in tokens; None means no limit.
    """
    return tuple(
        _sample(scored.episode.id, group.index, trajectory, [0.0] * len(trajectory.turns))
        for group in groups
        if not _unfit(group, longest)
        for scored in group.scored
        for trajectory in scored.episode.trajectories
        if any(turn.completion_ids for turn in trajectory.turns)
    )


def _unfit(group: Group, longest: int | None) -> str:
    """Returns the reason why no token of the group can be trained, whatever its scores; empty if its tokens can be trained."""
    if group.fault is not None:
        return "broken_task"
    for scored in group.scored:
        if not all(math.isfinite(reward) for rewards in scored.score.turn_rewards for reward in rewards):
            return "non_finite_score"
        if reason := _fault(scored.episode, longest):
            return f"{reason} in episode {scored.episode.id}"
    turns = [turn for scored in group.scored for trajectory in scored.episode.trajectories for turn in trajectory.turns]
    return "" if not group.scored or any(turn.completion_ids for turn in turns) else "no_sampled_token"


def _with_rollout_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """Sets `rollout_tokens` in the samples of rollouts that have several samples."""
    lengths: dict[str, list[int]] = {}
    for sample in samples:
        lengths.setdefault(sample.episode_id, []).append(sum(sample.loss_mask))
    return [replace(s, rollout_tokens=sum(own)) if len(own := lengths[s.episode_id]) > 1 else s for s in samples]


def _group_samples(
    group: Group, estimate: GroupAdvantages, objective: ObjectiveConfig, penalties: Mapping[str, float]
) -> tuple[list[Sample], str]:
    """Returns the samples of a group, and the reason if the group has no samples.

    A group with equal scores has a signal if turns or branches receive credit, or if there is an entropy bonus: without the bonus,
    a policy that became deterministic in some state would stay deterministic.
    """
    if estimate.drop_reason and estimate.drop_reason != "all_equal":
        return [], estimate.drop_reason
    turns = _turn_credit(group, objective)
    rollouts = [
        CountedEpisode(scored=scored, score=penalized_score(scored, penalties), advantage=value or 0.0)
        for scored, value in zip(group.episodes, estimate.values, strict=True)
        if not scored.episode.left_out and scored.score.value is not None
    ]
    critic = objective.advantage.ref == "gae"
    branches = {} if critic else branch_credit(rollouts, objective)
    credits = [value for table in (turns, branches) for rows in table.values() for row in rows for value in row]
    if not critic and not objective.entropy_coef and is_zero_credit(credits, [rollout.score for rollout in rollouts], objective):
        return [], "all_equal"
    trajectories, after = [], {}
    for rollout in rollouts:
        name, following = rollout.scored.episode.id, continuations(rollout.trajectories)
        earned = _earned_rewards(rollout.trajectories, rollout.advantage, following) if critic else []
        for number, trajectory in enumerate(rollout.trajectories):
            if any(turn.completion_ids for turn in trajectory.turns):
                credit = branches[name][number] if branches else earned[number]
                if turns:
                    credit = [value + objective.turn_coef * extra for value, extra in zip(credit, turns[name][number], strict=True)]
                trajectories.append(CreditedTrajectory(episode_id=name, index=number, trajectory=trajectory, credit=credit))
                after[name, number] = following[number]
    if not all(abs(value) <= _LARGEST for each in trajectories for value in each.credit):
        return [], "non_finite_advantage"
    credited = assign_shared_turns(trajectories, mean=not critic)
    samples = [_sample(each.episode_id, group.index, each.trajectory, each.credit, trains=each.trains, rewards=critic) for each in credited]
    if critic:
        samples = [
            replace(sample, trajectory=each.index, continued_in=after[each.episode_id, each.index], last_state=each.trajectory.last_state)
            for sample, each in zip(samples, credited, strict=True)
        ]
    return samples, "" if samples else "no_sampled_token"


def _earned_rewards(trajectories: Sequence[Trajectory], score: float, following: Sequence[int | None]) -> list[list[float]]:
    """Returns the reward of each turn, [trajectory][turn], from which a critic computes the advantages.

    Rewards from an environment stay at their turns. The part of the score that is not an environment's reward goes to the last turn with a
    sampled token, in each trajectory that no other trajectory continues. If there is no environment, this part is the complete score. For a
    sub-agent, the last turn with a sampled token receives the complete score instead of this part.
    """
    rewards = [[sum(result.reward or 0.0 for result in turn.tool_results) for turn in trajectory.turns] for trajectory in trajectories]
    rest = score - sum(map(sum, rewards))
    for trajectory, own, after in zip(trajectories, rewards, following, strict=True):
        sampled = [number for number, turn in enumerate(trajectory.turns) if turn.completion_ids]
        if after is None and sampled:
            own[sampled[-1]] += rest if trajectory.agent == trajectories[0].agent else score
    return rewards


def _turn_credit(group: Group, objective: ObjectiveConfig) -> dict[str, list[list[float]]]:
    """Returns a mapping episode id -> turn-level advantages [trajectory][turn]; empty if `objective.turn_coef` is 0."""
    if not objective.turn_coef:
        return {}
    for scored in group.scored:
        if not scored.score.turn_rewards:
            raise RecipeError(
                f"objective.turn_coef={objective.turn_coef:g}, but the score of episode {scored.episode.id} has no turn rewards",
                fix="return Score(turn_rewards=...) from the verifier, with a number for each turn, or set objective.turn_coef=0",
            )
    if objective.advantage.ref == "gae":
        return {scored.episode.id: [list(rewards) for rewards in scored.score.turn_rewards] for scored in group.scored}
    rewards = [scored.score.turn_rewards for scored in group.scored]
    following = [continuations(scored.episode.trajectories) for scored in group.scored]
    advantages = turn_advantages(rewards, normalize_std=objective.divides_by_std, following=following)
    return {scored.episode.id: own for scored, own in zip(group.scored, advantages, strict=True)}


def _fault(episode: Episode, longest: int | None) -> str:
    for trajectory in episode.trajectories:
        if longest is not None and sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in trajectory.turns) > longest:
            return "too_long"
        if trajectory.turns and trajectory.turns[0].completion_ids and not trajectory.turns[0].prompt_ids:
            return "no_prompt"
        if not all(math.isfinite(value) for turn in trajectory.turns for value in turn.logprobs):
            return "non_finite_logprob"
    return ""


def _sample(
    episode_id: str,
    group_index: int,
    trajectory: Trajectory,
    credit: Sequence[float],
    *,
    trains: Sequence[bool] = (),
    rewards: bool = False,
) -> Sample:
    """Returns the sample of a trajectory with its turns concatenated.

    For each turn, `credit` is the advantage of its sampled tokens or, if `rewards` is True, the reward of its last sampled token. Turns
    whose `trains` is False are context, like a prompt. If `trains` is empty, all turns are trained.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    credits: list[float] = []
    supports: list[Supports | int] = []
    for turn, value, trained in zip(trajectory.turns, credit, trains or (True,) * len(credit), strict=True):
        context, sampled = len(turn.prompt_ids), len(turn.completion_ids)
        token_ids += (*turn.prompt_ids, *turn.completion_ids)
        if not trained:
            context, sampled = context + sampled, 0
        forced = set(turn.forced)
        mask += [False] * context + [position not in forced for position in range(sampled)]
        supports += (context, turn.supports if trained and turn.supports is not None else sampled)
        logprobs += [0.0] * context + [0.0 if at in forced else logprob for at, logprob in enumerate(turn.logprobs[:sampled])]
        credited = range(sampled - 1, sampled) if rewards else range(sampled)
        credits += [0.0] * context + [value if at in credited and at not in forced else 0.0 for at in range(sampled)]
        versions += [-1] * context
        for span in turn.versions if trained else ():
            versions += [-1 if at in forced else span.version for at in range(span.start, span.end)]
    return Sample(
        episode_id=episode_id,
        group_index=group_index,
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        advantages=() if rewards else tuple(credits),
        rewards=tuple(credits) if rewards else (),
        supports=Supports.join(supports),
    )
