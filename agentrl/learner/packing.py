"""How the samples of an optimizer step become micro-batches without padding, on every rank. Deterministic: every rank plans alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.learner.forest import Forest, common_prefix, lay_out
from agentrl.learner.forest_attention import ForestLayout
from agentrl.learner.ranks import Team
from agentrl.learner.ulysses import Stretch
from agentrl.records import Batch, Sample

Rows = tuple[Sample, ...]


def minibatches(batch: Batch, count: int) -> list[Batch]:
    """Splits a batch by groups, dealt out in turn, into at most `count` batches with their own denominators; empty ones are left out."""
    places = {index: place % count for place, index in enumerate(batch.group_indices)}
    parts: list[Batch] = []
    for part in range(count):
        samples = tuple(sample for sample in batch.samples if places[sample.group_index] == part)
        indices = tuple(index for index in batch.group_indices if places[index] == part)
        denominator = sum(sum(sample.loss_mask) for sample in samples)
        if denominator:
            parts.append(Batch(step=batch.step, samples=samples, denominator=denominator, group_indices=indices))
    return parts


def plan(samples: Sequence[Sample], *, rank: int, ranks: int, max_tokens: int, share: bool = True) -> list[Rows]:
    """The micro-batches of one rank: at most `max_tokens` different tokens each, a token counted once for all that share it.

    Samples in lexicographic order share the most with their neighbours, so runs of that order become micro-batches. All ranks
    get the same number of them, as the collectives of ZeRO need (a rank's last may be empty), and the runs are cut as evenly as
    that number allows. A sample longer than `max_tokens` gets a micro-batch of its own.
    """
    if not samples:
        return []
    ordered = sorted(samples, key=lambda sample: sample.token_ids)  # stable, so equal on every rank
    lengths = [len(sample.token_ids) for sample in ordered]
    shared = [0, *(common_prefix(a.token_ids, b.token_ids) if share else 0 for a, b in pairwise(ordered))]
    count = -(-len(_cut(lengths, shared, max_tokens)) // ranks) * ranks
    low, high = 1, max_tokens  # the smallest budget that needs no more runs than that
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(lengths, shared, middle)) <= count else (middle + 1, high)
    runs = [tuple(ordered[start:end]) for start, end in _cut(lengths, shared, high)]
    runs.sort(key=lambda run: -sum(len(sample.token_ids) for sample in run))
    return [runs[at] if at < len(runs) else () for at in range(rank, count, ranks)]


def _cut(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Bounds of consecutive runs that each hold at most `budget` tokens, or one sample."""
    bounds: list[tuple[int, int]] = []
    start, size = 0, lengths[0]
    for at in range(1, len(lengths)):
        size += lengths[at] - shared[at]
        if size > budget:
            bounds.append((start, at))
            start, size = at, lengths[at]
    return [*bounds, (start, len(lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples laid out as a forest, and the trained tokens picked out of it.

    The model runs over the T tokens of the forest, the output head over U different predictions (samples may share trained tokens
    too); `expand` then gives each of the N trained tokens of the samples its own. In a team (`layout.stretch`) a rank holds its part of
    the T tokens and of the U predictions; what follows `expand` is the whole micro-batch's.
    """

    input_ids: Tensor  # [1, T]
    layout: ForestLayout
    positions: Tensor  # [U] index into [T] of the token before each predicted one
    targets: Tensor  # [U] ids of the predicted tokens
    expand: Tensor  # [N] index into [U]
    behaviour: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    versions: Tensor  # [N] int64 policy version that sampled the token
    sequence: Tensor  # [N] int64 global number of the sample that each trained token belongs to


def micro_batch(
    rows: Rows, device: torch.device, numbers: Sequence[int] | None = None, *, share: bool = True, team: Team | None = None
) -> MicroBatch:
    """Tensors of some samples. No samples give two tokens of which none is trained: work that changes nothing.

    `numbers` are the samples' places among those of the optimizer step; None counts them from 0. The ranks of a `team` give the same
    samples and each get their part.
    """
    forest = lay_out([row.token_ids for row in rows] or [(0, 0)], share=share)
    behaviour: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    sequence: list[int] = []
    for place, row in enumerate(rows):
        behaviour += (value for value, trained in zip(row.logprobs, row.loss_mask, strict=True) if trained)
        advantages += (value for value, trained in zip(row.advantages, row.loss_mask, strict=True) if trained)
        versions += (value for value, trained in zip(row.versions, row.loss_mask, strict=True) if trained)
        sequence += [place if numbers is None else numbers[place]] * sum(row.loss_mask)
    positions, targets, expand = _predictions(rows, forest)
    token_ids, stretch = torch.from_numpy(forest.token_ids), None
    if team is not None:
        stretch = Stretch.of(team, len(token_ids), positions)
        token_ids, positions, targets = stretch.part(token_ids), positions[stretch.own] - stretch.start, targets[stretch.own]
    return MicroBatch(
        input_ids=token_ids[None].to(device),
        layout=ForestLayout(forest, device, stretch),
        positions=positions.to(device),
        targets=targets.to(device),
        expand=expand.to(device),
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        versions=torch.tensor(versions, dtype=torch.long, device=device),
        sequence=torch.tensor(sequence, dtype=torch.long, device=device),
    )


def check_vocabulary(samples: Sequence[Sample], size: int) -> None:
    """Raises `LearnerError` for a token that a model with an embedding of `size` rows does not have."""
    for sample in samples:
        if sample.token_ids and not 0 <= min(sample.token_ids) <= max(sample.token_ids) < size:
            wrong = next(token for token in sample.token_ids if not 0 <= token < size)
            raise LearnerError(
                f"episode {sample.episode_id} holds token {wrong}, and the policy's vocabulary has {size}: server and learner do not run"
                " the same model, or its tokenizer is larger than its embedding. Start the run again with one model folder for both"
            )


def text(row: Sequence[int], device: torch.device) -> tuple[Tensor, ForestLayout]:
    """One plain sequence: its ids [1, T] and its layout."""
    forest = lay_out([row])
    return torch.from_numpy(forest.token_ids)[None].to(device), ForestLayout(forest, device)


def _predictions(rows: Rows, forest: Forest) -> tuple[Tensor, Tensor, Tensor]:
    """Places and targets of the different predictions, and which of them each trained token is."""
    pairs = [np.empty((0, 2), np.int64)]
    for row, path in zip(rows, forest.paths, strict=False):  # without rows the forest has one path of padding
        trained = np.flatnonzero(row.loss_mask)
        pairs.append(np.stack((path[trained - 1], np.asarray(row.token_ids)[trained]), axis=1))
    different, expand = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
    made = (different[:, 0].copy(), different[:, 1].copy(), expand.reshape(-1))
    positions, targets, index = (torch.from_numpy(array) for array in made)
    return positions, targets, index
