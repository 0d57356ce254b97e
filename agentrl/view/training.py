"""How the learner used a group's tokens: mask, advantage and the reason for dropping a group, recomputed by the objective's pure functions.

These functions need only the stored group and the recipe, so the numbers equal those of the step. Values that depend on the weights (new
logprobs, ratios, entropies) cannot be computed without the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.experience.token_records import TokenRecord, read_records
from agentrl.objective import assemble, batch_advantages
from agentrl.plugins import parts
from agentrl.records import Group, LedgerEntry, Message, Sample, Trajectory, Turn, VersionSpan
from agentrl.view.source import RunSource

OF_THE_BATCH = ("reinforce++", "reinforce++-baseline")
"""Estimators that compare a score with the scores of the other groups in the same step."""
_MAX_GROUPS = 512  # maximum number of groups of a step that are read for such an estimator

REASONS = {
    "all_equal": "All counted attempts have the same score, so no attempt is better than its group: every advantage is 0.",
    "too_few": "Too few attempts have a score.",
    "non_finite_score": "A score is not finite.",
    "non_finite_logprob": "A logprob is not finite.",
    "non_finite_advantage": "An advantage is not finite in float32.",
    "too_long": "A trajectory is longer than the policy's context.",
    "no_prompt": "A trajectory starts without a prompt.",
    "no_sampled_token": "No token was sampled.",
    "broken_task": "The task is broken: a task failure excludes the group.",
    "update_skipped": "The update was skipped: a value was not finite, or beyond a limit.",
    "critic_warmup": "The step trained only the critic.",
    "rolled_back": "The weights were reset to an earlier version, so the step's update does not count.",
}
"""Prefix of a reason from the ledger or the objective -> one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraining:
    """How a step trained a group. `samples` maps an episode id to one sample per trained trajectory, in order."""

    advantages: tuple[float | None, ...]  # [E] advantage of each attempt; None if the attempt does not count or the advantage is unknown
    samples: dict[str, tuple[Sample, ...]]
    reason: str  # why the objective drops the group; empty if it does not drop it
    notes: tuple[str, ...]  # which values could not be computed, and why


def explain(reason: str) -> str:
    """Returns a sentence that explains a reason. An unknown reason is returned unchanged."""
    return next((text for name, text in REASONS.items() if reason == name or reason.startswith((f"{name}:", f"{name} "))), reason)


def train_group(source: RunSource, entry: LedgerEntry, group: Group) -> GroupTraining:
    """Returns how a step trained a group, with the samples that the objective creates from the group. Never raises. A note describes each
    unknown value."""
    recipe, why = source.recipe()
    if recipe is None:
        return _unknown(group, f"Advantages and masks cannot be computed: {why}.")
    objective = recipe.objective
    if objective.advantage.ref not in parts.ADVANTAGE.shipped:
        name = objective.advantage.ref[:100]
        return _unknown(
            group, f"The advantages come from {name!r}, which is not part of agentrl. The view does not run user-supplied code."
        )
    notes = []
    if objective.advantage.ref == "gae":
        notes.append("A critic computed the advantages, which are not recorded. The rewards that it read are shown instead.")
    if objective.kl == "k1_reward":
        notes.append("These advantages do not include the KL penalty, which was subtracted from the scores and is not recorded.")
    try:
        others, more = _others(source, entry, recipe)
        fit = batch_advantages([*others, group], objective, min_group_size=recipe.rollout.group.min_size)[-1]
        assembled = assemble(entry.step or 0, [*others, group], recipe)
    except (AgentRLError, ValueError, ArithmeticError) as error:
        return _unknown(group, f"Advantages and masks cannot be computed: {str(error)[:300]}")
    samples: dict[str, list[Sample]] = {}
    for sample in assembled.batch.samples:
        if sample.group_index == group.index:
            samples.setdefault(sample.episode_id, []).append(sample)
    return GroupTraining(
        advantages=fit.values,
        samples={name: tuple(own) for name, own in samples.items()},
        reason=assembled.drop_reasons.get(group.index, fit.drop_reason),
        notes=(*notes, *more),
    )


def _unknown(group: Group, note: str) -> GroupTraining:
    return GroupTraining(advantages=(None,) * len(group.episodes), samples={}, reason="", notes=(note,))


def _others(source: RunSource, entry: LedgerEntry, recipe: Recipe) -> tuple[list[Group], list[str]]:
    """Returns the other groups of the step with their scores, and notes. Returns no groups if the estimator does not compare groups."""
    if recipe.objective.advantage.ref not in OF_THE_BATCH:
        return [], []
    if entry.step is None:
        return [], ["The estimator compares all groups of a step, but this group does not belong to a step yet."]
    store = source.store()
    indices = [other.index for other in store.entries(step=entry.step) if other.index != entry.index]
    if len(indices) > _MAX_GROUPS:
        return [], [f"The estimator compares all groups of the step, but the step has more than {_MAX_GROUPS} groups."]
    return [_scores_alone(group) for index in indices for group in store.groups((index,))], []


_TURN = Turn(
    prompt_ids=(0,),
    completion_ids=(0,),
    logprobs=(0.0,),
    versions=(VersionSpan(version=0, start=0, end=1),),
    message=Message(role="assistant", content=""),
    finish_reason="stop",
)
_SHORT = (Trajectory(agent="main", turns=(_TURN,)),)


def _scores_alone(group: Group) -> Group:
    """Returns a copy of a group with the same scores and exclusions but one token per attempt."""
    episodes = []
    for scored in group.episodes:
        score = replace(scored.score, turn_rewards=((0.0,),) if scored.score.turn_rewards else (), branches=(), without=())
        episodes.append(replace(scored, episode=replace(scored.episode, trajectories=_SHORT, outputs={}), score=score))
    return replace(group, episodes=tuple(episodes))


def sample_of(training: GroupTraining, episode_id: str, trajectory: Trajectory, trajectories: Sequence[Trajectory]) -> Sample | None:
    """Returns the sample of a trajectory; None if the trajectory was not trained.

    The samples of an episode are in the order of its trajectories with sampled tokens, so a trajectory's tokens identify its sample.
    """
    ids = tuple(token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids))
    same = [sample for sample in training.samples.get(episode_id, ()) if sample.token_ids == ids]
    if len(same) < 2:
        return same[0] if same else None
    alike = [
        trajectory
        for trajectory in trajectories
        if tuple(t for turn in trajectory.turns for t in (*turn.prompt_ids, *turn.completion_ids)) == ids
    ]
    position = next(number for number, one in enumerate(alike) if one is trajectory)
    return same[position] if position < len(same) else None


def recorded_tokens(source: RunSource, step: int | None, training: GroupTraining, sample: Sample | None) -> tuple[TokenRecord | None, str]:
    """Returns the values that the learner computed for the trained tokens of a sample, with an empty reason, or None and the reason why the
    values are unknown (empty if the sample was not trained)."""
    if step is None or sample is None:
        return None, ""
    part = next(number for number, one in enumerate(training.samples[sample.episode_id]) if one is sample)
    try:
        records = read_records(source.path, step, sample.group_index)
    except (OSError, ValueError) as error:
        return None, f"The record of the trained tokens of step {step} cannot be read: {str(error)[:200]}."
    record = next((record for record in records if record.episode_id == sample.episode_id and record.part == part), None)
    if record is None:
        return None, f"Ratios and entropies of step {step} were not recorded, or were removed. Only the newest records are stored."
    if len(record.logprobs) != sum(sample.loss_mask):
        return None, f"The record of the trained tokens of step {step} does not match the stored episode."
    return record, ""
