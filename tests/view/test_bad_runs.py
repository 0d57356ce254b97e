"""Runs that are incomplete, old, damaged, removed or untrusted give a clear message, never a server error."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.database import compress
from agentrl.errors import UserError
from agentrl.experience import reading
from agentrl.observe.tails import MAX_LINE
from agentrl.view import RunLibrary
from tests.view.test_server import client

PATHS = ("", "/ledger", "/steps/1", "/groups", "/groups/4", "/groups/4/0", "/groups/4/0/0/0", "/episodes", "/facets", "/failures")


async def answers(root: Path, run: str = "demo") -> dict[str, tuple[int, Any]]:
    """Returns status and JSON of every kind of page of a run."""
    async with client(root) as api:
        assert (await api.get("/api/runs")).status_code == 200
        return {path: ((answer := await api.get(f"/api/runs/{run}{path}")).status_code, answer.json()) for path in PATHS}


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run `demo`, which a test may damage; its folder is in `tmp_path`."""
    shutil.copytree(runs / "demo", tmp_path / "demo")
    return tmp_path / "demo"


def no_store(run: Path) -> None:
    (run / "experience.sqlite").unlink()


def older_schema(run: Path) -> None:
    with sqlite3.connect(run / "experience.sqlite") as db:
        db.execute("PRAGMA user_version = 3")
    db.close()


def overwritten(run: Path) -> None:
    path = run / "experience.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xa5" * (len(content) - 100))


def cut_off(run: Path) -> None:
    os.truncate(run / "experience.sqlite", 5000)


def another_database(run: Path) -> None:
    no_store(run)
    with sqlite3.connect(run / "experience.sqlite") as db:
        db.execute("CREATE TABLE t (x)")
    db.close()


def a_trigger(run: Path) -> None:
    with sqlite3.connect(run / "experience.sqlite") as db:
        db.execute("CREATE TRIGGER evil AFTER INSERT ON groups BEGIN DELETE FROM groups; END")
    db.close()


def linked_store(run: Path) -> None:
    shutil.move(run / "experience.sqlite", run.parent / "elsewhere.sqlite")
    (run / "experience.sqlite").symlink_to(run.parent / "elsewhere.sqlite")


def bad_row(run: Path) -> None:
    with sqlite3.connect(run / "experience.sqlite") as db:
        db.execute("UPDATE groups SET body = ? WHERE idx = 4", (compress(b'{"index": "x"}'),))
        db.execute("UPDATE groups SET body = 7 WHERE idx = 6")
        db.execute("UPDATE groups SET body = 'text' WHERE idx = 7")
    db.close()


@pytest.mark.parametrize("damage", [no_store, older_schema, overwritten, cut_off, another_database, a_trigger, linked_store, bad_row])
async def test_a_damaged_store_gives_a_message_and_the_curves_remain(copy: Path, damage: Callable[[Path], None]) -> None:
    damage(copy)
    pages = await answers(copy.parent)
    assert all(status < 500 for status, _ in pages.values()), pages
    assert pages[""][0] == 200 and pages[""][1]["reward"][-1][0] == 5, "the curves do not need the store"
    assert pages["/groups/4"][0] in (404, 409, 422) and pages["/groups/4"][1]["error"]["message"]
    if damage is bad_row:
        lines = {line["group"]: line for line in pages["/groups"][1]["groups"]}
        assert all(lines[group]["problem"] for group in (4, 6, 7)) and lines[5]["scores"]
    else:
        assert pages["/steps/1"][0] == 200 and pages["/steps/1"][1]["notes"]
    if damage is older_schema:
        assert "schema 3" in pages["/groups/4"][1]["error"]["message"] and "agentrl version" in pages["/groups/4"][1]["error"]["fix"]


async def test_incomplete_and_invalid_files_become_notes(copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    huge = json.dumps({"step": 9, "reward_mean": 1.0, "x": "y" * MAX_LINE})
    invalid = [
        huge,
        "[1]",
        '{"step": 1e400}',
        '{"step": true}',
        '{"step": 7, "reward_mean": NaN, "a": 1e999}',
        "\ud800".encode("utf-8", "replace").decode(),
    ]
    (copy / "metrics.jsonl").write_text("".join(lines) + "\n".join(invalid) + '\n{"step": 8, "reward_m')
    (copy / "summary.json").write_text('{"heldout_after": {"value": "x"}, "wall_s": [1], "by_kind": 5, "problems": "no"')
    (copy / "recipe.json").write_bytes(b"\xff\xfe" + b"[" * 100_000)
    (copy / "sessions.jsonl").write_text('{"began": 1}\n[]\n{"ended": "exploded"}\n')
    (copy / "tasks.jsonl").unlink()
    (copy / "tasks.jsonl").mkdir()
    (copy / "gate" / "000001").mkdir(parents=True)
    (copy / "gate" / "000001" / "verdict.json").write_text("{")
    pages = await answers(copy.parent)
    assert {path: status for path, (status, _) in pages.items() if status >= 500} == {}
    run = pages[""][1]
    assert [point[0] for point in run["reward"]] == [1, 2, 3, 4, 5], run["reward"]
    text = " ".join(run["notes"])
    assert "unreadable lines ignored" in text and "summary.json" in text and "tasks.jsonl" in text


async def test_links_out_of_the_folder_are_not_followed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "recipe.json").write_text('{"name": "SECRET"}')
    root = tmp_path / "runs"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "stranger").mkdir()
    for name in ("metrics.jsonl", "summary.json", "recipe.json"):
        (root / "stranger" / name).symlink_to(tmp_path / "secret" / "recipe.json")
    (root / "stranger" / "model").mkdir()
    (root / "stranger" / "model" / "tokenizer.json").symlink_to("/etc/passwd")
    (root / "stranger" / "failures").symlink_to("/etc")
    os.mkfifo(root / "stranger" / "tasks.jsonl")
    pages = await answers(root, "stranger")
    assert all(status < 500 for status, _ in pages.values()) and "SECRET" not in json.dumps(pages)
    async with client(root) as api:
        assert [run["name"] for run in (await api.get("/api/runs")).json()["runs"]] == ["stranger"]


async def test_every_folder_name_has_an_address(tmp_path: Path) -> None:
    names = [
        b"<script>alert(1)<script>",
        b"..%2f..",
        b"\xff\xfe",
        "\u202ereversed".encode(),
        b"a b&c=d#e?f",
        b"-rf",
        b"x" * 255,
        b"\x1b[31m\n",
    ]
    for name in names:
        folder = os.fsencode(tmp_path) + b"/" + name
        os.mkdir(folder)
        Path(os.fsdecode(folder), "recipe.json").write_text("{}")
    async with client(tmp_path) as api:
        listed = (await api.get("/api/runs")).json()["runs"]
        assert len({run["id"] for run in listed}) == len(names)
        for run in listed:
            assert (await api.get(f"/api/runs/{run['id']}")).status_code == 200, run


async def test_a_removed_run_gets_status_404_and_its_replacement_is_read(runs: Path, copy: Path) -> None:
    async with client(copy.parent) as api:
        assert (await api.get("/api/runs/demo/groups/4")).status_code == 200
        shutil.rmtree(copy)
        for path in PATHS:
            answer = await api.get(f"/api/runs/demo{path}")
            assert answer.status_code == 404 and "removed" in answer.json()["error"]["message"]
        shutil.copytree(runs / "other", copy)
        replacement = (await api.get("/api/runs/demo")).json()
        assert replacement["step"] == 3 and (await api.get("/api/runs/demo/groups/4")).status_code == 200
        assert (await api.get("/api/runs/demo/groups/8")).status_code == 404


async def test_a_group_that_would_not_fit_into_memory_is_not_decoded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_GROUP_BYTES", 2000)
    pages = await answers(copy.parent)
    assert pages["/groups/4"][0] == 409 and "cannot be shown" in pages["/groups/4"][1]["error"]["message"]
    assert all("cannot be shown" in line["problem"] for line in pages["/groups"][1]["groups"])


def test_a_folder_that_does_not_exist_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        RunLibrary(tmp_path / "none")
    assert RunLibrary(tmp_path).entries() == []
