"""Aggregates per-token losses with one denominator for the optimizer step.

    loss = sum_t c_t l_t / D

The weight c_t depends only on the token's rollout, and D is known before the first micro-batch, so micro-batches and ranks add up to
exactly the loss of one large batch.

| aggregation | c_t | D | |
| --- | --- | --- | --- |
| token_mean | 1 | trained tokens | every token counts the same: DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
| sequence_mean | 1 / tokens of the rollout | rollouts | every rollout counts the same: GRPO, arXiv:2402.03300, eq. 3 |
| constant | 1 | rollouts * length | no length bias in either direction: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 |

A rollout is an attempt at a task with all its trajectories. In the papers, a rollout is a single sequence, hence the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.records import Sample

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Assigns the tokens of a micro-batch to sequences."""

    index: Tensor  # [N] int64 in [0, S): the token's sequence
    tokens: Tensor  # [S] int64: trained tokens of each sequence

    @classmethod
    def of(cls, sequence: Tensor) -> Segments:
        """Returns the segments for sequence numbers [N], one per token; the numbers need not be consecutive."""
        _, index, tokens = torch.unique(sequence, return_inverse=True, return_counts=True)
        return cls(index=index, tokens=tokens)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over each token's sequence, float64 [N], without gradient."""
        return sum_segments(values.detach().double(), self.index, len(self.tokens))[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over each token's sequence, float64 [N], without gradient."""
        return self.sum(values) / self.tokens[self.index]


def sum_segments(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the sums [count] of the values [N] with equal `index` [N], added in order.

    The order is fixed, unlike `index_add_` on CUDA, so a resumed update is bitwise identical.
    """
    if not len(index):
        return values.new_zeros(count)
    lengths = torch.bincount(index, minlength=count)
    sums: Tensor = torch.segment_reduce(values[index.argsort(stable=True)], "sum", lengths=lengths)
    return sums


def token_weights(aggregation: Aggregation, segments: Segments, dtype: torch.dtype, *, rollout_tokens: Tensor | None = None) -> Tensor:
    """Returns c_t, [N]. `rollout_tokens`: trained tokens of each token's rollout, [N]; None means that every sequence is a rollout."""
    if aggregation == "sequence_mean":
        return (segments.tokens[segments.index] if rollout_tokens is None else rollout_tokens).to(dtype).reciprocal()
    return torch.ones_like(segments.index, dtype=dtype)


def loss_denominator(samples: Sequence[Sample], aggregation: Aggregation, *, length: int) -> float:
    """Returns D over all ranks and micro-batches of an optimizer step. `length` is the constant in tokens by which the `constant`
    aggregation multiplies the number of rollouts.

    D is 0.0 if the batch has no trained tokens. No optimizer step is performed for such a batch.
    """
    if aggregation == "token_mean":
        return float(sum(sum(sample.loss_mask) for sample in samples))
    rollouts = len({(sample.group_index, sample.episode_id) for sample in samples if any(sample.loss_mask)})
    return float(rollouts if aggregation == "sequence_mean" else rollouts * length)
