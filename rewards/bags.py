"""Compares two tables as bags: they match if their rows can be paired one-to-one with the rows of each pair near each other.

Equal rows are paired first. The other rows are split by their non-numeric cells, and then at gaps in a numeric column that are wider than
the tolerance. The few remaining rows are paired in order or, if that fails, by augmenting paths. The comparison takes as long as sorting,
unless many different rows of the truth are near each other in several columns. `crowded` detects such a truth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

MAX_CROWD = 128
"""Maximum number of rows near each other that may be paired by augmenting paths."""

Row = tuple[Any, ...]


class Cells(NamedTuple):
    """The functions and the tolerance for comparing the cells of two tables."""

    near: Callable[[Any, Any], bool]
    """Returns whether a cell (first argument) is near a cell of the truth (second argument)."""
    number: Callable[[Any], float | None]
    """Returns a cell as a finite float if it is compared as a number, else None."""
    relative: float
    """Cells that differ by more than this, relative to the larger cell, are not near each other. Less than 1."""


class _Item(NamedTuple):
    numbers: tuple[float, ...]
    row: Row


def near_rows(row: Row, true_row: Row, cells: Cells) -> bool:
    """Whether every cell of a row is near the corresponding cell of the truth's row."""
    return all(map(cells.near, row, true_row))


def same_bag(given: Sequence[Row], wanted: Sequence[Row], cells: Cells) -> bool:
    """Whether the rows of `given` and `wanted` can be paired one-to-one with the rows of each pair near each other."""
    given_counts, wanted_counts = Counter(given), Counter(wanted)
    ours = _by_texts((given_counts - wanted_counts).elements(), cells)
    theirs = _by_texts((wanted_counts - given_counts).elements(), cells)
    return ours.keys() == theirs.keys() and all(
        len(given_part) == len(wanted_part) and _paired(given_part, wanted_part, cells)
        for texts, side in ours.items()
        for given_part, wanted_part in _split(side, theirs[texts], cells.relative, pairs=True)
    )


def crowded(wanted: Sequence[Row], cells: Cells) -> bool:
    """Whether a truth has more than `MAX_CROWD` rows near each other that `same_bag` cannot pair in order.

    Rows of a correct answer can connect rows of the truth that are up to three tolerances apart, so rows within four tolerances count as
    near. If the truth is not crowded, an answer with more than `MAX_CROWD` rows near each other is wrong.
    """
    wide = min(4 * cells.relative, 0.999)
    return any(
        len(rows) > MAX_CROWD and len(rows[0].numbers) > 1 and not _tight(rows, cells.relative / 4)
        for side in _by_texts(wanted, cells, whole=True).values()
        for rows, _ in _split(side, [], wide, pairs=False)
    )


def _by_texts(rows: Iterable[Row], cells: Cells, *, whole: bool = False) -> dict[tuple[Any, ...], list[_Item]]:
    """Groups rows by their non-numeric cells and, if `whole` is true, also by their whole numbers, which need no tolerance."""
    sides: dict[tuple[Any, ...], list[_Item]] = {}
    for row in rows:
        numbers = [cells.number(cell) for cell in row]
        if whole:
            numbers = [None if value is None or value.is_integer() else value for value in numbers]
        texts = tuple((type(cell), cell) if value is None else None for cell, value in zip(row, numbers, strict=True))
        sides.setdefault(texts, []).append(_Item(tuple(value for value in numbers if value is not None), row))
    return sides


def _split(some: list[_Item], true: list[_Item], relative: float, *, pairs: bool) -> Iterator[tuple[list[_Item], list[_Item]]]:
    """Splits the two lists of rows at the same values and yields pairs (rows of `some`, rows of `true`).

    No row in one pair is near a row in another pair. With `pairs`, two lists of different lengths are not split further.
    """
    pending = [(some, true, 0, 0)]
    while pending:
        some, true, column, unsplit = pending.pop()
        columns = len((some or true)[0].numbers)
        if unsplit == columns or len(some) + len(true) <= 2 or (pairs and len(some) != len(true)):
            yield some, true
            continue
        parts = list(_gaps(some, true, column, relative))
        pending += [(*part, (column + 1) % columns, unsplit + 1 if len(parts) == 1 else 0) for part in parts]


def _gaps(some: list[_Item], true: list[_Item], column: int, relative: float) -> Iterator[tuple[list[_Item], list[_Item]]]:
    """Yields parts of both lists of rows, split at gaps in a numeric column that are wider than the tolerance."""
    marked = [(item.numbers[column], True, item) for item in some] + [(item.numbers[column], False, item) for item in true]
    marked.sort(key=lambda entry: entry[0])
    part: tuple[list[_Item], list[_Item]] = ([], [])
    before = marked[0][0]
    for value, ours, item in marked:
        if not _close(before, value, relative):
            yield part
            part = ([], [])
        part[0 if ours else 1].append(item)
        before = value
    yield part


def _paired(some: Sequence[_Item], true: Sequence[_Item], cells: Cells) -> bool:
    """Whether the two lists have the same number of rows and every row can be paired with a near row of the other list."""
    columns = len(some[0].numbers)
    for column in range(max(columns, 1)):
        ours, theirs = ([item.row for item in sorted(side, key=partial(_from, column))] for side in (some, true))
        if all(near_rows(row, other, cells) for row, other in zip(ours, theirs, strict=True)):
            return True
    if columns < 2 or len(some) > MAX_CROWD:  # with one column, no other pairing is better than pairing in order
        return False
    options = [[at for at, other in enumerate(theirs) if near_rows(row, other, cells)] for row in ours]
    owner: dict[int, int] = {}

    def assign(number: int, visited: set[int]) -> bool:
        for at in options[number]:
            if at not in visited:
                visited.add(at)
                if at not in owner or assign(owner[at], visited):
                    owner[at] = number
                    return True
        return False

    return all(assign(number, set()) for number in range(len(ours)))


def _tight(some: Sequence[_Item], relative: float) -> bool:
    """Whether all rows are so close to each other that all pairings are equivalent."""
    columns = list(zip(*(item.numbers for item in some), strict=True))
    return all(_close(min(column), max(column), relative) for column in columns)


def _close(first: float, second: float, relative: float) -> bool:
    """Whether two numbers are within the tolerance, with a margin for whole numbers that a float cannot represent."""
    return math.isclose(first, second, rel_tol=relative + 1e-15)


def _from(column: int, item: _Item) -> tuple[float, ...]:
    """Returns a sort key for rows that compares the given column first."""
    return (*item.numbers[column:], *item.numbers[:column])
