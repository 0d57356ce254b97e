"""Parses a recipe's options for datasets: their names, levels, configuration keys and weights.

    "chain_sum, gcd:2, spell_backward@1, products(max_terms=2 max_digits=3):4"

`@1` is a level of the dataset's curriculum, the parentheses contain keys of its configuration with JSON values without blanks, and `:2` is
its weight in the rotation. Parsing does not need the package; `problems` checks whether the dataset exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UserError

MOST_WEIGHT = 1000
_ENTRY = re.compile(r"\s*([A-Za-z0-9_]+)\s*(?:@(\d{1,3}))?\s*(?:\(([^()]*)\))?\s*(?::(\d{1,5}))?\s*(?:,|$)")
_FORM = "write them as in tasks.family.options.datasets='chain_sum, gcd:2, products@1(max_terms=2 max_digits=3)'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dataset in a mixture."""

    name: str
    level: int | None = None
    """Curriculum level for all of the dataset's attributes. None means the package's default configuration."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the dataset's configuration. They override the values that the level sets."""
    weight: int = 1
    """Number of problems from this dataset in one round."""


def parse(text: str, option: str) -> tuple[Source, ...]:
    """Returns the datasets in an option, in order. If the text is invalid, raises a `UserError` that contains the option's name."""
    sources: list[Source] = []
    at = 0
    while at < len(text):
        match = _ENTRY.match(text, at)
        if match is None:
            raise UserError(f"tasks.family.options.{option} cannot be parsed, starting at {text[at : at + 40]!r}", fix=_FORM)
        at = match.end()
        name, level, keys, weight = match.groups()
        sources.append(
            Source(
                name=name,
                level=None if level is None else int(level),
                keys=dict(_keys(keys or "", name)),
                weight=_weight(weight, name),
            )
        )
    names = [source.name for source in sources]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"tasks.family.options.{option} contains {twice} twice", fix="list it once, with a weight, such as gcd:2")
    return tuple(sources)


def _keys(text: str, name: str) -> Iterator[tuple[str, Any]]:
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"{name}({text}): {word!r} is not key=value", fix="separate keys with spaces, as in chain_sum(max_terms=3)")
        try:
            yield key, json.loads(value)
        except ValueError:
            yield key, value


def _weight(text: str | None, name: str) -> int:
    weight = 1 if text is None else int(text)
    if not 1 <= weight <= MOST_WEIGHT:
        raise UserError(f"{name} has weight {weight}", fix=f"use an integer from 1 to {MOST_WEIGHT}")
    return weight


class Rounds:
    """Assigns problem indices to datasets. A round of `len(self)` problems contains each dataset as often as its weight, interleaved."""

    def __init__(self, sources: Sequence[Source]) -> None:
        shares = [((turn + 0.5) / source.weight, place, source) for place, source in enumerate(sources) for turn in range(source.weight)]
        self._order = [source for _, _, source in sorted(shares, key=lambda share: share[:2])]
        self._places: list[int] = []
        seen: dict[str, int] = {}
        for source in self._order:
            self._places.append(seen.get(source.name, 0))
            seen[source.name] = self._places[-1] + 1

    def __len__(self) -> int:
        return len(self._order)

    def at(self, index: int) -> tuple[Source, int]:
        """Returns the dataset of a problem, and the problem's number within that dataset, from 0."""
        round_number, place = divmod(index, len(self._order))
        source = self._order[place]
        return source, round_number * source.weight + self._places[place]
