"""From scored groups to the token sequences that one optimizer step trains on.

The law kept here: every sampled token of an episode that counts is trained exactly once, with the id and logprob it was sampled
with, and no other token is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.objective.advantages import group_advantages
from agentrl.recipe import Recipe
from agentrl.records import Batch, Episode, Group, Sample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A batch, and why some of its groups gave no sample."""

    batch: Batch
    dropped: Mapping[int, str]  # group index -> reason


def build_batch(step: int, groups: Sequence[Group], recipe: Recipe) -> Batch:
    """The batch of `step`: `assemble(...).batch`."""
    return assemble(step, groups, recipe).batch


def assemble(step: int, groups: Sequence[Group], recipe: Recipe) -> Assembled:
    """One sample per trajectory of every episode that counts, and the reason for each group that gave none.

    A group with a score or logprob that is not a finite number, or with a trajectory that starts without a prompt, is set aside
    whole: half a group would shift its baseline. `Batch.group_indices` holds all the groups, those set aside included, because
    the step consumes them.
    """
    samples: list[Sample] = []
    dropped: dict[int, str] = {}
    for group in groups:
        found, reason = _group_samples(group, recipe)
        samples.extend(found)
        if reason:
            dropped[group.index] = reason
    batch = Batch(
        step=step,
        samples=tuple(samples),
        denominator=sum(sum(sample.loss_mask) for sample in samples),
        group_indices=tuple(group.index for group in groups),
    )
    return Assembled(batch=batch, dropped=dropped)


def _group_samples(group: Group, recipe: Recipe) -> tuple[list[Sample], str]:
    advantages = group_advantages(group, normalize_std=recipe.objective.normalize_std, min_group_size=recipe.rollout.min_group_size)
    if not advantages.useful:
        return [], advantages.dropped
    samples: list[Sample] = []
    for scored, advantage in zip(group.episodes, advantages.values, strict=True):
        if advantage is None:
            continue
        reason = _fault(scored.episode)
        if reason:
            return [], f"{reason} in episode {scored.episode.id}"
        for trajectory in scored.episode.trajectories:
            if any(turn.completion_ids for turn in trajectory.turns):
                samples.append(_sample(scored.episode.id, group.index, trajectory, advantage))
    return samples, "" if samples else "no_sampled_token"


def _fault(episode: Episode) -> str:
    for trajectory in episode.trajectories:
        if trajectory.turns and trajectory.turns[0].completion_ids and not trajectory.turns[0].prompt_ids:
            return "no_prompt"
        if not all(math.isfinite(value) for turn in trajectory.turns for value in turn.logprobs):
            return "non_finite_logprob"
    return ""


def _sample(episode_id: str, group_index: int, trajectory: Trajectory, advantage: float) -> Sample:
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trajectory.turns:
        given, sampled = len(turn.prompt_ids), len(turn.completion_ids)
        token_ids += (*turn.prompt_ids, *turn.completion_ids)
        mask += [False] * given + [True] * sampled
        logprobs += [0.0] * given + list(turn.logprobs)
        versions += [-1] * given
        for span in turn.versions:
            versions += [span.version] * (span.end - span.start)
    return Sample(
        episode_id=episode_id,
        group_index=group_index,
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantages=tuple(advantage if trained else 0.0 for trained in mask),
        versions=tuple(versions),
    )
