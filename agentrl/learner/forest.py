"""Token sequences laid out as a forest of prefixes, so that what several sequences begin with is there once.

Sequences in lexicographic order share the most with their neighbours, and each adds exactly one stretch of new tokens: what
follows the prefix it has in common with the one before. Laying those stretches end to end is a walk through the prefix tree in
preorder, hence the tokens that have token j among their ancestors are the ones from j up to some end: an interval.
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
    path: Ints  # [P + L] indices in the forest of all its tokens, first to last; the last L are the new ones
    new: int  # L

    @property
    def shared(self) -> int:
        """P: how many tokens it has in common with sequences laid out before it."""
        return len(self.path) - self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Every token of some sequences, shared prefixes once."""

    token_ids: Ints  # [T]
    positions: Ints  # [T] place in the sequence, from 0
    ends: Ints  # [T] token i >= j continues token j exactly if i < ends[j]
    branches: tuple[Branch, ...]  # those that add tokens, in the order of the layout
    paths: tuple[Ints, ...]  # for each sequence, as given: where its tokens are in the forest


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(first), len(second))
    different = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(different.argmax()) if different.any() else length


def lay_out(sequences: Sequence[Sequence[int]], *, share: bool = True) -> Forest:
    """The forest of some sequences, none of them empty. Without `share` each one stands alone."""
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
