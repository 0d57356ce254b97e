"""Lays out token sequences as a forest of prefixes, in which a prefix that several sequences share is stored once.

In lexicographic order, each sequence shares its longest common prefix with a neighbour and adds one run of new tokens. Concatenating these
runs traverses the prefix tree in preorder, so token j and its descendants form an interval that starts at j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


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
