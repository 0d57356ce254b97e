"""What our SQLite files have in common: an application id and a schema that are checked, write-ahead logging, whole transactions."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_RETRY_S = 0.01


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One atomic change. IMMEDIATE takes the write lock first, so what is read inside cannot change before the commit."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # a fault; a full disk may have rolled back already
            db.execute("ROLLBACK")


def enter_wal(db: sqlite3.Connection, *, timeout_s: float) -> str:
    """Turns write-ahead logging on; returns the journal mode, which is another where the file system cannot have it.

    SQLite's own busy wait does not cover this change, so the wait is here.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def make_tables(db: sqlite3.Connection, schema: Sequence[str]) -> None:
    """Runs the statements of `schema` in a file that is empty. Of several processes that open a new file, one makes the tables."""
    with transaction(db):
        if pragma(db, "user_version") == 0 and not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
            for statement in schema:
                db.execute(statement)


def damaged(error: sqlite3.Error) -> bool:
    """Whether the file itself is at fault, and not the disk, a lock, the statement, or who uses it: such errors may have no code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
