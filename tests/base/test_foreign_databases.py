"""Untrusted SQLite files and links in a run folder raise errors; files that agentrl wrote are read back, whatever their content."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.base import database
from agentrl.base.database import ForeignDatabase, check_files, compress, decompress
from agentrl.config.tools import MemoryConfig
from agentrl.errors import AgentRLError
from agentrl.experience import SqliteStore
from agentrl.failure.collection import Collection
from agentrl.judge.ledger import JudgeLedger, usage_in
from agentrl.memory.store import NoteStore
from agentrl.testing.store_contract import make_group
from tests.base.test_untrusted_files import in_time
from tests.failure.traces import trace


@pytest.mark.slow
def test_compressed_data_is_restored_at_any_compression_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A policy in a loop writes one token, with one logprob, a million times."""
    for data in (b"", b"x", b"0.0," * (20 << 20), os.urandom(1 << 20)):
        assert decompress(compress(data)) == data
    assert len(compress(b"0.0," * (20 << 20))) == (80 << 20) // 256 + 8, "a frame without content has 8 bytes"
    monkeypatch.setattr(database, "_UNPACKED", 1 << 16)
    loops = make_group(0, "loop " * 200_000)
    store = SqliteStore(tmp_path / "experience.sqlite")
    assert store.put(loops)
    assert store.groups([0]) == (loops,)
    store.close()


def database_users(folder: Path) -> dict[str, Callable[[], object]]:
    """File of a run folder -> function that opens and uses it."""

    def search() -> None:
        with closing(NoteStore(folder / "notes.sqlite", MemoryConfig())) as store:
            store.commit(0, [])
            store.search("x", scope="s", version=9, task_key="k")
            store.counts()

    def spend() -> None:
        ledger = JudgeLedger(folder / "judges.sqlite")
        try:
            ledger.cache_answer("key", "text")
            ledger.count("judge", calls=1)
            ledger.total()
            ledger.spent("judge")
        finally:
            ledger.close()

    def collect() -> None:
        with Collection(folder, make=True) as collection:
            collection.add([trace()])

    def put() -> None:
        with closing(SqliteStore(folder / "experience.sqlite")) as store:
            store.put(make_group(0))

    return {"notes.sqlite": search, "judges.sqlite": spend, "failures/traces.sqlite": collect, "experience.sqlite": put}


FILES = tuple(database_users(Path()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("suffix", ["", "-wal", "-journal", "-shm"])
@pytest.mark.parametrize("name", FILES)
def test_links_out_of_the_folder_and_pipes_raise(name: str, suffix: str, tmp_path: Path) -> None:
    """SQLite would write to the target."""
    precious = tmp_path / "precious"
    for kind in ("link", "link to nothing", "pipe"):
        folder = tmp_path / kind.replace(" ", "-")
        use = database_users(folder)[name]
        folder.mkdir()
        use()
        path = folder / f"{name}{suffix}"
        path.unlink(missing_ok=True)
        precious.write_text("mine " * 1000)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(precious if kind == "link" else tmp_path / "absent")
        with in_time(120), pytest.raises(AgentRLError, match=r"is a link to a file|is not a regular file"):
            use()
        assert precious.read_text() == "mine " * 1000 and not (tmp_path / "absent").exists()


_BEGIN_IMMEDIATE = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error)
"""


@pytest.mark.parametrize("name", FILES)
def test_a_second_connection_of_a_process_does_not_release_the_locks_of_the_first(name: str, tmp_path: Path) -> None:
    """Otherwise another process that opens the file deletes the log that the first one writes to, and what it stores is lost."""
    database_users(tmp_path)[name]()
    with closing(sqlite3.connect(tmp_path / name, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        check_files(tmp_path / name)
        if name == "failures/traces.sqlite":
            with pytest.raises(AgentRLError, match="locked"):
                Collection(tmp_path, busy_timeout_s=0.0)
        result = subprocess.run([sys.executable, "-c", _BEGIN_IMMEDIATE, str(tmp_path / name)], capture_output=True, text=True, check=True)
        assert result.stdout == "database is locked\n"


FOREIGN = {
    "a view": ("ALTER TABLE {0} RENAME TO kept", "CREATE VIEW {0} AS SELECT * FROM kept"),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON {0} BEGIN DELETE FROM {0}; END",),
    "another table": ("CREATE TABLE more (x)",),
    "another index": ("CREATE INDEX more ON {0} ({1})",),
    "a computed column": ("ALTER TABLE {0} ADD COLUMN more GENERATED ALWAYS AS (hex({1}))",),
    "another virtual table": ("CREATE VIRTUAL TABLE v USING fts5(x)",),
}


@pytest.mark.parametrize("change", FOREIGN)
@pytest.mark.parametrize(("name", "table", "column"), [("notes.sqlite", "notes", "text"), ("judges.sqlite", "answers", "text")])
def test_notes_and_ledgers_with_a_foreign_schema_raise(change: str, name: str, table: str, column: str, tmp_path: Path) -> None:
    use = database_users(tmp_path)[name]
    use()
    use()  # the file that agentrl wrote can be reopened
    with closing(sqlite3.connect(tmp_path / name)) as db:
        for statement in FOREIGN[change]:
            db.execute(statement.format(table, column))
        db.commit()
    with pytest.raises(AgentRLError, match="that agentrl does not create"):
        use()


@pytest.mark.slow
def test_values_of_other_types_and_long_queries_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = database_users(tmp_path)
    use["judges.sqlite"](), use["notes.sqlite"]()
    with closing(sqlite3.connect(tmp_path / "judges.sqlite")) as db:
        db.execute("INSERT INTO spent (judge, prompt_tokens) VALUES ('judge', 'many') ON CONFLICT DO UPDATE SET prompt_tokens = 'many'")
        db.commit()
    with pytest.raises(AgentRLError, match="prompt_tokens has a value of type"):
        usage_in(tmp_path)
    with closing(sqlite3.connect(tmp_path / "notes.sqlite")) as db:
        db.execute("INSERT INTO writers (id, episode, task_key) VALUES (1, x'00ff', 't')")
        db.execute("INSERT INTO notes (step, writer, scope, text) VALUES (0, 1, 's', 'x'), (0, 77, 's', 'y')")
        db.commit()
    for store in (NoteStore(tmp_path / "notes.sqlite", MemoryConfig()),):
        with closing(store), pytest.raises(AgentRLError, match="not a string, or has no writer"):
            store.search("", scope="s", version=9, task_key="k")
    with closing(sqlite3.connect(tmp_path / "notes.sqlite")) as db:
        numbers = "WITH RECURSIVE c(x) AS (SELECT 2 UNION ALL SELECT x + 1 FROM c WHERE x < 300000)"
        db.execute(f"INSERT INTO writers (id, episode, task_key) {numbers} SELECT x, x, 'k' FROM c")
        db.execute(f"INSERT INTO sources (writer, source) {numbers} SELECT x, x - 1 FROM c")
        db.commit()
    monkeypatch.setattr("agentrl.memory.store._QUERY_S", 0.05)
    with closing(NoteStore(tmp_path / "notes.sqlite", MemoryConfig())) as store, pytest.raises(AgentRLError, match=r"longer than 0\.05 s"):
        store.search("", scope="s", version=9, task_key="k")


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_a_folder_in_place_of_a_database_file_is_a_foreign_database(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"x{suffix}").mkdir()
    with pytest.raises(ForeignDatabase, match=f"x{suffix} is a folder"):
        check_files(tmp_path / "x")
