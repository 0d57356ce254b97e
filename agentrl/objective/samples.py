"""From scored groups to the token sequences of one learner step.

The law kept here: every sampled token of an episode that counts is trained exactly once, with the id and logprob it was sampled
with, and no other token is trained. Turns that branched episodes share are trained in one of them (`agentrl.objective.branches`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.base.scores import all_negligible
from agentrl.config.recipe import ObjectiveConfig, Recipe
from agentrl.errors import RecipeError
from agentrl.objective.advantages import GroupAdvantages, batch_advantages
from agentrl.objective.branches import CreditedTrajectory, assign_shared_turns
from agentrl.objective.credit import CountedEpisode, branch_credit, penalized_score
from agentrl.objective.staleness import staleness_weight
from agentrl.objective.turns import turn_advantages
from agentrl.records import Batch, Episode, Group, Sample, Trajectory
from agentrl.records.sampling import Supports

_LARGEST = 3.4028234663852886e38  # largest float32, the dtype of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledBatch:
    """A batch, and why some of its groups have no samples."""

    batch: Batch
    drop_reasons: Mapping[int, str]  # group index -> reason


def assemble(step: int, groups: Sequence[Group], recipe: Recipe, *, penalties: Mapping[str, float] | None = None) -> AssembledBatch:
    """One sample per trajectory of every episode that counts, and the reason for each group without samples.

    A group with a score or logprob that is not finite, or with a trajectory that starts without a prompt or exceeds the policy's
    context, is left out whole, before any mean is taken: half a group would shift its baseline. So is a group whose advantages are
    not finite in float32. `Batch.group_indices` holds all groups, including those left out, because the step consumes them.

    Args:
        penalties: subtracted from the score of the episode with that id; see `counted_samples`.

    Raises:
        RecipeError: `objective.turn_coef` or `objective.credit` needs what an episode's score does not say.
    """
    dropped = {group.index: reason for group in groups if (reason := _unfit(group, recipe.policy.max_model_len))}
    fit = [group for group in groups if group.index not in dropped]
    samples: list[Sample] = []
    advantages = batch_advantages(fit, recipe.objective, min_group_size=recipe.rollout.min_group_size, penalties=penalties)
    for group, found in zip(fit, advantages, strict=True):
        made, reason = _group_samples(group, found, recipe.objective, step, penalties or {})
        if not all(abs(value) <= _LARGEST for sample in made for value in (*sample.advantages, *sample.rewards)):
            made, reason = [], "non_finite_advantage"
        samples.extend(_counted(made))
        if reason:
            dropped[group.index] = reason
    batch = Batch(
        step=step,
        samples=tuple(samples),
        denominator=sum(sum(sample.loss_mask) for sample in samples),
        group_indices=tuple(group.index for group in groups),
    )
    return AssembledBatch(batch=batch, drop_reasons=dropped)


def counted_samples(groups: Sequence[Group], *, longest: int | None = None) -> tuple[Sample, ...]:
    """The token sequences of every episode that counts, with advantages of zero, for computing penalties on scores.

    `longest`: the policy's context in tokens, as `assemble` takes it from the recipe.
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
    """Why none of the group's tokens can be trained, whatever its scores; empty when they can."""
    if group.fault is not None:
        return "broken_task"
    for scored in group.scored:
        if not all(math.isfinite(reward) for line in scored.score.turn_rewards for reward in line):
            return "non_finite_score"
        if reason := _fault(scored.episode, longest):
            return f"{reason} in episode {scored.episode.id}"
    turns = [turn for scored in group.scored for trajectory in scored.episode.trajectories for turn in trajectory.turns]
    return "" if not group.scored or any(turn.completion_ids for turn in turns) else "no_sampled_token"


def _counted(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of one group, each with the trained tokens of its rollout where that has several."""
    tokens: dict[str, list[int]] = {}
    for sample in samples:
        tokens.setdefault(sample.episode_id, []).append(sum(sample.loss_mask))
    return [
        replace(sample, rollout_tokens=sum(tokens[sample.episode_id])) if len(tokens[sample.episode_id]) > 1 else sample
        for sample in samples
    ]


def _group_samples(
    group: Group, estimate: GroupAdvantages, objective: ObjectiveConfig, step: int, penalties: Mapping[str, float]
) -> tuple[list[Sample], str]:
    """Samples of a group, or the reason why it has none. Credit for turns or branches can make a group with equal scores useful."""
    if estimate.drop_reason and estimate.drop_reason != "all_equal":
        return [], estimate.drop_reason
    turns = _turn_parts(group, objective)
    rollouts = [
        CountedEpisode(scored=scored, score=penalized_score(scored, penalties), advantage=value or 0.0)
        for scored, value in zip(group.episodes, estimate.values, strict=True)
        if not scored.episode.left_out and scored.score.value is not None
    ]
    given = {} if objective.advantage == "gae" else branch_credit(rollouts, objective)
    credits = [value for made in (turns, given) for one in made.values() for line in one for value in line]
    if objective.advantage != "gae" and all_negligible(credits, [one.score for one in rollouts]):
        return [], "all_equal"
    lines = []
    for one in rollouts:
        name = one.scored.episode.id
        for number, trajectory in enumerate(one.trajectories):
            if any(turn.completion_ids for turn in trajectory.turns):
                parts = [objective.turn_coef * part for part in turns[name][number]] if turns else [0.0] * len(trajectory.turns)
                whole = given[name][number] if given else _at_the_end(trajectory, one.advantage)
                credit = [value + part for value, part in zip(whole, parts, strict=True)]
                lines.append(CreditedTrajectory(episode_id=name, index=number, trajectory=trajectory, credit=credit))
    samples = [_credited(line, group.index, objective, step) for line in assign_shared_turns(lines, mean=objective.advantage != "gae")]
    return samples, "" if samples else "no_sampled_token"


def _at_the_end(trajectory: Trajectory, score: float) -> list[float]:
    """What a critic learns from: the score as the reward of the last turn with a sampled token."""
    last = max(number for number, turn in enumerate(trajectory.turns) if turn.completion_ids)
    return [score if number == last else 0.0 for number in range(len(trajectory.turns))]


def _credited(line: CreditedTrajectory, group_index: int, objective: ObjectiveConfig, step: int) -> Sample:
    rewards = objective.advantage == "gae"
    sample = _sample(line.episode_id, group_index, line.trajectory, line.credit, trains=line.trains, rewards=rewards)
    return sample if rewards else _aged(sample, step, objective.staleness_decay)


def _turn_parts(group: Group, objective: ObjectiveConfig) -> dict[str, list[list[float]]]:
    """Episode id -> turn-level advantages [trajectory][turn]; empty without `objective.turn_coef`."""
    if not objective.turn_coef:
        return {}
    for scored in group.scored:
        if not scored.score.turn_rewards:
            raise RecipeError(
                f"objective.turn_coef={objective.turn_coef:g}, but the score of episode {scored.episode.id} has no turn rewards",
                fix="return Score(turn_rewards=...) from the verifier, a number for each turn, or set objective.turn_coef=0",
            )
    if objective.advantage == "gae":
        return {scored.episode.id: [list(line) for line in scored.score.turn_rewards] for scored in group.scored}
    parts = turn_advantages([scored.score.turn_rewards for scored in group.scored], normalize_std=objective.divides_by_std)
    return {scored.episode.id: part for scored, part in zip(group.scored, parts, strict=True)}


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
    """The turns end to end; `credit` is the advantage of each turn's sampled tokens, or with `rewards` the reward of the last of them.

    Turns whose `trains` is False are context, like a prompt; empty: all train.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    credits: list[float] = []
    supports: list[Supports | int] = []
    for turn, value, trained in zip(trajectory.turns, credit, trains or (True,) * len(credit), strict=True):
        given, sampled = len(turn.prompt_ids), len(turn.completion_ids)
        token_ids += (*turn.prompt_ids, *turn.completion_ids)
        if not trained:
            given, sampled = given + sampled, 0
        put = set(turn.forced) if sampled else set()
        mask += [False] * given + [place not in put for place in range(sampled)]
        supports += (given, turn.supports if trained and turn.supports is not None else sampled)
        logprobs += [0.0] * given + [0.0 if place in put else one for place, one in enumerate(turn.logprobs[:sampled])]
        spread = [0.0] * (sampled - 1) + [value] * min(sampled, 1) if rewards else [value] * sampled
        spread = [0.0 if place in put else one for place, one in enumerate(spread)]
        credits += [0.0] * given + spread
        versions += [-1] * given
        for span in turn.versions if trained else ():
            versions += [-1 if place in put else span.version for place in range(span.start, span.end)]
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


def _aged(sample: Sample, step: int, decay: float) -> Sample:
    """Scales down the advantages of stale tokens. Every surrogate is proportional to its advantage, so this weights the token's loss."""
    if decay == 1.0:
        return sample
    weights = [staleness_weight(step - version, decay) for version in sample.versions]  # tokens without a version have no advantage
    return replace(sample, advantages=tuple(value * weight for value, weight in zip(sample.advantages, weights, strict=True)))
