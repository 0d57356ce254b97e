"""Lays out token sequences as a forest of prefixes, in which a shared prefix is stored once, and computes attention over it.

In lexicographic order, each sequence shares its longest common prefix with a neighbour and adds one run of new tokens. Concatenating these
runs traverses the prefix tree in preorder, so token j and its descendants form an interval that starts at j.

In the attention over a forest, each token attends to itself and its ancestors. The attention is registered with transformers, so any model
that uses its attention interface can train on forests. Two kernels compute the same results. On CPU, each branch is a row of a batched
scaled dot product: its new tokens are the queries, and its complete path provides the keys. On CUDA, one FlexAttention call skips the
blocks that contain no pair of an ancestor and a descendant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from agentrl.learner.ulysses import TokenShard, sharded_attention

Ints = NDArray[np.int64]
NAME = "agentrl_forest"
_WASTE = 1.3  # largest ratio of padded to real query-key pairs in a batch of branches ...
_SLACK = 2**15  # ... plus this many pairs, which cost less than another kernel call
_PIECE = 128  # maximum number of queries in a row
_FLOAT_MASK = 2**22  # elements of the largest mask that is stored as floats (16 MiB)
_BLOCK = 128  # FlexAttention's tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The tokens that one sequence adds to a forest."""

    start: int  # index of its first new token in the forest
    path: Ints  # [P + L] forest indices of all its tokens, first to last; the last L are the new ones
    new: int  # L

    @property
    def shared(self) -> int:
        """P: the number of tokens that the sequence shares with the sequences before it."""
        return len(self.path) - self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The tokens of several sequences. A shared prefix is stored once."""

    token_ids: Ints  # [T]
    positions: Ints  # [T] position in the sequence, from 0
    ends: Ints  # [T] token i >= j is a descendant of token j if and only if i < ends[j]
    branches: tuple[Branch, ...]  # in layout order
    paths: tuple[Ints, ...]  # forest indices of each sequence's tokens, in the order of the arguments


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common prefix of two sequences."""
    length = min(len(first), len(second))
    different = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(different.argmax()) if different.any() else length


def build_forest(sequences: Sequence[Sequence[int]]) -> Forest:
    """Returns the forest of one or more non-empty sequences. A sequence that adds no new tokens has no branch."""
    order = sorted(range(len(sequences)), key=lambda number: tuple(sequences[number]))
    paths: list[Ints] = [np.empty(0, np.int64)] * len(sequences)
    token_ids: list[Any] = []
    branches: list[Branch] = []
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    size = 0
    before: int | None = None
    for number in order:
        tokens = sequences[number]
        shared = common_prefix(sequences[before], tokens) if before is not None else 0
        new = len(tokens) - shared
        prefix = paths[before][:shared] if before is not None else paths[number]
        paths[number] = np.concatenate((prefix, np.arange(size, size + new)))
        ends[paths[number]] = size + new
        if new:
            branches.append(Branch(start=size, path=paths[number], new=new))
            token_ids.append(np.asarray(tokens[shared:], dtype=np.int64))
        size += new
        before = number
    positions = [np.arange(branch.shared, len(branch.path)) for branch in branches]
    return Forest(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        ends=ends[:size],
        branches=tuple(branches),
        paths=tuple(paths),
    )


class ForestLayout:
    """The data that attention needs about one forest, on one device. The data is built once per forest and used by every layer."""

    def __init__(self, forest: Forest, device: torch.device, shard: TokenShard | None = None) -> None:
        """`shard`: the part of the tokens that this rank holds and that `positions` covers; None means all tokens."""
        self.device = device
        self.shard = shard
        self.length = len(forest.token_ids)
        self.all_positions = torch.from_numpy(forest.positions).to(device)
        self.positions = self.all_positions if shard is None else shard.part(self.all_positions)
        self.ends = torch.from_numpy(forest.ends).to(device)
        self.batches = [_Batch(branches, device) for branches in _alike(_pieces(forest.branches))] if device.type == "cpu" else []
        if self.batches:
            rows = torch.cat([batch.queries[batch.real] for batch in self.batches])
            self.order = torch.empty_like(rows)
            self.order[rows] = torch.arange(len(rows))
            self.queries = torch.cat([batch.queries.flatten() for batch in self.batches])
            self.keys = torch.cat([batch.keys.flatten() for batch in self.batches])
        self._block_masks: dict[int | None, Any] = {}

    def block_mask(self, window: int | None) -> Any:
        """Returns FlexAttention's mask: token q sees token k if k is an ancestor of q (or q itself) inside the window."""
        if window not in self._block_masks:
            from torch.nn.attention.flex_attention import create_block_mask

            ends, positions = self.ends, self.all_positions

            def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                seen = (k <= q) & (q < ends[k])
                return seen if window is None else seen & (positions[q] - positions[k] < window)

            length = self.length
            self._block_masks[window] = create_block_mask(visible, None, None, length, length, self.device, BLOCK_SIZE=_BLOCK)
        return self._block_masks[window]


class _Batch:
    """Branches of similar shape, which form the rows of one padded batch."""

    def __init__(self, branches: Sequence[Branch], device: torch.device) -> None:
        longest, widest = max(branch.new for branch in branches), max(len(branch.path) for branch in branches)
        queries = np.zeros((len(branches), longest), np.int64)
        keys = np.zeros((len(branches), widest), np.int64)
        for row, branch in enumerate(branches):
            queries[row, : branch.new] = branch.path[branch.shared :]
            keys[row, : len(branch.path)] = branch.path
        self.queries = torch.from_numpy(queries).to(device)  # [B, L] padded with token 0
        self.keys = torch.from_numpy(keys).to(device)  # [B, K] padded with token 0
        self.shared = torch.tensor([branch.shared for branch in branches], device=device)
        new = torch.tensor([branch.new for branch in branches], device=device)
        self.real = torch.arange(longest, device=device) < new[:, None]  # [B, L]
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    def mask(self, heads: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns the mask [B, 1, heads * L, K] to add to the scores: 0 if the query sees the key, else -inf.

        Padding queries see the keys of the real queries. A mask with more than `_FLOAT_MASK` elements is boolean, and the kernel converts
        it to floats in every layer, in the forward and in the backward pass.
        """
        if (heads, window, dtype) not in self._masks:
            at = self.shared[:, None] + torch.arange(self.queries.shape[1], device=self.queries.device)
            key = torch.arange(self.keys.shape[1], device=self.keys.device)
            seen = key <= at[..., None]
            if window is not None:
                seen = seen & (at[..., None] - key < window)
            seen = seen.repeat(1, heads, 1)[:, None]
            if seen.numel() <= _FLOAT_MASK:
                seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[heads, window, dtype] = seen
        return self._masks[heads, window, dtype]


def _pieces(branches: Sequence[Branch]) -> list[Branch]:
    """Cuts long branches into pieces. The keys of a piece end with its last token, so fewer keys of each row are masked."""
    pieces = []
    for branch in branches:
        for at in range(0, branch.new, _PIECE):
            new = min(_PIECE, branch.new - at)
            pieces.append(Branch(start=branch.start + at, path=branch.path[: branch.shared + at + new], new=new))
    return pieces


def _alike(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Groups branches into batches with little padding."""
    groups: list[list[Branch]] = []
    real = 0
    for branch in sorted(branches, key=lambda branch: (-branch.new, -len(branch.path))):
        pairs = branch.new * len(branch.path)
        if groups:
            group = groups[-1]
            padded = (len(group) + 1) * group[0].new * max(len(branch.path), *(len(other.path) for other in group))
            if padded <= _WASTE * (real + pairs) + _SLACK:
                group.append(branch)
                real += pairs
                continue
        groups.append([branch])
        real = pairs
    return groups


def forest_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    forest: ForestLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: query [1, Hq, T, D], key and value [1, Hkv, T, D] become [1, T, Hq, D].

    If `forest` is None, the tokens are plain causal sequences.
    """
    if forest is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    kernel = _by_branch if query.device.type == "cpu" else _by_block
    attend = partial(kernel, forest=forest, scaling=scaling, window=sliding_window)
    if forest.shard is None:
        return attend(query, key, value), None
    return sharded_attention(attend, query, key, value, forest.shard), None


def _by_branch(query: Tensor, key: Tensor, value: Tensor, forest: ForestLayout, scaling: float | None, window: int | None) -> Tensor:
    """Computes attention branch by branch. Query heads that share a key head become additional queries of that head, so the keys are
    gathered only once."""
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
    group = heads // kv_heads
    # The gradient of one gather for all batches is one sum. With a gather per batch, it would add one full-length tensor per batch.
    queries = torch.split(F.embedding(forest.queries, _rows(query)), [batch.queries.numel() for batch in forest.batches])
    sizes = [batch.keys.numel() for batch in forest.batches]
    keys, values = (torch.split(F.embedding(forest.keys, _rows(tensor)), sizes) for tensor in (key, value))
    outputs = []
    for batch, q, k, v in zip(forest.batches, queries, keys, values, strict=True):
        rows, length = batch.queries.shape
        q = q.view(rows, length, kv_heads, group, width).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * length, width)
        k, v = (part.view(rows, -1, kv_heads, width).transpose(1, 2) for part in (k, v))
        seen = batch.mask(group, window, query.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
        out = out.view(rows, kv_heads, group, length, width).permute(0, 3, 1, 2, 4).reshape(rows, length, heads * width)
        outputs.append(out[batch.real])
    return torch.cat(outputs)[forest.order].view(1, -1, heads, width)


def _rows(tensor: Tensor) -> Tensor:
    """Reshapes [1, H, T, D] to [T, H * D]."""
    return tensor[0].transpose(0, 1).flatten(1)


def _by_block(query: Tensor, key: Tensor, value: Tensor, forest: ForestLayout, scaling: float | None, window: int | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = _flex()(query, key, value, block_mask=forest.block_mask(window), scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def register() -> str:
    """Registers the attention with transformers and returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, forest_attention)
    return NAME
