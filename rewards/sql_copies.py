"""Changed copies of a database: rows removed, rows added, or different values in a column. They reveal queries that ignore the data.

The copies are a pure function of the database and of the true query. Replacement values come from the same column or from the query's
literals, so that joins and conditions still select some rows.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from random import Random
from typing import Any

from rewards.sql_text import literals

MAX_TABLES = 4  # maximum number of the true query's tables in which rows are removed or added, one table at a time
MAX_COLUMNS = 8  # maximum number of the true query's columns for which copies with different values are created
MAX_VALUES = 1000  # maximum number of a column's values from which replacements are chosen
MAX_ROWS = 2000
"""Maximum total number of rows in all tables, in `smaller`."""
_REMOVED = (0.5, 0.25, 0.75)  # shares of the rows that are removed

_numbers = count()
Change = Callable[[sqlite3.Connection, Random], None]


def smaller(origin: sqlite3.Connection) -> AbstractContextManager[tuple[sqlite3.Connection, str]]:
    """Returns a context manager that yields a copy with about `MAX_ROWS` rows, or all rows if there are fewer, and the copy's name."""
    tables = _tables(origin)
    total = sum(_size(origin, table) for table in tables)
    return _copy(origin, _without(tables, 1 - MAX_ROWS / total) if total > MAX_ROWS else lambda copy, random: None, 0)


def changed_copies(origin: sqlite3.Connection, query: str, columns: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields names of changed copies, for connections to `file:NAME?vfs=memdb`. A copy exists until the next copy is requested.

    Args:
        query: the true query.
        columns: (table, column) pairs that the query reads.
    """
    tables, known = _tables(origin), literals(query)
    columns = list(columns)
    read = _read(tables, columns)
    used = sorted({table for table, _ in columns if table in tables})[:MAX_TABLES]
    removed = [_without(chosen, share) for share in _REMOVED for chosen in (tables, *([table] for table in used))]
    doubled = [_doubled([table]) for table in used]
    others = [_other(table, column, known) for table, column in read]
    for number, change in enumerate([*removed, *doubled, *others, *others]):
        with _copy(origin, change, number) as (_, name):
            yield name


def altered_copies(origin: sqlite3.Connection, columns: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields (column, name of a copy) pairs. In the copy, every value of the column is replaced, and distinct values stay distinct."""
    for table, column in _read(_tables(origin), columns):
        with _copy(origin, _altered(table, column), 0) as (_, name):
            yield f"{table}.{column}", name


@contextlib.contextmanager
def _copy(origin: sqlite3.Connection, change: Change, seed: int) -> Iterator[tuple[sqlite3.Connection, str]]:
    """Yields a changed copy without triggers and checks, and its name."""
    name = f"/agentrl-copy-{next(_numbers)}"
    with contextlib.closing(sqlite3.connect(f"file:{name}?vfs=memdb", uri=True)) as copy:
        origin.backup(copy)
        copy.execute("PRAGMA ignore_check_constraints = ON")
        for (trigger,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            copy.execute(f"DROP TRIGGER {_quoted(trigger)}")
        change(copy, Random(seed))
        copy.commit()
        yield copy, name


def _tables(origin: sqlite3.Connection) -> list[str]:
    named = origin.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite~_%' ESCAPE '~'")
    return [name for (name,) in named]


def _read(tables: list[str], columns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted((table, column) for table, column in columns if table in tables and column)[:MAX_COLUMNS]


def _without(tables: list[str], share: float) -> Change:
    """Removes a share of the rows of every table, but leaves at least one row in each table."""

    def change(copy: sqlite3.Connection, random: Random) -> None:
        for table in tables:
            _per_row(copy, "agentrl_gone", _random_choice(copy, table, random, share, all_but_one=True))
            _try(copy, f"DELETE FROM {_quoted(table)} WHERE agentrl_gone()")

    return change


def _doubled(tables: list[str]) -> Change:
    """Adds copies of some rows of every table. A copied row receives a new id if its id is a whole number."""

    def change(copy: sqlite3.Connection, random: Random) -> None:
        for table in tables:
            described = copy.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
            keys = [name for _, name, kind, *_, key in described if key and str(kind).upper() == "INTEGER"]
            names = ", ".join(_quoted(name) for _, name, *_ in described if [name] != keys)
            _per_row(copy, "agentrl_twice", _random_choice(copy, table, random, 0.5))
            _try(copy, f"INSERT OR IGNORE INTO {_quoted(table)} ({names}) SELECT {names} FROM {_quoted(table)} WHERE agentrl_twice()")

    return change


def _other(table: str, column: str, known: list[Any]) -> Change:
    """Replaces about half of a column's cells with different values from the column or from `known`. Keeps NULL."""

    def change(copy: sqlite3.Connection, random: Random) -> None:
        at, place = _quoted(table), _quoted(column)
        values = [value for (value,) in _rows(copy, f"SELECT DISTINCT {place} FROM {at} WHERE {place} NOT NULL LIMIT {MAX_VALUES}")]
        kinds = {type(value) for value in values}
        named = [value for value in known if type(value) in kinds]
        chosen = _random_choice(copy, table, random, 0.5)

        def other(value: Any) -> Any:
            if value is None or not chosen():
                return value
            return random.choice(named if named and random.random() < 0.5 else values)

        copy.create_function("agentrl_other", 1, other)
        _try(copy, f"UPDATE OR IGNORE {at} SET {place} = agentrl_other({place})")

    return change


def _altered(table: str, column: str) -> Change:
    """Replaces every cell of a column with a new value. Distinct cells receive distinct values. Keeps NULL."""

    def other(value: Any) -> Any:
        if isinstance(value, str):
            return f"{value}~"
        if isinstance(value, bytes):
            return value + b"~"
        return value if value is None else value + 1

    def change(copy: sqlite3.Connection, random: Random) -> None:
        at, place = _quoted(table), _quoted(column)
        copy.create_function("agentrl_other", 1, other)
        _try(copy, f"UPDATE {at} SET {place} = agentrl_other({place})") or _try(copy, f"UPDATE {at} SET {place} = -agentrl_other({place})")

    return change


def _random_choice(copy: sqlite3.Connection, table: str, random: Random, share: float, *, all_but_one: bool = False) -> Callable[[], bool]:
    """Returns a function that chooses rows at random, one row per call.

    The function chooses at least one row and, with `all_but_one`, at most all rows but one.
    """
    sure, numbers = random.randrange(max(_size(copy, table), 1)), count()

    def chosen() -> bool:
        number = next(numbers)
        return not all_but_one if number == sure else random.random() < share

    return chosen


def _per_row(copy: sqlite3.Connection, name: str, function: Callable[[], bool]) -> None:
    copy.create_function(name, 0, function)


def _size(copy: sqlite3.Connection, table: str) -> int:
    return sum(number for (number,) in _rows(copy, f"SELECT count(*) FROM {_quoted(table)}"))


def _rows(copy: sqlite3.Connection, query: str) -> list[Any]:
    with contextlib.suppress(sqlite3.Error):
        return copy.execute(query).fetchall()
    return []


def _try(copy: sqlite3.Connection, change: str) -> bool:
    """Executes a change and returns whether it succeeded. A change to a virtual table or a generated column fails."""
    try:
        copy.execute(change)
    except sqlite3.Error:
        return False
    return True


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
