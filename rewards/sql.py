"""Scores SQL: the answer is a query. The answer is correct if it returns the same rows as the true query on the same databases.

    rewards.sql:sql      with task.data = {"answer": "SELECT a FROM t", "databases": ["CREATE TABLE t(a); INSERT INTO t VALUES (1);"]}

Both queries are executed; the text of the queries is not compared. The queries run in an in-memory SQLite database, in a subprocess with a
deadline. The connection is read-only and limits steps, lengths and rows. Its authorizer allows only SELECT, reading columns and harmless
functions.

A query with a hard-coded result would also return the correct rows. Therefore, both queries are also executed on changed copies of the
databases (`rewards.sql_copies`). If the true query's result changes on a copy, the answer's result must change as well.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from agentrl.base.numbers import same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, MAX_ANSWER_CHARS, ConfiguredVerifier, answer_of, strip_code_fence, zero_score
from agentrl.reward.worker import QUEUE_TIMEOUT_S, AnswerFault, SubprocessWorker
from rewards import bags
from rewards.sql_copies import altered_copies, changed_copies, smaller
from rewards.sql_text import orders, statements

DEADLINE_S = 10.0
MAX_ROWS = 20_000
MAX_STEPS = 50_000_000  # maximum number of steps of SQLite's virtual machine per query
MAX_LENGTH = 1_000_000  # maximum size of a value, and of a row, in bytes
_BAD_FUNCTIONS = frozenset({"load_extension", "randomblob", "random", "readfile", "writefile", "edit", "fts3_tokenizer", "zeroblob"})

Row = tuple[Any, ...]


class Sql(ConfiguredVerifier):
    """Scores 1 if the answer's rows equal the truth's rows on every database and change with the data in the same way, else 0.

    Settings are in `task.data["sql"]`. Rows are compared as a bag, or in order if the truth ends with an ORDER BY. Columns are compared by
    position, not by name. Numbers are compared within the tolerance `relative`, whole numbers exactly. Comments, semicolons and a fence
    around the query are ignored. A truth that fails, that returns no row on any database, or that returns too many rows near each other
    within `relative` is a task fault. A truth with an ORDER BY should have no ties, because only one order of tied rows is accepted.

    The answer is also executed on changed copies of the databases (rows removed or added, different values) on which the truth's rows
    change. On these copies, the answer must return the truth's rows for some of the distinct results (at least a fifth, and at least two if
    there are four), and its rows must change with every column whose values the truth returns or uses in computations. An answer is
    therefore correct if it differs from the truth only in cases that do not occur in the databases, such as ties or missing rows. An answer
    is wrong if it returns constants, reads data without using it, or uses different columns with the same data.
    """

    name: ClassVar[str] = "sql"
    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S

    databases: tuple[str, ...] = ()
    """SQL scripts, each of which creates one database. Empty: the scripts are the task's `data["databases"]`, a string or a list."""
    ordered: bool | None = None
    """Whether the order of rows matters. None means that it matters if the truth has an ORDER BY."""
    relative: float = Field(1e-9, ge=0, lt=1)
    after: str = ""
    """The query is the text after the last occurrence of this string. Empty: the query is the full submission."""

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the query. Raises `TaskError` if the truth, a database script or a setting is invalid."""
        rules = self.for_task(task)
        truth, scripts = rules.truth_of(task), rules.databases or task.data.get("databases", ())
        scripts = [scripts] if isinstance(scripts, str) else scripts
        if (
            not isinstance(truth, str)
            or not isinstance(scripts, list | tuple)
            or not scripts
            or not all(isinstance(script, str) for script in scripts)
        ):
            raise TaskError(f"task {task.id}: its truth must be a query, and data.databases a list of SQL scripts")
        if len(truth) > MAX_ANSWER_CHARS:
            raise TaskError(
                f"task {task.id}: its true query has {len(truth)} characters, but an answer may have at most {MAX_ANSWER_CHARS}"
            )
        text, problem = answer_of(episode, after=rules.after, longest=MAX_ANSWER_CHARS)
        if problem:
            return zero_score(problem)
        query = strip_code_fence(text, "sql", "sqlite")
        request = {"truth": truth, "answer": query, "databases": scripts, "ordered": rules.ordered, "relative": rules.relative}
        try:
            result = await _worker.evaluate(request, control=request | {"answer": truth})
        except AnswerFault as error:
            return zero_score(f"answer {text[:EVIDENCE_CHARS]!r}: it {error}")
        if result["task"]:
            raise TaskError(f"task {task.id}: {result['task']}")
        return Score(
            value=float(not result["wrong"]), evidence=f"answer {text[:EVIDENCE_CHARS]!r}{result['wrong'] and ': ' + result['wrong']}"
        )


class Refused(Exception):
    """A query was rejected or failed. The message is the reason."""


class Result(NamedTuple):
    """The rows of a query, and the (table, column) pairs of the database that it read."""

    rows: list[Row]
    columns: int
    reads: frozenset[tuple[str, str]]


class _Database(NamedTuple):
    """An open database of the task, and the result of the true query on it."""

    connection: sqlite3.Connection
    name: str
    wanted: Result


def verdict(request: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"task": problem, "wrong": problem}; both problems are empty if the answer is correct. Runs in the subprocess."""
    truth, answer, relative = request["truth"], request["answer"], request["relative"]
    ordered = orders(truth) if request["ordered"] is None else request["ordered"]
    with contextlib.ExitStack() as opened:
        try:
            databases = [
                _open_database(script, truth, f"database {number + 1}", opened) for number, script in enumerate(request["databases"])
            ]
        except Refused as error:
            return {"task": str(error), "wrong": ""}
        if not any(database.wanted.rows for database in databases):
            return {"task": "the truth returns no row on any database, so every query that returns no rows would be correct", "wrong": ""}
        if not ordered and any(bags.crowded(database.wanted.rows, _cells(relative)) for database in databases):
            return {
                "task": f"more than {bags.MAX_CROWD} rows of the truth are too close to each other to be distinguished with "
                f"relative={relative}: lower it, or add an ORDER BY to the truth",
                "wrong": "",
            }
        problems = (_wrong(answer, database, f"database {number + 1}", ordered, relative) for number, database in enumerate(databases))
        return {"task": "", "wrong": next(filter(None, problems), "") or _does_not_follow(truth, answer, databases, relative)}


_numbers = count()


def _open_database(script: str, truth: str, where: str, opened: contextlib.ExitStack) -> _Database:
    """Opens the database that a script creates. Raises `Refused` if the script or the truth fails."""
    name = f"/agentrl-{next(_numbers)}"
    connection = opened.enter_context(contextlib.closing(sqlite3.connect(f"file:{name}?vfs=memdb", uri=True)))
    try:
        connection.executescript(script)
        connection.commit()
        return _Database(connection, name, execute(name, truth))
    except (sqlite3.Error, Refused, ValueError) as error:
        raise Refused(f"on {where} the truth or the script fails: {str(error)[:300]}") from None


def _wrong(answer: str, database: _Database, where: str, ordered: bool, relative: float) -> str:
    """Returns the problem with an answer on a database; empty if the answer returns the truth's rows."""
    try:
        given = execute(database.name, answer)
    except Refused as error:
        return f"on {where}: {str(error)[:300]}"
    difference = differ(given, database.wanted, ordered=ordered, relative=relative)
    return f"on {where}: {difference}" if difference else ""


def _does_not_follow(truth: str, answer: str, databases: Sequence[_Database], relative: float) -> str:
    """Returns why an answer that is correct on all databases does not depend on their data in the same way as the truth; empty if it does.

    A wrong query may also return no rows, or only 0, NULL and empty strings. Such true results therefore count only if there are no other
    results.
    """
    shared: dict[bool, dict[str, bool]] = {True: {}, False: {}}  # whether a true result has data -> true result -> whether answered
    with contextlib.ExitStack() as opened:
        smaller_ones = [_smaller(database, truth, opened) for database in databases]
        for wanted, given in _on_copies(truth, answer, smaller_ones):
            same = given is not None and not differ(given, wanted, ordered=False, relative=relative)
            results, result = shared[_says_something(wanted)], repr(sorted(map(repr, wanted.rows)))
            results[result] = results.get(result, False) or same
        results = shared[True] or shared[False]
        if sum(results.values()) < max(min(2, len(results) // 2), len(results) / 5):
            return "its rows do not change with the data in the same way as the truth's rows"
        unused = next((column for database in smaller_ones for column in _unused(truth, answer, database, relative)), "")
        return f"its rows do not change with {unused} in the same way as the truth's rows" if unused else ""


def _smaller(database: _Database, truth: str, opened: contextlib.ExitStack) -> _Database:
    """Returns a smaller copy of the database if the truth returns data on it, otherwise the database. Changing a small copy costs less."""
    connection, name = opened.enter_context(smaller(database.connection))
    with contextlib.suppress(Refused):
        wanted = execute(name, truth)
        if _says_something(wanted):
            return _Database(connection, name, wanted)
    return database


def _on_copies(truth: str, answer: str, databases: Sequence[_Database]) -> Iterator[tuple[Result, Result | None]]:
    """Yields (truth's result, answer's result) on each changed copy that changes the truth's rows. A failed answer's result is None."""
    for database in databases:
        original = Counter(database.wanted.rows)
        for name in changed_copies(database.connection, truth, database.wanted.reads):
            wanted = _executed(name, truth)
            if wanted is not None and Counter(wanted.rows) != original:
                yield wanted, _executed(name, answer)


def _unused(truth: str, answer: str, database: _Database, relative: float) -> Iterator[str]:
    """Yields columns that the truth uses in its result or in computations, but the answer does not use."""
    before = _executed(database.name, answer)
    for column, name in altered_copies(database.connection, database.wanted.reads):
        wanted = _executed(name, truth)
        if wanted is None or len(wanted.rows) != len(database.wanted.rows) or not _says_something(wanted):
            continue  # the truth may only compare these values, and neither return them nor compute with them
        if not differ(wanted, database.wanted, ordered=False, relative=relative):
            continue
        after = _executed(name, answer)
        if before is not None and after is not None and not differ(after, before, ordered=False, relative=relative):
            yield column


def _says_something(result: Result) -> bool:
    return any(cell not in (None, 0, "") for row in result.rows for cell in row)


def _executed(name: str, query: str) -> Result | None:
    with contextlib.suppress(Refused):
        return execute(name, query)
    return None


def execute(name: str, query: str) -> Result:
    """Returns the result of a query on the database `name`, read-only.

    Raises `Refused` if the string is not exactly one query, or if the query is not allowed, fails or exceeds a limit.
    """
    single = statements(query)
    if len(single) != 1:
        raise Refused(f"{len(single)} statements instead of one query")
    read: set[tuple[str, str]] = set()
    connection = sqlite3.connect(f"file:{name}?vfs=memdb&mode=ro", uri=True)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorizer(read))
        connection.set_progress_handler(_budget(), 10_000)
        cursor = connection.execute(single[0])
        if cursor.description is None:
            raise Refused("it returns no rows and no columns")
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError, OverflowError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        raise Refused(f"it returns more than {MAX_ROWS:,} rows")
    return Result(rows, len(cursor.description), frozenset(read))


def _authorizer(read: set[tuple[str, str]]) -> Callable[..., int]:
    """Returns an authorizer that lets a query read and compute. It records columns read from the database's tables (not SQLite's own)."""

    def allow(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
        if action == sqlite3.SQLITE_READ:
            if not str(first).lower().startswith("sqlite_"):
                read.add((str(first), str(second or "")))
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _BAD_FUNCTIONS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_OK if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE) else sqlite3.SQLITE_DENY

    return allow


def _budget() -> Callable[[], int]:
    left = count(MAX_STEPS // 10_000, -1)
    return lambda: int(next(left) <= 0)


def differ(given: Result, wanted: Result, *, ordered: bool, relative: float) -> str:
    """Returns how two results differ; empty if they do not differ."""
    if given.columns != wanted.columns:
        return f"{given.columns} columns, not {wanted.columns}"
    if len(given.rows) != len(wanted.rows):
        return f"{len(given.rows)} rows, not {len(wanted.rows)}"
    if wanted.reads and not given.reads:
        return "it does not read a table"
    cells = _cells(relative)
    if ordered:
        same = all(bags.near_rows(row, true_row, cells) for row, true_row in zip(given.rows, wanted.rows, strict=True))
        return "" if same else "different rows, or a different order"
    return "" if bags.same_bag(given.rows, wanted.rows, cells) else "different rows"


def _cells(relative: float) -> bags.Cells:
    return bags.Cells(near=lambda cell, true_cell: _same(cell, true_cell, relative), number=_number, relative=relative)


def _number(cell: Any) -> float | None:
    return float(cell) if isinstance(cell, int | float) and math.isfinite(cell) else None


def _same(cell: Any, true_cell: Any, relative: float) -> bool:
    if isinstance(cell, int | float) and isinstance(true_cell, int | float):
        return same_number(cell, true_cell, relative=relative)
    return type(cell) is type(true_cell) and bool(cell == true_cell)


_worker = SubprocessWorker(verdict, deadline_s=DEADLINE_S, memory=1 << 30, processes=2)
sql = Sql()
