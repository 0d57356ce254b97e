"""Packs the samples of an optimizer step into micro-batches without padding. Deterministic: all ranks compute the same plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise, repeat

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.learner.forest import Forest, ForestLayout, Ints, build_forest, common_prefix
from agentrl.learner.ranks import Team
from agentrl.learner.ulysses import TokenShard
from agentrl.records import Batch, Sample
from agentrl.records.images import FIRST, plain_ids
from agentrl.records.sampling import Supports

Rows = tuple[Sample, ...]


def split_minibatches(batch: Batch, count: int) -> list[Batch]:
    """Distributes a batch's groups over at most `count` batches, each with its own denominator. Batches without trained tokens are
    dropped."""
    part_of = {index: number % count for number, index in enumerate(batch.group_indices)}
    parts: list[Batch] = []
    for part in range(count):
        samples = tuple(sample for sample in batch.samples if part_of[sample.group_index] == part)
        indices = tuple(index for index in batch.group_indices if part_of[index] == part)
        denominator = sum(sum(sample.loss_mask) for sample in samples)
        if denominator:
            parts.append(Batch(step=batch.step, samples=samples, denominator=denominator, group_indices=indices))
    return parts


def plan_micro_batches(samples: Sequence[Sample], *, rank: int, ranks: int, max_tokens: int) -> list[Rows]:
    """Returns the micro-batches of one rank, with at most `max_tokens` tokens each. Tokens in shared prefixes count once.

    Samples in lexicographic order share the longest prefixes with their neighbours, so consecutive runs become micro-batches. All ranks
    have the same number of micro-batches, as ZeRO's collectives require, so the last micro-batch of a rank may be empty. The runs are
    balanced: the largest run is as small as the number of micro-batches allows. A sample longer than `max_tokens` becomes a micro-batch by
    itself.
    """
    if not samples:
        return []
    ordered = sorted(samples, key=lambda sample: sample.token_ids)  # a stable sort, so the order is the same on every rank
    lengths = [len(sample.token_ids) for sample in ordered]
    shared = [0, *(common_prefix(a.token_ids, b.token_ids) for a, b in pairwise(ordered))]
    count = -(-len(_cut(lengths, shared, max_tokens)) // ranks) * ranks
    low, high = 1, max_tokens  # find the smallest budget that yields at most `count` runs
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(lengths, shared, middle)) <= count else (middle + 1, high)
    runs = [tuple(ordered[start:end]) for start, end in _cut(lengths, shared, high)]
    runs.sort(key=lambda run: -sum(len(sample.token_ids) for sample in run))
    return [runs[at] if at < len(runs) else () for at in range(rank, count, ranks)]


def _cut(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Returns the bounds of consecutive runs that each contain at most `budget` tokens or a single sample."""
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
    """Samples laid out as a forest, with the indices of their trained tokens.

    The model processes the T tokens of the forest, and the output head computes U distinct predictions (samples may share trained tokens
    too). `expand` maps each of the samples' N trained tokens to its prediction. In a team (`layout.shard`), a rank holds its part of the T
    tokens and of the U predictions; `expand` and the fields after it cover the whole micro-batch.
    """

    input_ids: Tensor  # [1, T]
    layout: ForestLayout
    positions: Tensor  # [U] index into [T] of the token before each predicted token
    targets: Tensor  # [U] ids of the predicted tokens
    supports: Tensor | None  # [U, K] ids that each token was drawn from, padded with -1; None or a row of -1 means the vocabulary
    expand: Tensor  # [N] index into [U]
    behaviour: Tensor  # [N] float32
    advantages: Tensor  # [N] float32, NaN if a sample has rewards and no critic has computed its advantages yet
    versions: Tensor  # [N] int64 policy version that sampled the token
    sequence: Tensor  # [N] int64 index of the token's sample in the optimizer step
    rollout_tokens: Tensor  # [N] int64 number of trained tokens in all samples of the token's episode


def build_micro_batch(rows: Rows, device: torch.device, numbers: Sequence[int] | None = None, *, team: Team | None = None) -> MicroBatch:
    """Returns the micro-batch of the samples in `rows`.

    If there are no samples, the tensors contain two untrained tokens, so that the rank still joins collectives.

    `numbers` are the samples' indices within the optimizer step; None means 0, 1, and so on. All ranks of a `team` must pass the same
    samples.
    """
    forest = build_forest([row.token_ids for row in rows] or [(0, 0)])
    lengths = [sum(row.loss_mask) for row in rows]
    rollout_lengths = [length if row.rollout_tokens is None else row.rollout_tokens for row, length in zip(rows, lengths, strict=True)]

    def trained(values: Iterable[Iterable[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        flat = [value for own, row in zip(values, rows, strict=True) for value in compress(own, row.loss_mask)]
        return torch.tensor(flat, dtype=dtype, device=device)

    def repeated(values: Sequence[int]) -> Tensor:
        flat = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
        return torch.tensor(flat, dtype=torch.long, device=device)

    positions, targets, expand, supports = _predictions(rows, forest)
    token_ids, shard = torch.from_numpy(forest.token_ids), None
    if team is not None:
        shard = TokenShard.of(team, len(token_ids), positions)
        token_ids, positions, targets = shard.part(token_ids), positions[shard.own] - shard.start, targets[shard.own]
        supports = None if supports is None else supports[shard.own]
    return MicroBatch(
        input_ids=token_ids[None].to(device),
        layout=ForestLayout(forest, device, shard),
        positions=positions.to(device),
        targets=targets.to(device),
        supports=None if supports is None else supports.to(device),
        expand=expand.to(device),
        behaviour=trained(row.logprobs for row in rows),
        advantages=trained(row.advantages or repeat(math.nan) for row in rows),
        versions=trained((row.versions for row in rows), torch.long),
        sequence=repeated(range(len(rows)) if numbers is None else numbers),
        rollout_tokens=repeated(rollout_lengths),
    )


def check_vocabulary(samples: Sequence[Sample], size: int) -> None:
    """Raises `LearnerError` if a token in the samples or in their supports is outside an embedding of `size` rows."""
    for sample in samples:
        supported = () if sample.supports is None else sample.supports.token_ids
        for ids in (sample.token_ids if max(sample.token_ids, default=0) < FIRST else plain_ids(sample.token_ids), supported):
            if len(ids) and not 0 <= min(ids) <= max(ids) < size:
                wrong = next(token for token in ids if not 0 <= token < size)
                raise LearnerError(
                    f"episode {sample.episode_id} contains token {wrong}, but the policy's vocabulary has {size} tokens: server and learner"
                    " run different models, or the tokenizer is larger than the embedding. Restart the run with one model folder for both"
                )


def single_sequence(row: Sequence[int], device: torch.device) -> tuple[Tensor, ForestLayout]:
    """Returns the ids [1, T] and the layout of one plain sequence."""
    forest = build_forest([row])
    return torch.from_numpy(forest.token_ids)[None].to(device), ForestLayout(forest, device)


def _predictions(rows: Rows, forest: Forest) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns positions, targets and supports of the distinct predictions, and the index of each trained token's prediction.

    Two samples that agree up to and including a token share its prediction only if the token has the same support in both, because two
    attempts may sample the same tokens from different weights.
    """
    known: dict[bytes, int] = {b"": 0}  # number of each distinct support; 0 is the whole vocabulary
    triples = [np.empty((0, 3), np.int64)]
    for row, path in zip(rows, forest.paths, strict=False):  # if there are no rows, the forest has one path of padding
        trained = np.flatnonzero(row.loss_mask)
        numbers = _numbers(row.supports, trained, known)
        triples.append(np.stack((path[trained - 1], np.asarray(row.token_ids)[trained], numbers), axis=1))
    distinct, expand = np.unique(np.concatenate(triples), axis=0, return_inverse=True)
    arrays = (distinct[:, 0].copy(), distinct[:, 1].copy(), expand.reshape(-1))
    positions, targets, index = (torch.from_numpy(array) for array in arrays)
    return positions, targets, index, torch.from_numpy(_table(known)[distinct[:, 2]]) if len(known) > 1 else None


def _numbers(supports: Supports | None, trained: Ints, known: dict[bytes, int]) -> Ints:
    """Returns the number of each trained token's support; new supports are added to `known`."""
    if supports is None:
        return np.zeros(len(trained), np.int64)
    sizes = np.frombuffer(supports.sizes, "<u2").astype(np.int64)
    ends = 4 * np.cumsum(sizes)
    starts = ends - 4 * sizes
    bounds = zip(starts[trained].tolist(), ends[trained].tolist(), strict=True)
    return np.asarray([known.setdefault(supports.ids[start:end], len(known)) for start, end in bounds], np.int64)


def _table(known: Mapping[bytes, int]) -> Ints:
    """Returns the ids [S, K] of every known support, padded with -1."""
    table = np.full((len(known), max(map(len, known)) // 4), -1, np.int64)
    for body, number in known.items():
        table[number, : len(body) // 4] = np.frombuffer(body, "<u4")
    return table
