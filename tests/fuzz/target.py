"""Fuzz targets: one boundary each, how it gets inputs, and the guarantees for every input."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutators import Mutator

Check = Callable[[bytes], None]
"""Feeds one input to a boundary. It catches the errors that the boundary documents; any other exception is a finding."""


class Broken(AssertionError):
    """An invariant does not hold for this input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One boundary. `python -m tests.fuzz` takes its name, or a reference (`module:attr`).

    An input is what would cross the boundary, byte for byte, so that a finding is readable. If a boundary has several entry points,
    its first line names one (see `tests.fuzz.mutators.labelled`).
    """

    name: str
    about: str
    prepare: Callable[[Path], Check]
    """Builds the check, once per process, with an empty folder that the caller removes."""
    seeds: Callable[[], Sequence[bytes]]
    """Inputs to start from, which the boundary accepts or almost accepts."""
    mutate: Mutator | None = None
    """Changes an input and keeps its format. Half of all mutations use it, the other half are those of libFuzzer."""
    words: tuple[bytes, ...] = ()
    """Texts that libFuzzer also inserts into inputs: names and marks that random changes would not produce."""
    brief: int = 10_000
    """Inputs of a brief run. It reaches about 98% of the branches that twice as many inputs reach."""


def one_in(count: int, data: bytes) -> bool:
    """Whether `data` also gets the slow checks. The choice depends only on `data`."""
    return zlib.crc32(data) % count == 0


def must(holds: bool, message: str) -> None:
    """Raises `Broken` with `message` if the condition is false."""
    if not holds:
        raise Broken(message)
