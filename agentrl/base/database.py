"""Opens agentrl's SQLite files, checks their application id and schema, uses write-ahead logging, and writes in transactions.

A run folder may come from a third party, so its files are untrusted: open them with `connect`, and run queries within `query_deadline`.
"""

from __future__ import annotations

import functools
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import zstandard

from agentrl.base import untrusted_files
from agentrl.errors import UserError

_RETRY_S = 0.01
_STEPS = 20_000  # instructions of SQLite's virtual machine between two checks of the time
_UNPACKED = 64 << 20
_RATIO = 256
"""A body may decompress to at most `_UNPACKED` bytes or `_RATIO` times its size, whichever is larger."""
_SKIPPED = (0x184D2A50).to_bytes(4, "little")  # starts a frame without content (RFC 8878, 3.1.2)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Runs the block in a transaction. Acquires the write lock first (IMMEDIATE), so that values read in the transaction stay valid until
    the commit."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # the block failed; a full disk may have rolled back already
            db.execute("ROLLBACK")


def enter_wal(db: sqlite3.Connection, *, timeout_s: float) -> str:
    """Turns write-ahead logging on. Returns the journal mode, which is not `wal` if the file system does not support it.

    Waits up to `timeout_s` for locks, because SQLite's busy timeout does not cover this change, then raises `sqlite3.OperationalError`.
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
    """Creates the tables of `schema` in an empty file, and does nothing otherwise. If several processes open a new file, one of them
    creates the tables."""
    with transaction(db):
        if read_pragma(db, "user_version") == 0 and not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
            for statement in schema:
                db.execute(statement)


class ForeignDatabase(sqlite3.DatabaseError):
    """Error: an SQLite file contains something that agentrl never writes."""


def connect(path: Path | None, schema: Sequence[str], *, timeout_s: float, longest: int = 1 << 30) -> sqlite3.Connection:
    """Opens one of agentrl's SQLite files, or an in-memory database if `path` is None, in autocommit mode and for use by several threads.

    Raises the errors of `check_files` and `restrict_connection`, and SQLite's errors if the file is damaged or locked.
    """
    if path is not None:
        check_files(path)
    db = sqlite3.connect(path or ":memory:", timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        restrict_connection(db, schema, longest=longest)
    except BaseException:
        db.close()
        raise
    return db


def connect_read_only(path: Path, schema: Sequence[str], *, timeout_s: float, longest: int = 1 << 30) -> sqlite3.Connection:
    """Opens one of agentrl's SQLite files, whose folder a third party may have written, for reading by several threads.

    Raises `FileNotFoundError` if there is no file at `path`, and the errors that `connect` raises.
    """
    check_files(path)
    untrusted_files.check_file(path, inside=path.parent)
    mode = "mode=ro&immutable=1" if is_read_only(path) else "mode=ro"
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", timeout=timeout_s, isolation_level=None, uri=True, check_same_thread=False)
    try:
        with query_deadline(db, timeout_s):
            restrict_connection(db, schema, longest=longest)
            db.execute("PRAGMA query_only = ON")
    except BaseException:
        db.close()
        raise
    return db


def check_files(path: Path) -> None:
    """Raises `ForeignDatabase` if the file, or one of SQLite's files next to it, exists but is not a regular file in its folder.

    SQLite writes to the files next to a database and follows links, so a link could make it overwrite one of the user's files. The files
    are not opened, because closing them would release the locks of other connections of this process.
    """
    for end in ("", "-wal", "-shm", "-journal"):
        try:
            untrusted_files.check_file(path.with_name(path.name + end), inside=path.parent)
        except FileNotFoundError:
            if path.with_name(path.name + end).is_symlink():
                raise ForeignDatabase(f"{path.name}{end} is a link to a file that does not exist") from None
        except IsADirectoryError:
            raise ForeignDatabase(f"{path.name}{end} is a folder") from None
        except ValueError as error:
            raise ForeignDatabase(f"{path.name}{end} {error}") from None


def is_read_only(path: Path) -> bool:
    """Whether a database has no pending write-ahead log and its folder is not writable, so that SQLite must not create files in it."""
    wal = path.with_name(f"{path.name}-wal")
    return not os.access(path.parent, os.W_OK) and not (wal.exists() and wal.stat().st_size)


def restrict_connection(db: sqlite3.Connection, schema: Sequence[str], *, longest: int = 1 << 30) -> None:
    """Restricts an open database: its schema may not use functions, and no value may be longer than `longest` bytes.

    Raises `ForeignDatabase` if the database contains views, triggers, virtual tables or anything else that `schema` does not create. The
    columns of its tables may differ; see `require_schema`.
    """
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    ours = _created(tuple(schema))
    forms = {statement.groups() for sql in ours if (statement := _MAKES.match(sql))}
    for kind, name, sql in db.execute(_OBJECTS):
        text = sql if isinstance(sql, str) else ""
        statement = _MAKES.match(text)  # as a different version of agentrl or SQLite may write it
        if text not in ours and (statement is None or statement.groups() not in forms or _COMPUTED.search(text)):
            raise ForeignDatabase(f"it contains a {str(kind)[:20]} {str(name)[:80]!r} that agentrl does not create")


def require_schema(db: sqlite3.Connection, schema: Sequence[str]) -> None:
    """Raises `ForeignDatabase` if tables or indices in an open database differ in any way from what `schema` creates."""
    stored = sorted(str(sql) for _, _, sql in db.execute(_OBJECTS))
    if stored != sorted(_created(tuple(schema))):
        raise ForeignDatabase("its tables differ from those that agentrl creates")


@functools.lru_cache(maxsize=16)
def _created(schema: tuple[str, ...]) -> frozenset[str]:
    """Returns the statements that SQLite stores for a schema, including those of the tables that belong to a full-text index."""
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in schema:
            db.execute(statement)
        return frozenset(sql for _, _, sql in db.execute(_OBJECTS))


_OBJECTS = "SELECT type, name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~'"
_MAKES = re.compile(r"CREATE (?:UNIQUE )?(TABLE|INDEX) '?(\w+)'?(?: ON (\w+))? ?\(")
_COMPUTED = re.compile(r"\bAS\s*\(", re.IGNORECASE)  # a generated column


@contextmanager
def query_deadline(db: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Limits the time for the queries in the block. A query that is still running `seconds` after the block started raises
    `sqlite3.OperationalError`."""
    until = time.monotonic() + seconds
    db.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_INTERRUPT:
            raise sqlite3.OperationalError(f"a query took longer than {seconds:g} s") from None
        raise
    finally:
        db.set_progress_handler(None, 0)


def compress(data: bytes) -> bytes:
    """Compresses a value for a zstd column to a form that `decompress` accepts.

    The output of a policy that repeats itself may compress 10,000-fold. A padding frame then extends the compressed value to 1 byte for
    each 256 bytes of the original.
    """
    body = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
    if len(data) > max(_UNPACKED, _RATIO * len(body)):
        lacking = -(-len(data) // _RATIO) - len(body)
        body += _SKIPPED + lacking.to_bytes(4, "little") + bytes(lacking)
    return body


def decompress(body: object, *, most: int | None = None) -> bytes:
    """Decompresses a value of a zstd column. Raises `ValueError` if it is not valid zstd or decompresses to more than `most` bytes; None
    means the limit at `_RATIO`."""
    if not isinstance(body, bytes):
        raise ValueError(f"it has a value of type {type(body).__name__} instead of bytes")
    bound = max(_UNPACKED, _RATIO * len(body)) if most is None else most
    try:
        if zstandard.frame_content_size(body) > bound:
            raise ValueError(f"it decompresses to more than {bound >> 20} MiB")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=bound)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def require_full_text_search() -> None:
    """Raises `UserError` if Python's SQLite has no full-text search, which the experience store and the notes in a memory need."""
    with closing(sqlite3.connect(":memory:")) as db:
        if not db.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone():
            raise UserError("Python's SQLite was built without FTS5", fix="use a Python with FTS5 in sqlite3")


def is_damaged(error: sqlite3.Error) -> bool:
    """Whether an error reports a damaged file, as opposed to a full disk, a lock or an incorrect statement."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def read_pragma(db: sqlite3.Connection, name: str) -> int:
    """Returns the integer value of a pragma."""
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
