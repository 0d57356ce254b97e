"""The set of 0-1 vectors that a network of comparators can output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

Comparator = tuple[int, int]
"""Two channels, numbered from 0, the smaller number first. The smaller value moves to the first channel."""
MAX_CHANNELS = 10


def comparators(channels: int) -> tuple[Comparator, ...]:
    """Returns all possible comparators in a network with this number of channels."""
    return tuple(combinations(range(channels), 2))


def label(comparator: Comparator) -> str:
    """Returns the label of a comparator, such as "1-3", with channels numbered from 1."""
    return f"{comparator[0] + 1}-{comparator[1] + 1}"


def parse(text: str, channels: int) -> Comparator:
    """Returns the comparator for a label. Raises `ValueError` if the text is not a label."""
    pair = _by_label(channels).get(text.strip())
    if pair is None:
        raise ValueError(f"{text[:40]!r} is not a comparator of {channels} channels, such as 1-2")
    return pair


@lru_cache(maxsize=16)
def _by_label(channels: int) -> dict[str, Comparator]:
    return {label(pair): pair for pair in comparators(channels)}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a network for all 0-1 inputs. By the 0-1 principle, a network sorts all inputs if all of these outputs are sorted.

    Bit `i` of a vector is the value of channel `i`. A vector is sorted if no 1 precedes a 0.
    """

    channels: int
    vectors: frozenset[int]

    @classmethod
    def of(cls, channels: int, network: Iterable[Comparator] = ()) -> Outputs:
        """Returns the outputs of a network. Raises `ValueError` if `channels` is not 2 to `MAX_CHANNELS`."""
        if not 2 <= channels <= MAX_CHANNELS:
            raise ValueError(f"channels must be between 2 and {MAX_CHANNELS}, got {channels}")
        outputs = cls(channels, frozenset(range(1 << channels)))
        for pair in network:
            outputs = outputs.after(pair)
        return outputs

    def after(self, pair: Comparator) -> Outputs:
        """Returns the outputs with one more comparator at the end."""
        low, high = (1 << pair[0]), (1 << pair[1])
        return Outputs(self.channels, frozenset(v ^ low ^ high if v & low and not v & high else v for v in self.vectors))

    @property
    def unsorted(self) -> int:
        """Number of outputs that are not sorted; 0 for a sorting network."""
        sorted_vectors = {((1 << ones) - 1) << (self.channels - ones) for ones in range(self.channels + 1)}
        return len(self.vectors - sorted_vectors)

    @property
    def key(self) -> str:
        """Identifies the set of outputs: sha256, shortened to 16 hexadecimal digits."""
        text = ",".join(map(str, sorted(self.vectors)))
        return hashlib.sha256(f"{self.channels}:{text}".encode()).hexdigest()[:16]
