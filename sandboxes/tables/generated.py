"""Generated tables, with random names and cells from one split's word pool."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from agentrl.records import Split
from sandboxes.tables.kinds import Row, Table
from sandboxes.tables.names import Names

ROWS = (10, 22)


def generated_table(rng: Random, split: Split, *, wild: bool = False, rows_from_to: tuple[int, int] = ROWS) -> Table:
    """Returns a table with a label, a group, two numeric columns and a date, with random names. A pure function of its arguments."""
    names = Names(rng, split, wild=wild)
    stem = names.stem()
    other = names.sibling(stem) if rng.random() < 0.4 else names.stem()
    label, group, first, day = (names.column() for _ in range(4))
    second = names.sibling(first) if rng.random() < 0.4 else names.column()
    count = rng.randint(*rows_from_to)
    labels = names.phrases(count) if rng.random() < 0.75 else names.serials(count)
    values = _values(rng, names, group)
    weights = [rng.random() + 0.2 for _ in values]
    ranges = {first: _number_range(rng), second: _number_range(rng)}
    start = date(rng.randint(1995, 2030), 1, 1)
    rows: list[Row] = []
    for text in labels:
        row = {label: text, group: rng.choices(values, weights)[0]}
        for column, (low, high, digits) in ranges.items():
            row[column] = f"{10 ** rng.uniform(low, high):.{digits}f}"
        row[day] = (start + timedelta(days=rng.randrange(900))).isoformat()
        rows.append(row)
    return Table(stem=stem, other=other, rows=rows, labels=(label,), groups=(group,), numbers=(first, second), dates=(day,))


def _values(rng: Random, names: Names, group: str) -> list[str]:
    """Returns three to five distinct cells for a group column: words, plain numbers or numbered names (`class_0`)."""
    count = rng.randint(3, 5)
    style = rng.random()
    if style < 0.15:
        return [str(number) for number in rng.sample(range(rng.choice((10, 100, 1000))), count)]
    if style < 0.3:
        head = group if rng.random() < 0.5 else names.value()
        return [f"{head}_{number}" for number in range(count)]
    return [names.value() for _ in range(count)]


def _number_range(rng: Random) -> tuple[float, float, int]:
    """Returns the bounds and the number of decimals of a column's cells. Cells differ in length, so text order is not numeric order."""
    low = rng.uniform(0, 1.5)
    return low, low + rng.uniform(1.0, 2.0), rng.choice((0, 1, 1, 2))
