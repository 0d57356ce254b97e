"""Untrusted files: whatever replaces one, a command ends at once with an error that names it and quotes none of its content."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

from agentrl.base import untrusted_files
from agentrl.base.database import decompress, query_deadline, restrict_connection
from agentrl.cli import app
from agentrl.errors import AgentRLError
from agentrl.experience import SqliteStore
from agentrl.failure.collection import Collection
from tests.failure.traces import trace

SECRET = "hunter2-of-the-reader"


def put_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def put_device(path: Path, _: Path) -> None:
    path.symlink_to("/dev/zero")


def put_link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def put_folder(path: Path, _: Path) -> None:
    path.mkdir()


def put_socket(path: Path, _: Path) -> None:
    import socket

    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")  # an address has at most 107 bytes, and a full path may be longer
    finally:
        os.close(folder)


STRANGE: list[Callable[[Path, Path], None]] = [put_pipe, put_device, put_link, put_folder, put_socket]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "passwd"
    path.parent.mkdir()
    path.write_text(f'{{"{SECRET}": "{SECRET}"}}\n{SECRET} = [1\n')
    return path


@pytest.mark.parametrize("put", STRANGE)
def test_only_a_regular_file_in_its_folder_is_opened(put: Callable[[Path, Path], None], tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "suite"
    folder.mkdir()
    put(folder / "a.json", secret)
    with pytest.raises((ValueError, OSError)) as error:
        untrusted_files.read_bytes(folder / "a.json", most=1 << 20, inside=folder)
    assert SECRET not in str(error.value)


def test_links_within_the_folder_and_links_typed_by_the_user_are_followed(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "model"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "1").write_bytes(b"x")
    (folder / "config.json").symlink_to("blobs/1")
    assert untrusted_files.read_bytes(folder / "config.json", most=1, inside=folder) == b"x"
    (tmp_path / "typed").symlink_to(secret)
    assert SECRET.encode() in untrusted_files.read_bytes(tmp_path / "typed", most=1 << 20)
    (folder / "out").symlink_to(secret.parent)
    with pytest.raises(ValueError, match="link to a file outside"):
        untrusted_files.read_bytes(folder / "out" / "passwd", most=1 << 20, inside=folder)
    with pytest.raises(ValueError, match="larger"):
        untrusted_files.read_bytes(folder / "config.json", most=0)
    with pytest.raises(FileNotFoundError, match="none"):
        untrusted_files.read_bytes(folder / "none", most=1)


COMMANDS = {
    "suite.toml": ["eval", "{}", "--policy", "http://127.0.0.1:9/v1", "--model", "m"],
    "cases/a.json": ["eval", "{}", "--policy", "http://127.0.0.1:9/v1", "--model", "m"],
    "about.json": ["compare", "{}"],
    "attempts.jsonl": ["compare", "{}"],
    "summary.json": ["report", "{}"],
    "metrics.jsonl": ["report", "{}"],
    "evaluations.json": ["report", "{}"],
    "recipe.json": ["tune", "sft", "{}", "--out", "/dev/null/x"],
    "versions/000000/version.json": ["versions", "list", "{}"],
    "versions/held": ["versions", "list", "{}"],
    "versions/pinned": ["versions", "list", "{}"],
    "failures/traces.sqlite": ["failures", "list", "{}"],
    "labels.jsonl": ["tune", "reward", "--labels", "{}/labels.jsonl", "--model", "{}", "--out", "/dev/null/x"],
    "spans.jsonl": ["failures", "import", "/dev/null/x", "{}/spans.jsonl"],
    "calibration.json": ["judge", "correct", "{}/calibration.json", "1", "2"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("put", STRANGE)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_at_once_whatever_replaces_a_file(
    name: str, put: Callable[[Path, Path], None], tmp_path: Path, secret: Path
) -> None:
    folder = tmp_path / "of_a_stranger"
    (folder / name).parent.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if name.startswith("cases"):
        (folder / "suite.toml").write_text('name = "x"\n')
    if name == "attempts.jsonl":
        (folder / "about.json").write_text("{}")
    (folder / "recipe.json").write_text("{}") if name != "recipe.json" else None
    put(folder / name, secret)
    with in_time(30):
        result = CliRunner().invoke(app, [argument.format(folder) for argument in COMMANDS[name]])
    output = f"{result.output} {result.exception}"
    assert result.exception is None or isinstance(result.exception, AgentRLError | SystemExit | OSError), repr(result.exception)
    typed = COMMANDS[name][-1].endswith(name) or f"{{}}/{name}" in COMMANDS[name]  # the user typed this path, so it may be a link
    assert SECRET not in output or typed, output
    if name not in ("summary.json", "metrics.jsonl", "evaluations.json", "versions/held"):
        assert result.exit_code in (1, 2) or isinstance(result.exception, AgentRLError), output


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_a_body_that_decompresses_to_a_gibibyte_raises_in_little_memory(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(b"\0" * (1 << 30))
    assert len(bomb) < 200_000
    with pytest.raises(ValueError, match="decompresses to more than"):
        decompress(bomb)
    stream = zstandard.ZstdCompressor(level=3).compressobj()
    unsized = stream.compress(b"\0" * (1 << 28)) + stream.flush()
    with pytest.raises(ValueError):
        decompress(unsized)
    with pytest.raises(ValueError, match="type str instead of bytes"):
        decompress("text")
    assert decompress(zstandard.ZstdCompressor().compress(b"x" * 1000)) == b"x" * 1000
    store = SqliteStore(tmp_path / "experience.sqlite")
    store.close()
    with closing(sqlite3.connect(tmp_path / "experience.sqlite")) as db:
        db.execute("INSERT INTO groups VALUES (0, 't', 0.0, 1, 1, 0, 0, 1, ?)", (bomb,))
        db.execute("INSERT INTO groups VALUES (1, 't', 0.0, 1, 1, 0, 0, 1, 'text')")
        db.commit()
    store = SqliteStore(tmp_path / "experience.sqlite")
    for index in (0, 1):
        with pytest.raises(AgentRLError, match=f"group {index} in .* is damaged"):
            store.groups([index])
    store.close()


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT "
HOSTILE = {
    "a view without an end": ("ALTER TABLE traces RENAME TO kept", f"CREATE VIEW traces AS {ENDLESS} x AS seq, 'i' AS id FROM c"),
    "a trigger": ("CREATE TRIGGER t AFTER UPDATE ON traces BEGIN DELETE FROM tasks; END",),
    "another table": ("CREATE TABLE more (x)",),
    "a computed column": ("ALTER TABLE traces ADD COLUMN more GENERATED ALWAYS AS (hex(body))",),
    "a virtual table": ("CREATE VIRTUAL TABLE v USING fts5(x)",),
    "text for a number": ("UPDATE traces SET step = 'twelve'",),
    "a text for a score": ("UPDATE traces SET score = 'high'",),
    "bytes for text": ("UPDATE traces SET question = x'ff00'",),
    "text in counts": ("UPDATE counts SET n = 'many'",),
    "text for a body": ("UPDATE traces SET body = 'x'",),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", HOSTILE)
def test_a_collection_with_foreign_content_raises(change: str, tmp_path: Path) -> None:
    with Collection(tmp_path, make=True) as collection:
        assert collection.add([trace()]) == 1
        (row,) = collection.rows()
    with closing(sqlite3.connect(tmp_path / "failures" / "traces.sqlite")) as db:
        for statement in HOSTILE[change]:
            db.execute(statement)
        db.commit()
    refused = 0
    for command in (["list", str(tmp_path)], ["show", str(tmp_path), row.id], ["cluster", str(tmp_path)]):
        started = time.monotonic()
        result = CliRunner().invoke(app, ["failures", *command])
        assert time.monotonic() - started < 20
        assert result.exception is None or isinstance(result.exception, AgentRLError | SystemExit), repr(result.exception)
        refused += isinstance(result.exception, AgentRLError)
    assert refused


def test_queries_have_a_time_limit_and_connections_no_foreign_functions() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        with pytest.raises(sqlite3.OperationalError, match=r"longer than 0\.2 s"), query_deadline(db, 0.2):
            db.execute(f"{ENDLESS} max(x) FROM c").fetchall()
        assert db.execute("SELECT 1").fetchone() == (1,), "the connection still works"
        db.execute("CREATE TABLE groups (x INTEGER)")
        restrict_connection(db, ["CREATE TABLE groups (x INTEGER)"])
        assert db.execute("PRAGMA trusted_schema").fetchone() == (0,)
        with pytest.raises(sqlite3.DatabaseError, match="a table 'groups' that agentrl does not create"):
            restrict_connection(db, ["CREATE TABLE other (x INTEGER)"])


def test_a_collection_behind_a_link_raises(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    with Collection(mine, make=True) as collection:
        collection.add([trace()])
    (theirs / "failures").mkdir(parents=True)
    (theirs / "failures" / "traces.sqlite").symlink_to(mine / "failures" / "traces.sqlite")
    with pytest.raises(AgentRLError, match="link to a file outside"):
        Collection(theirs)
    shutil.rmtree(mine)
