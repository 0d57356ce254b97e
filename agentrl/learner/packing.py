"""How the samples of an optimizer step are divided into micro-batches and over ranks. Deterministic: every rank plans alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def plan(samples: Sequence[Sample], *, rank: int, ranks: int, max_tokens: int) -> list[Rows]:
    """The micro-batches of one rank: rows of similar length, at most `max_tokens` padded tokens each.

    Samples are sorted by length and dealt to the ranks in turn, so that ranks get nearly the same lengths; all ranks cut at the
    same places and therefore run the same number of micro-batches, as the collectives of ZeRO need. The last micro-batch may be
    empty on some ranks. A single row longer than `max_tokens` gets a micro-batch of its own.
    """
    ordered = sorted(samples, key=lambda sample: -len(sample.token_ids))  # stable, so equal on every rank
    slots = [ordered[start : start + ranks] for start in range(0, len(ordered), ranks)]
    batches: list[Rows] = []
    start = 0
    while start < len(slots):
        rows = max(1, max_tokens // len(slots[start][0].token_ids))
        batches.append(tuple(slot[rank] for slot in slots[start : start + rows] if rank < len(slot)))
        start += rows
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded on the right, and the trained tokens picked out of them.

    With causal attention, padding on the right cannot reach a real token, so no attention mask is needed.
    """

    input_ids: Tensor  # [B, T]
    positions: Tensor  # [N] index into the flattened [B * T] of the token before each trained token
    targets: Tensor  # [N] ids of the trained tokens
    behaviour: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64 global number of the sample that each trained token belongs to


def micro_batch(rows: Rows, device: torch.device, numbers: Sequence[int] | None = None) -> MicroBatch:
    """Tensors of some rows. No rows give one row of padding without a trained token: work that changes nothing.

    `numbers` are the rows' places among the samples of the optimizer step; None counts them from 0.
    """
    width = max((len(row.token_ids) for row in rows), default=2)
    input_ids = torch.zeros(max(len(rows), 1), width, dtype=torch.long)
    positions: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    sequence: list[int] = []
    for number, row in enumerate(rows):
        input_ids[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
        for t, trained in enumerate(row.loss_mask):
            if trained:
                positions.append(number * width + t - 1)
                targets.append(row.token_ids[t])
                behaviour.append(row.logprobs[t])
                advantages.append(row.advantages[t])
                sequence.append(number if numbers is None else numbers[number])
    return MicroBatch(
        input_ids=input_ids.to(device),
        positions=torch.tensor(positions, dtype=torch.long, device=device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        sequence=torch.tensor(sequence, dtype=torch.long, device=device),
    )
