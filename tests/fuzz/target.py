"""Fuzz targets: one boundary each, how it is fed, and what must hold for every input."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutators import Mutator

Check = Callable[[bytes], None]
"""Feeds one input to a boundary. It swallows the errors that the boundary documents; anything else it raises is a finding."""


class Broken(AssertionError):
    """An invariant does not hold for this input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One boundary. `python -m tests.fuzz` takes its name, or a reference (`module:attr`).

    An input is what would cross the boundary, byte for byte, so that a finding can be read. Where a boundary has several entry points,
    its first line names one (see `tests.fuzz.mutators.labelled`).
    """

    name: str
    about: str
    prepare: Callable[[Path], Check]
    """Makes the check, once a process. It is given an empty folder of its own, which somebody else removes."""
    seeds: Callable[[], Sequence[bytes]]
    """Inputs to start from; each is one that the boundary takes, or nearly."""
    mutate: Mutator | None = None
    """Changes an input without taking it apart; half of all mutations, the other half are libFuzzer's own."""
    words: tuple[bytes, ...] = ()
    """What libFuzzer puts into inputs besides: names and marks that chance would not spell."""
    brief: int = 10_000
    """Inputs of a brief run. It reaches about 98% of the branches that twice as many inputs reach."""


def one_in(count: int, data: bytes) -> bool:
    """Whether `data` is one of the inputs that also go the slow way: the same ones each time."""
    return zlib.crc32(data) % count == 0


def must(holds: bool, what: str) -> None:
    """Raises `Broken` when it does not hold."""
    if not holds:
        raise Broken(what)
