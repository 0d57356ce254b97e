"""Token sequences laid out as a forest of prefixes, so that a prefix shared by several sequences is stored once.

In lexicographic order each sequence shares the most with its neighbours and adds exactly one run of new tokens: those after the
prefix it shares with the sequence before. Concatenating these runs walks the prefix tree in preorder, so the descendants of token
j are the tokens from j up to some end: an interval.
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
        """P: how many tokens it shares with the sequences laid out before it."""
        return len(self.path) - self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Every token of some sequences, each shared prefix once."""

    token_ids: Ints  # [T]
    positions: Ints  # [T] position in the sequence, from 0
    ends: Ints  # [T] token i >= j continues token j exactly if i < ends[j]
    branches: tuple[Branch, ...]  # those that add tokens, in the order of the layout
    paths: tuple[Ints, ...]  # for each sequence, in the order given: forest indices of its tokens


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences."""
    length = min(len(first), len(second))
    different = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(different.argmax()) if different.any() else length


def build_forest(sequences: Sequence[Sequence[int]], *, share: bool = True) -> Forest:
    """The forest of some sequences, none of them empty. Without `share` no prefix is shared."""
    order = sorted(range(len(sequences)), key=lambda number: tuple(sequences[number])) if share else range(len(sequences))
    paths: list[Ints] = [np.empty(0, np.int64)] * len(sequences)
    token_ids: list[Any] = []
    branches: list[Branch] = []
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    size = 0
    before: int | None = None
    for number in order:
        tokens = sequences[number]
        shared = common_prefix(sequences[before], tokens) if share and before is not None else 0
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
