"""From per-token losses to one number, with one denominator for the whole optimizer step.

    loss = sum_t c_t l_t / D

The weight c_t depends only on the token's own rollout, whose trained tokens each of its samples tells, and D is known before the first
micro-batch, so micro-batches and ranks add up to exactly the loss of one big batch.

| aggregation | c_t | D | |
| --- | --- | --- | --- |
| token_mean | 1 | trained tokens | every token counts the same: DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
| sequence_mean | 1 / tokens of the rollout | rollouts | every rollout counts the same: GRPO, arXiv:2402.03300, eq. 3 |
| constant | 1 | rollouts * length | no length bias in either direction: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 |

A rollout is an attempt at a task with all its trajectories. In the papers it is a single sequence, hence the names.
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
    """Which tokens of a micro-batch belong to the same sequence."""

    index: Tensor  # [N] int64 in [0, S): the token's sequence
    tokens: Tensor  # [S] int64: trained tokens of each sequence

    @classmethod
    def of(cls, sequence: Tensor) -> Segments:
        """From any numbering [N] of sequences."""
        _, index, tokens = torch.unique(sequence, return_inverse=True, return_counts=True)
        return cls(index=index, tokens=tokens)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each token's sequence, float64 [N]; constant."""
        return sum_segments(values.detach().double(), self.index, len(self.tokens))[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each token's sequence, float64 [N]; constant."""
        return self.sum(values) / self.tokens[self.index]


def sum_segments(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums [count] of the values [N] with equal `index` [N], added in order.

    The order is fixed on CUDA too, where `index_add_` depends on thread timing and a resumed update would not be bit for bit the same.
    """
    if not len(index):
        return values.new_zeros(count)
    lengths = torch.bincount(index, minlength=count)
    added: Tensor = torch.segment_reduce(values[index.argsort(stable=True)], "sum", lengths=lengths)
    return added


def token_weights(aggregation: Aggregation, segments: Segments, dtype: torch.dtype, *, rollout_tokens: Tensor | None = None) -> Tensor:
    """c_t, [N]. `rollout_tokens`: trained tokens of each token's rollout, [N]; None: every sequence is a rollout."""
    if aggregation == "sequence_mean":
        return (segments.tokens[segments.index] if rollout_tokens is None else rollout_tokens).to(dtype).reciprocal()
    return torch.ones_like(segments.index, dtype=dtype)


def loss_denominator(samples: Sequence[Sample], aggregation: Aggregation, *, length: int) -> float:
    """D over all ranks and micro-batches of an optimizer step. `length` is the constant of `constant`, in tokens.

    0.0 for a batch without a trained token, for which no step is made.
    """
    if aggregation == "token_mean":
        return float(sum(sum(sample.loss_mask) for sample in samples))
    rollouts = len({(sample.group_index, sample.episode_id) for sample in samples if any(sample.loss_mask)})
    return float(rollouts if aggregation == "sequence_mean" else rollouts * length)
