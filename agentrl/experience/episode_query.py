"""A filter and a sort order for episodes, and the SQL that implements them."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.errors import UserError
from agentrl.experience.episode_rows import NAME_CHARS, NO_SCORE

MAX_WORDS = 16
QUERY_CHARS = 400
Sort = Literal["newest", "score", "tokens", "turns", "seconds"]
Outcome = Literal["solved", "partial", "failed", "pending", "excluded"]

_ORDERS = {"newest": "number", "score": "score_order", "tokens": "tokens", "turns": "turns", "seconds": "seconds"}
_INDEX = {"newest": "NOT INDEXED"} | {sort: f"INDEXED BY episodes_by_{sort}" for sort in ("score", "tokens", "turns", "seconds")}
_CALLED = "EXISTS (SELECT 1 FROM episode_tools WHERE tool = {tool} AND episode_tools.number = episodes.number)"
_RARE = 10_000  # maximum number of episodes that call a rare tool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeQuery:
    """A filter and a sort order for episodes. A field that is empty or None matches all episodes."""

    text: str = ""  # words, all of which the episode must contain; a word that ends in * is a prefix
    phase: str = ""  # train, before, step8, after, gate000008
    kind: str = ""  # kind of task
    split: str = ""  # train, heldout or heldout_real
    outcome: Outcome | Literal[""] = ""
    stop_reason: str = ""
    tool: str = ""  # name of a tool that it called
    exclusion: str = ""  # kind of the failure that excludes the episode
    blame: str = ""
    min_score: float | None = None
    max_score: float | None = None
    version: int | None = None  # policy version between the oldest and the newest that sampled its tokens
    min_tokens: int | None = None
    max_tokens: int | None = None
    step: int | None = None  # learner step of its group, counted from 1
    group: int | None = None
    sort: Sort = "newest"
    descending: bool = True
    after: str = ""  # `EpisodePage.next` of the previous page
    limit: int = 50

    @property
    def is_all(self) -> bool:
        """Whether every episode matches."""
        return self == EpisodeQuery(sort=self.sort, descending=self.descending, after=self.after, limit=self.limit)


@dataclass(frozen=True, slots=True)
class Position:
    """The last row of a page: its number, and the value by which it is sorted."""

    number: int
    value: float

    def encode(self) -> str:
        """Returns the position as a string without spaces."""
        return f"{self.number}:{float(self.value).hex()}"

    @classmethod
    def decode(cls, text: str) -> Position:
        """Returns the position that `encode` encoded. Raises `UserError` if the string is invalid."""
        number, _, value = text[:100].partition(":")
        try:
            position = cls(int(number), float.fromhex(value))
        except (ValueError, OverflowError):
            position = cls(-1, math.nan)
        if not 0 <= position.number < 1 << 63 or math.isnan(position.value):
            raise UserError(f"after={text[:40]!r} is not the end of a page", fix="use `next` of the previous page")
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """An SQL query and its parameters."""

    sql: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlan:
    """The SQL statements for a query. The rows of a page are (number, value by which the row is sorted)."""

    matches: Statement  # numbers of all matching episodes, without an order
    walk: Statement  # a page, read in the order of an index; fast if many episodes match
    scan: Statement  # a page, selected by sorting all matching episodes
    chosen: Statement  # a page of the episodes whose numbers are in a JSON list, the first parameter


def plan_query(db: sqlite3.Connection, query: EpisodeQuery) -> QueryPlan | None:
    """Returns the statements for a query; None if a filter has an unknown name. Raises `UserError` if the query is invalid."""
    if query.sort not in _ORDERS:
        raise UserError(f"unknown order {query.sort[:40]!r}", fix=f"use {', '.join(_ORDERS)}")
    names = {"phase": query.phase, "kind": query.kind, "split": query.split, "outcome": query.outcome, "stop": query.stop_reason}
    labels = _labels(db, names | {"exclusion": query.exclusion, "blame": query.blame, "tool": query.tool})
    if labels is None:
        return None
    tool = labels.pop("tool", None)
    ranges = (
        ("score_order >= ?", query.min_score),
        ("score_order <= ?", query.max_score),
        ("score_order > ?", NO_SCORE if query.max_score is not None and query.min_score is None else None),
        ("oldest <= ?", query.version),
        ("newest >= ?", query.version),
        ("tokens >= ?", query.min_tokens),
        ("tokens <= ?", query.max_tokens),
        ("idx = ?", query.group),
        ("idx IN (SELECT idx FROM taken WHERE step = ?)", None if query.step is None else query.step - 1),
    )
    terms = [f"{name} = ?" for name in labels] + [term for term, value in ranges if value is not None]
    values: list[Any] = [*labels.values(), *(value for _, value in ranges if value is not None)]
    if any(isinstance(value, int) and not -(1 << 62) < value < 1 << 62 for value in values):
        raise UserError("a number in the query has more than 62 bits", fix="use a smaller number")
    few = query.group is not None or query.step is not None
    return _plan(query, _sources(db, query, tool, few=few), terms, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """Parts of an SQL query: the text after FROM, the first and the last condition, and the name of the column with the row number."""

    walk: str
    scan: str
    first: str = ""
    values: tuple[Any, ...] = ()  # parameters of the first condition
    last: str = ""  # tested on the rows that meet all other conditions
    number: str = "number"


def _sources(db: sqlite3.Connection, query: EpisodeQuery, tool: int | None, *, few: bool) -> _Sources:
    """Chooses which table or index SQLite reads first: the groups of a step, the full-text matches, the calls to a rare tool, or an index
    of all episodes."""
    called = "" if tool is None else _CALLED.format(tool=tool)
    by_group, by_order = "episodes INDEXED BY episodes_by_group", f"episodes {_INDEX[query.sort]}"
    if query.text.strip():
        matched, values = "episode_text MATCH ?", (full_text_query(query.text),)
        joined, number = "episode_text CROSS JOIN episodes ON number = episode_text.rowid", "episode_text.rowid"
        tested = "{} CROSS JOIN episode_text ON episode_text.rowid = number"
        walk, scan = (joined if query.sort == "newest" else tested.format(by_order)), joined
        if few:
            walk = scan = tested.format(by_group)
        return _Sources(walk=walk, scan=scan, first=matched, values=values, last=called, number=number)
    if few:
        return _Sources(walk=by_group, scan=by_group, last=called)
    if tool is not None and _is_rare(db, tool):
        joined = "episode_tools CROSS JOIN episodes ON episodes.number = episode_tools.number"
        return _Sources(walk=joined, scan=joined, first="tool = ?", values=(tool,), number="episode_tools.number")
    return _Sources(walk=by_order, scan="episodes INDEXED BY episodes_scan", last=called)


def _is_rare(db: sqlite3.Connection, tool: int) -> bool:
    query = f"SELECT count(*) FROM (SELECT 1 FROM episode_tools WHERE tool = ? LIMIT {_RARE + 1})"
    return int(db.execute(query, (tool,)).fetchone()[0]) <= _RARE


def _plan(query: EpisodeQuery, sources: _Sources, terms: list[str], values: list[Any]) -> QueryPlan:
    terms, values = [*filter(None, [sources.first, *terms, sources.last])], [*sources.values, *values]
    column, way = _ORDERS[query.sort], "DESC" if query.descending else "ASC"
    sign = "<" if query.descending else ">"
    number = sources.number
    number = "number" if column != "number" and sources.walk != sources.scan else number  # column of the index that gives the order
    column = number if column == "number" else column
    order = f" ORDER BY {number} {way}" if column == number else f" ORDER BY {column} {way}, {number} {way}"
    later, more = list[str](), list[Any]()
    if query.after:
        position = Position.decode(query.after)
        alone = column == number
        later = [f"{number} {sign} ?"] if alone else [f"({column}, {number}) {sign} (?, ?)"]
        more = [position.number] if alone else [position.value, position.number]
    where, paged = _where(terms), _where([*terms, *later])
    chosen = _where(["number IN (SELECT value FROM json_each(?))", *(term.replace(number, "number") for term in later)])
    picked = f"SELECT number, {column.replace(number, 'number')} FROM episodes{chosen}{order.replace(number, 'number')}"
    return QueryPlan(
        matches=Statement(sql=f"SELECT {number} FROM {sources.scan}{where}", values=tuple(values)),
        walk=Statement(sql=f"SELECT {number}, {column} FROM {sources.walk}{paged}{order}", values=(*values, *more)),
        scan=Statement(sql=f"SELECT {number}, {column} FROM {sources.scan}{paged}{order}", values=(*values, *more)),
        chosen=Statement(sql=picked, values=tuple(more)),
    )


def _where(terms: list[str]) -> str:
    return f" WHERE {' AND '.join(terms)}" if terms else ""


def full_text_query(text: str) -> str:
    """Returns an SQLite full-text query for episodes that contain all words of a string. A word that ends in * is a prefix.

    Uses the first `MAX_WORDS` words among the first `QUERY_CHARS` characters. Raises `UserError` if none of them has a letter or digit.
    """
    words = [(word.rstrip("*"), word.endswith("*")) for word in text[:QUERY_CHARS].replace("\0", " ").split()][:MAX_WORDS]
    quoted = ['"' + word.replace('"', '""') + '"' + "*" * prefix for word, prefix in words if any(map(str.isalnum, word))]
    if not quoted:
        raise UserError(f"the search text {text[:40]!r} contains no word", fix="use letters or digits")
    return " ".join(word.encode("utf-8", "replace").decode() for word in quoted)


def _labels(db: sqlite3.Connection, names: dict[str, str]) -> dict[str, int] | None:
    """Returns the ids of the labels in `names`, by sort of label. Empty names are omitted. Returns None if a name is unknown."""
    labels = dict[str, int]()
    for sort, name in names.items():
        if name:
            known = name[:NAME_CHARS].encode("utf-8", "replace").decode()
            row = db.execute("SELECT id FROM labels WHERE sort = ? AND name = ?", (sort, known)).fetchone()
            if row is None:
                return None
            labels[sort] = int(row[0])
    return labels
