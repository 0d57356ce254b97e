"""SQL: the answer is a query, right when it gives what the true query gives on the same databases.

    rewards.sql:sql      with task.data = {"answer": "SELECT a FROM t", "databases": ["CREATE TABLE t(a); INSERT INTO t VALUES (1);"]}

Both queries are executed; nothing is judged by how it is written. They run in SQLite, in memory, in a process that is ended at a
deadline, on a connection that can only read: opened read-only, with an authorizer that lets SELECT, columns and SQLite's harmless
functions pass, and with bounds on steps, lengths and rows. `sqlglot` only parses: to refuse what is no single query, and to see whether
the truth orders its rows.

A query that names the result's values gives the right result too. So give several databases that differ; a query must be right on all.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from agentrl.contract.values import same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import LONGEST, SHOWN, Configured, answer_of, need, wrong
from agentrl.reward.worker import PATIENCE_S, AtAnswer, Worker

DEADLINE_S = 5.0
MAX_ROWS = 20_000
MAX_STEPS = 50_000_000  # of SQLite's virtual machine, for one query
MAX_LENGTH = 1_000_000  # bytes of a value, and of a row
_NEAR = 1000  # rows that are compared with a tolerance
_BAD_FUNCTIONS = frozenset({"load_extension", "randomblob", "random", "readfile", "writefile", "edit", "fts3_tokenizer", "zeroblob"})

Row = tuple[Any, ...]


class Sql(Configured):
    """1 when the answer's rows are the truth's on every database, else 0. Settings in `task.data["sql"]`.

    Rows are compared as a bag, in order where the truth has an ORDER BY of its own; columns by position, not by name; numbers within
    `relative`, whole ones exactly.
    An answer that reads no table where the truth reads one is wrong. A truth that fails, or gives no row on any database, is
    the task's fault. A truth that orders should leave no ties, or one order of them is right and another wrong.
    """

    name: ClassVar[str] = "sql"
    timeout_s: ClassVar[float] = PATIENCE_S

    databases: tuple[str, ...] = ()
    """SQL scripts, each of which makes one database. None: the task has them, in `data["databases"]`, a text or a list."""
    ordered: bool | None = None
    """Whether the order of rows matters. None: where the truth has an ORDER BY."""
    relative: float = Field(1e-9, ge=0, lt=1)
    after: str = ""
    """The query is what follows the last occurrence of this. Empty: all that was submitted."""

    def model_post_init(self, context: Any) -> None:
        need("sqlglot")

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.of(task)
        truth, scripts = rules.wanted(task), rules.databases or task.data.get("databases", ())
        scripts = [scripts] if isinstance(scripts, str) else list(scripts)
        if not isinstance(truth, str) or not scripts or not all(isinstance(script, str) for script in scripts):
            raise TaskError(f"task {task.id}: it needs a query as its truth, and data.databases, a list of SQL scripts")
        text, problem = answer_of(episode, after=rules.after, longest=LONGEST)
        if problem:
            return wrong(problem)
        request = {"truth": truth, "answer": text, "databases": scripts, "ordered": rules.ordered, "relative": rules.relative}
        try:
            told = await _worker.judge(request, sound=request | {"answer": truth})
        except AtAnswer as error:
            return wrong(f"answer {text[:SHOWN]!r}: it {error}")
        if told["task"]:
            raise TaskError(f"task {task.id}: {told['task']}")
        return Score(value=float(not told["wrong"]), evidence=f"answer {text[:SHOWN]!r}{told['wrong'] and ': ' + told['wrong']}")


class Refused(Exception):
    """A query that is not executed, or failed, and why."""


class Result(NamedTuple):
    """What a query gave, and whether it read a table."""

    rows: list[Row]
    columns: int
    reads: bool


def prepare() -> None:
    """In the process, before anything is asked."""
    import sqlglot  # noqa: F401


def verdict(request: Mapping[str, Any]) -> dict[str, str]:
    """In the process: what is wrong with the task, and with the answer; both empty when the answer is right."""
    truth, answer, told = request["truth"], request["answer"], {"task": "", "wrong": ""}
    refused, some = _refused(answer), False
    for number, script in enumerate(request["databases"]):
        where = f"database {number + 1}"
        name = f"/agentrl-{next(_numbers)}"
        writable = sqlite3.connect(f"file:{name}?vfs=memdb", uri=True)
        try:
            writable.executescript(script)
            writable.commit()
            wanted = execute(name, truth)
        except (sqlite3.Error, Refused, ValueError) as error:
            writable.close()
            return told | {"task": f"on {where} the truth or the script fails: {str(error)[:300]}"}
        some |= bool(wanted.rows)
        try:
            given = execute(name, answer) if not refused and not told["wrong"] else None
        except Refused as error:
            told["wrong"] = f"on {where}: {str(error)[:300]}"
        else:
            ordered = orders(truth) if request["ordered"] is None else request["ordered"]
            if given is not None and (difference := differ(given, wanted, ordered=ordered, relative=request["relative"])):
                told["wrong"] = f"on {where}: {difference}"
        finally:
            writable.close()
    if not some:
        return told | {"task": "the truth gives no row on any database, so that every query without rows would be right"}
    return told | ({"wrong": refused} if refused else {})


_numbers = count()


def execute(name: str, query: str) -> Result:
    """The result of a query on the database `name`, read-only. Raises `Refused`."""
    read: set[str] = set()
    connection = sqlite3.connect(f"file:{name}?vfs=memdb&mode=ro", uri=True)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorizer(read))
        connection.set_progress_handler(_budget(), 10_000)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise Refused("it gives no rows and no columns")
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError, OverflowError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        raise Refused(f"it gives more than {MAX_ROWS:,} rows")
    return Result(rows, len(cursor.description), bool(read))


def _authorizer(read: set[str]) -> Callable[..., int]:
    """Lets a query read and compute, and notes the tables that it reads."""

    def allow(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
        if action == sqlite3.SQLITE_READ:
            read.add(str(first))
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _BAD_FUNCTIONS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_OK if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE) else sqlite3.SQLITE_DENY

    return allow


def _budget() -> Callable[[], int]:
    left = count(MAX_STEPS // 10_000, -1)
    return lambda: int(next(left) <= 0)


def _refused(query: str) -> str:
    """Why a text is no single query; empty when it is one, or when sqlglot cannot tell: SQLite decides then."""
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    try:
        found = [one for one in sqlglot.parse(query, read="sqlite") if one is not None]
    except (SqlglotError, RecursionError):
        return ""
    if len(found) != 1:
        return f"{len(found)} statements, and one query is wanted"
    return "" if isinstance(found[0], exp.Query | exp.Values) else f"{found[0].key.upper()} is no query"


def orders(query: str) -> bool:
    """Whether a query orders its rows itself, not only a part of it."""
    import sqlglot

    return sqlglot.parse_one(query, read="sqlite").args.get("order") is not None


def differ(given: Result, wanted: Result, *, ordered: bool, relative: float) -> str:
    """How two results differ; empty when they do not."""
    if given.columns != wanted.columns:
        return f"{given.columns} columns, not {wanted.columns}"
    if len(given.rows) != len(wanted.rows):
        return f"{len(given.rows)} rows, not {len(wanted.rows)}"
    if wanted.reads and not given.reads:
        return "it reads no table"
    if ordered:
        same = all(_near(one, other, relative) for one, other in zip(given.rows, wanted.rows, strict=True))
        return "" if same else "other rows, or in another order"
    return "" if same_bag(given.rows, wanted.rows, relative) else "other rows"


def same_bag(given: Sequence[Row], wanted: Sequence[Row], relative: float) -> bool:
    """Whether two bags of rows are equal: those that are exactly so are taken away, what remains is paired within the tolerance."""
    one, other = Counter(given), Counter(wanted)
    rest, due = list((one - other).elements()), list((other - one).elements())
    if len(rest) != len(due) or len(rest) > _NEAR:
        return False
    for row in rest:
        place = next((place for place, true in enumerate(due) if _near(row, true, relative)), None)
        if place is None:
            return False
        del due[place]
    return True


def _near(one: Row, other: Row, relative: float) -> bool:
    return all(_same(a, b, relative) for a, b in zip(one, other, strict=True))


def _same(one: Any, other: Any, relative: float) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return same_number(one, other, relative=relative)
    return type(one) is type(other) and bool(one == other)


_worker = Worker(verdict, prepare=prepare, deadline_s=DEADLINE_S, memory=1 << 30, processes=2)
sql = Sql()
