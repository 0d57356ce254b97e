"""Operations of the pages have the same effect as the commands, and are recorded."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.experience import SqliteStore
from agentrl.failure.case import load_suite
from agentrl.failure.collection import Collection
from tests.view.runs import RunMaker
from tests.view.test_server import HERE, client

TRACE = "g000004-0-a0"


@pytest.fixture
def copies(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs `page` and `command`, which are equal."""
    for name in ("page", "command"):
        shutil.copytree(runs / "demo", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentrl.cli.failures.user_name", lambda: "anna")
    monkeypatch.setattr("agentrl.cli.cases.user_name", lambda: "anna")
    return tmp_path


async def operate(root: Path, name: str, body: dict[str, Any], run: str = "page") -> tuple[int, Any]:
    async with client(root, user="anna") as api:
        answer = await api.post(f"/api/runs/{run}/operations/{name}", json=body, headers={"origin": HERE})
        return answer.status_code, answer.json()


def command(*arguments: str) -> None:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output


async def test_a_tag_is_equal_to_that_of_the_command(copies: Path) -> None:
    status, answer = await operate(copies, "tag", {"trace": TRACE, "tag": "wrong_unit", "turn": 2, "note": "metres"})
    assert status == 200 and "is tagged wrong_unit" in answer["message"]
    command("failures", "tag", str(copies / "command"), TRACE, "--as", "wrong_unit", "--turn", "2", "--note", "metres")
    tags = []
    for name in ("page", "command"):
        with Collection(copies / name) as collection:
            trace = collection.get(TRACE)
            assert trace is not None
            tags.append(trace.tags)
        assert json.loads((copies / name / "failures" / "failures.json").read_text())["tags"]["wrong_unit"] == 1
    assert tags[0] == tags[1] and tags[0][-1].by == "person:anna"
    (record,) = map(json.loads, (copies / "page" / "operations.jsonl").read_text().splitlines())
    assert (record["by"], record["operation"], record["trace"], record["tag"]) == ("anna", "tag", TRACE, "wrong_unit")


async def test_a_case_and_a_label_are_equal_to_those_of_the_commands(copies: Path) -> None:
    assert (await operate(copies, "promote", {"trace": TRACE, "suite": "evals/page", "note": "why"}))[0] == 200
    command("failures", "promote", str(copies / "command"), TRACE, "--into", "evals/command", "--note", "why")
    page, shell = (load_suite(copies / "evals" / name).cases for name in ("page", "command"))
    assert [case.id for case in page] == [case.id for case in shell] and page[0].task == shell[0].task and page[0].origin == shell[0].origin
    status, again = await operate(copies, "promote", {"trace": TRACE, "suite": "evals/page"})
    assert status == 200 and again["new"] is False, "a task has one case"
    assert (await operate(copies, "label", {"trace": TRACE, "label": "wrong"}))[0] == 200
    (line,) = map(json.loads, (copies / "page" / "labels" / "anna.jsonl").read_text().splitlines())
    assert (line["label"], line["by"], line["answer"], line["reference"]) == ("wrong", "anna", "4", "3")


async def test_a_parked_episode_gets_its_score(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "page")
    group = maker.sample(0, pending=True)
    maker.close()
    episode = group.episodes[0].episode.id
    status, answer = await operate(tmp_path, "score", {"episode_id": episode, "part": "review", "value": 0.5})
    assert status == 200 and answer["remaining"] == 3
    store = SqliteStore(tmp_path / "page" / "experience.sqlite")
    assert store.groups([0])[0].episodes[0].score.parts["review"] == 0.5
    store.close()
    status, answer = await operate(tmp_path, "score", {"episode_id": episode, "part": "review", "value": 7})
    assert status == 422 and "review" in answer["error"]["message"]
    assert len((tmp_path / "page" / "operations.jsonl").read_text().splitlines()) == 1, "only the successful operation is recorded"


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("tag", {"trace": TRACE, "tag": "Not A Tag"}),
        ("tag", {"trace": "none", "tag": "fine"}),
        ("tag", {"trace": TRACE, "tag": "fine", "turn": 0}),
        ("tag", {"trace": TRACE, "tag": "fine", "evil": 1}),
        ("tag", {"trace": [TRACE], "tag": "fine"}),
        ("label", {"trace": TRACE, "label": "maybe"}),
        ("promote", {"trace": TRACE, "suite": "../outside"}),
        ("promote", {"trace": TRACE, "suite": "/tmp/outside"}),
        ("score", {"episode_id": "g0", "part": "p", "value": "x"}),
        ("delete", {}),
    ],
)
async def test_a_wrong_request_changes_nothing(copies: Path, name: str, body: dict[str, Any]) -> None:
    status, answer = await operate(copies, name, body)
    assert 400 <= status < 500 and answer["error"]["message"], answer
    assert not (copies / "page" / "operations.jsonl").exists() and not (copies.parent / "outside").exists()


async def test_an_operation_whose_record_cannot_be_written_succeeds_and_says_so(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("agentrl.view.operations.append_lines", full)
    status, answer = await operate(copies, "tag", {"trace": TRACE, "tag": "wrong_unit"})
    assert status == 200, answer
    assert "is tagged wrong_unit, but this is not recorded in operations.jsonl: No space left on device" in answer["message"]
