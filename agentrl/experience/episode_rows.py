"""The table of episodes in the SQLite store. It has a row for each stored episode, so that readers can filter, sort and search episodes.

Rows are written in the transaction that stores their group, and are updated when late scores arrive. The length of strings is bounded.
Names that many episodes share, such as kinds and tools, are stored once, as labels.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator
from itertools import islice

from agentrl.base.numbers import is_at_least
from agentrl.records import Blame, Episode, Group, Message, ScoredEpisode

SCHEMA = (
    "CREATE TABLE labels (id INTEGER PRIMARY KEY, sort TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (sort, name))",
    # `score_order` is the score or, without a score, less than every score; `idx` is the group, or NULL for an evaluation episode.
    "CREATE TABLE episodes (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, idx INTEGER, attempt INTEGER NOT NULL,"
    " step INTEGER, phase INTEGER NOT NULL, kind INTEGER NOT NULL, split INTEGER NOT NULL, outcome INTEGER NOT NULL,"
    " stop INTEGER NOT NULL, exclusion INTEGER NOT NULL, blame INTEGER NOT NULL, score REAL, score_order REAL NOT NULL,"
    " oldest INTEGER, newest INTEGER, tokens INTEGER NOT NULL, turns INTEGER NOT NULL, seconds REAL NOT NULL, sampled_at REAL NOT NULL,"
    " task_id TEXT NOT NULL, parts TEXT NOT NULL, tools TEXT NOT NULL)",
    "CREATE INDEX episodes_by_id ON episodes (id)",
    "CREATE INDEX episodes_by_group ON episodes (idx, attempt)",
    "CREATE INDEX episodes_by_score ON episodes (score_order)",
    "CREATE INDEX episodes_by_tokens ON episodes (tokens)",
    "CREATE INDEX episodes_by_turns ON episodes (turns)",
    "CREATE INDEX episodes_by_seconds ON episodes (seconds)",
    # Contains all columns by which episodes are filtered or sorted, so that a query with few matches reads an eighth of the table.
    "CREATE INDEX episodes_scan ON episodes (phase, kind, split, outcome, stop, exclusion, blame, score_order, oldest, newest, tokens,"
    " turns, seconds)",
    "CREATE TABLE evaluated (number INTEGER PRIMARY KEY, body BLOB NOT NULL)",  # the bodies of episodes without a group, as groups of one
    "CREATE TABLE episode_tools (tool INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (tool, number)) WITHOUT ROWID",
    "CREATE VIRTUAL TABLE episode_text USING fts5(text, content='', columnsize=0, tokenize='unicode61 remove_diacritics 2')",
)
OUTCOMES = ("solved", "partial", "failed", "pending", "excluded")
"""In this order: a score that reaches the task's threshold; a positive score below it, or any score if the task has no threshold; a score
of 0 or less that is below the threshold; a score that has not arrived; no score."""
NAME_CHARS = 200
TEXT_CHARS = 6000
"""Maximum searchable characters per episode: its question, answer, failures and evidence, then its messages, calls and results."""
MAX_TOOLS = 32
MAX_PARTS = 32
NO_SCORE = -1e308
"""`score_order` of an episode without a score."""
_SPAN_CHARS = 1000  # maximum characters of one message or result in the searchable text
_COLUMNS = (
    "id, idx, attempt, step, phase, kind, split, outcome, stop, exclusion, blame, score, score_order, oldest, newest, tokens, turns,"
    " seconds, sampled_at, task_id, parts, tools"
)
_INSERT = f"INSERT INTO episodes ({_COLUMNS}) VALUES ({', '.join('?' * len(_COLUMNS.split(',')))})"


def insert_episodes(db: sqlite3.Connection, group: Group, *, phase: str = "train", step: int | None = None) -> list[int]:
    """Inserts the episodes of a new group, and returns their row numbers. The caller must have opened a transaction.

    A residual contains the same episodes as its first group, so it adds no rows.

    Args:
        step: learner step of the evaluated version; None for a training group, whose step is in `taken`.
    """
    numbers = []
    for attempt, scored in enumerate(group.episodes if group.index >= 0 else ()):
        tools = tuple(islice(dict.fromkeys(_tools(scored.episode)), MAX_TOOLS))
        labels = [_label(db, sort, name) for sort, name in _names(group, scored, phase).items()]
        identity = (_short(scored.episode.id), group.index if step is None else None, attempt, step)
        row = (*identity, *labels, *_figures(scored), _short(group.task_id), _parts(scored), json.dumps(tools))
        number = db.execute(_INSERT, row).lastrowid
        assert number is not None, "an inserted row has a number"
        db.executemany("INSERT OR IGNORE INTO episode_tools VALUES (?, ?)", [(_label(db, "tool", tool), number) for tool in tools])
        db.execute("INSERT INTO episode_text (rowid, text) VALUES (?, ?)", (number, searchable_text(group, scored)))
        numbers.append(number)
    return numbers


def update_scores(db: sqlite3.Connection, group: Group) -> None:
    """Updates the rows of a group whose late scores have arrived or expired."""
    for attempt, scored in enumerate(group.episodes if group.index >= 0 else ()):
        names = {"outcome": outcome(scored, group.pass_threshold), "exclusion": exclusion(scored)[0], "blame": exclusion(scored)[1]}
        labels = [_label(db, sort, name) for sort, name in names.items()]
        db.execute(
            "UPDATE episodes SET outcome = ?, exclusion = ?, blame = ?, score = ?, score_order = ?, parts = ?"
            " WHERE idx = ? AND attempt = ?",
            (*labels, *_figures(scored)[:2], _parts(scored), group.index, attempt),
        )


def delete_group(db: sqlite3.Connection, index: int, group: Group | None) -> None:
    """Deletes the rows of a training group and their searchable text.

    If the group's body is damaged, pass `group=None`; the text is then not deleted.
    """
    rows = db.execute("SELECT number, attempt FROM episodes WHERE idx = ?", (index,)).fetchall()
    if group is not None:  # text that a late score has changed stays in the index, but matches no row
        texts = [(number, searchable_text(group, group.episodes[attempt])) for number, attempt in rows if attempt < len(group.episodes)]
        db.executemany("INSERT INTO episode_text (episode_text, rowid, text) VALUES ('delete', ?, ?)", texts)
    db.executemany("DELETE FROM episode_tools WHERE number = ?", [row[:1] for row in rows])
    db.execute("DELETE FROM episodes WHERE idx = ?", (index,))


def delete_phase(db: sqlite3.Connection, phase: str) -> None:
    """Deletes the episodes of an evaluation. Their searchable text stays in the index, but matches no row."""
    label = _label(db, "phase", phase)
    db.execute("DELETE FROM episode_tools WHERE number IN (SELECT number FROM episodes WHERE phase = ?)", (label,))
    db.execute("DELETE FROM evaluated WHERE number IN (SELECT number FROM episodes WHERE phase = ?)", (label,))
    db.execute("DELETE FROM episodes WHERE phase = ?", (label,))


def outcome(scored: ScoredEpisode, threshold: float | None) -> str:
    """Returns an episode's outcome, one of `OUTCOMES`. `threshold` is the task's `pass_threshold`."""
    value = scored.score.value
    if scored.episode.left_out or scored.score.is_absent or (value is not None and not math.isfinite(value)):
        return "excluded"
    if value is None:
        return "pending"
    if threshold is None:
        return "partial"
    return "solved" if is_at_least(value, threshold) else "failed" if value <= 0 else "partial"


def exclusion(scored: ScoredEpisode) -> tuple[str, str]:
    """Returns the kind and the blame of the failure that excludes an episode; both are empty if the episode is not excluded."""
    failure = next((failure for failure in reversed(scored.episode.failures) if failure.blame is not Blame.POLICY), None)
    if failure is not None:
        return _short(failure.kind), str(failure.blame)
    return ("unscored", str(scored.score.blame or "")) if outcome(scored, None) == "excluded" else ("", "")


def searchable_text(group: Group, scored: ScoredEpisode) -> str:
    """Returns the searchable text of an episode, at most `TEXT_CHARS` characters."""
    texts, left = list[str](), TEXT_CHARS
    for text in _texts(group, scored):
        part = text if len(text) <= _SPAN_CHARS else f"{text[: _SPAN_CHARS // 2]} {text[-_SPAN_CHARS // 2 :]}"
        texts.append(part[:left])
        left -= len(texts[-1]) + 1
        if left <= 0:
            break
    return "\n".join(texts)


def _texts(group: Group, scored: ScoredEpisode) -> Iterator[str]:
    yield from (message.content for message in group.prompt[-1:])
    yield scored.episode.answer or ""
    yield from (failure.message for failure in scored.episode.failures)
    yield from filter(None, (scored.score.reason, scored.score.evidence))
    for trajectory in scored.episode.trajectories:
        yield from (message.content for message in trajectory.prompt[-1:])
        for turn in trajectory.turns:
            yield from _message_texts(turn.message)
            yield from (result.output for result in turn.tool_results)


def _message_texts(message: Message) -> Iterator[str]:
    yield message.content
    for call in message.tool_calls:
        yield f"{call.name} " + " ".join(value if isinstance(value, str) else json.dumps(value) for value in call.arguments.values())


def _names(group: Group, scored: ScoredEpisode, phase: str) -> dict[str, str]:
    cause, blame = exclusion(scored)
    names = {"phase": phase, "kind": group.kind, "split": group.split, "outcome": outcome(scored, group.pass_threshold)}
    return names | {"stop": scored.episode.stop_reason, "exclusion": cause, "blame": blame}


def _figures(scored: ScoredEpisode) -> tuple[float | int | None, ...]:
    """Returns the values of the columns from `score` to `sampled_at` in the order of `_COLUMNS`."""
    episode, value = scored.episode, scored.score.value
    score = value if value is not None and math.isfinite(value) and not episode.left_out else None
    own = [turn for trajectory in episode.trajectories for turn in trajectory.own_turns]
    versions = [span.version for trajectory in episode.trajectories for turn in trajectory.turns for span in turn.versions]
    ended = max((turn.ended_at for turn in own), default=0.0)
    order = NO_SCORE if score is None else score
    spent = (sum(turn.sampled for turn in own), len(own), _finite(episode.wall_s), _finite(ended) or time.time())
    return (score, order, min(versions, default=None), max(versions, default=None), *spent)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _parts(scored: ScoredEpisode) -> str:
    parts = {_short(name): value for name, value in islice(scored.score.parts.items(), MAX_PARTS) if math.isfinite(value)}
    return json.dumps(parts)


def _tools(episode: Episode) -> Iterable[str]:
    turns = (turn for trajectory in episode.trajectories for turn in trajectory.own_turns)
    return (_short(call.name) for turn in turns for call in turn.message.tool_calls)


def _short(text: str) -> str:
    return text[:NAME_CHARS]


def _label(db: sqlite3.Connection, sort: str, name: str) -> int:
    row = db.execute("SELECT id FROM labels WHERE sort = ? AND name = ?", (sort, _short(name))).fetchone()
    if row is None:
        row = db.execute("INSERT INTO labels (sort, name) VALUES (?, ?) RETURNING id", (sort, _short(name))).fetchone()
    return int(row[0])
