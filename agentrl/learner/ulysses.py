"""Sequence parallelism as in Ulysses (https://arxiv.org/abs/2309.14509): a team of ranks shares every forest of sequences.

Each rank embeds, projects and transforms a shard of the tokens. DeepSpeed's all-to-all before attention gives each rank all tokens for some
of the heads, and a second all-to-all after attention reverses the exchange. The team's logprobs are gathered, and each rank computes the
same loss. The gradient on a rank covers only its own shard, so the sum over all ranks is the complete gradient, as without teams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from agentrl.errors import UserError
from agentrl.learner.ranks import COLLECTIVE_TIMEOUT_S, Ranks, Team


def form_teams(ranks: Ranks, size: int) -> Ranks:
    """Returns the same ranks, grouped into teams of `size` neighbours. Every rank must call this function."""
    if size == 1:
        return ranks
    for first in range(0, ranks.size, size):
        members = list(range(first, first + size))
        group = dist.new_group(members, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        if ranks.rank in members:
            assert group is not None
            team = Team(rank=ranks.rank - first, size=size, group=group)
    return replace(ranks, team=team)


def check_heads(config: Any, team: Team) -> None:
    """Raises `UserError` if the model's key heads cannot be divided evenly among a team."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % team.size:
        raise UserError(
            f"learner.sequence_parallel={team.size} does not divide the model's {heads} key heads",
            fix="choose a divisor: every rank of a team computes the same number of heads",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """A rank's shard of a forest of `length` tokens. A shard has `width` tokens from `start` on; the last shards may have fewer tokens."""

    team: Team
    length: int
    width: int
    start: int
    predictions: int  # number of the forest's predictions, in the order of the predicting tokens
    own: slice  # the predictions that this rank computes

    @classmethod
    def of(cls, team: Team, length: int, positions: Tensor) -> TokenShard:
        """Returns this rank's shard. `positions` [U]: sorted forest indices of the predicting tokens."""
        width = -(-length // team.size)
        start = team.rank * width
        first, last = torch.searchsorted(positions, torch.tensor([start, start + width])).tolist()
        return cls(team=team, length=length, width=width, start=start, predictions=len(positions), own=slice(first, last))

    def part(self, tokens: Tensor) -> Tensor:
        """Returns this rank's part [S] of the tokens [T], padded with zeros."""
        own = tokens[self.start : self.start + self.width]
        return F.pad(own, (0, self.width - len(own)))

    def gather(self, own: Tensor) -> Tensor:
        """Returns the results [K, U] of all predictions on every rank of the team, gathered from the ranks' results [K, own]."""
        whole: Tensor = _Gathered.apply(own, self)  # type: ignore[no-untyped-call]
        return whole


def sharded_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, shard: TokenShard
) -> Tensor:
    """Computes attention over all tokens of a forest, of which each rank holds a part. Maps [1, H, S, D] to [1, S, H, D].

    `attend` maps some heads of all tokens, [1, h, T, D], to [1, T, h, D].
    """
    from deepspeed.sequence.layer import DistributedAttention

    def whole(*parts: Tensor) -> Tensor:
        output = attend(*(part[:, : shard.length].transpose(1, 2) for part in parts))
        return F.pad(output, (0, 0, 0, 0, 0, parts[0].shape[1] - shard.length))

    attention = DistributedAttention(whole, shard.team.group, scatter_idx=2, gather_idx=1)
    output: Tensor = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), 0)
    return output


class _Gathered(torch.autograd.Function):
    """Gathers the ranks' results in the forward pass. The backward pass returns each rank's shard.

    The backward pass does not sum over ranks. All ranks compute the same loss, so a sum would count the loss several times.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: TokenShard) -> Tensor:
        ctx.own = shard.own
        whole = own.new_zeros(own.shape[0], shard.predictions)
        whole[:, shard.own] = own
        dist.all_reduce(whole, group=shard.team.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[:, ctx.own], None
