"""Suites of regression cases: saving, loading, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.failure.case import Case, load_suite, load_suites, save_case
from agentrl.failure.trace import CaptureReason, Tag, Trace
from agentrl.records import Message, SandboxSpec, Split, Task, codec


def make_task() -> Task:
    return Task(
        id="t",
        family="demo",
        prompt=(Message(role="user", content="How many?"),),
        tools=("submit",),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("rewards.tables:exact_answer",),
        data={"answer": "3"},
        split=Split.HELDOUT,
    )


def test_a_saved_suite_is_read_back_unchanged(tmp_path: Path) -> None:
    cases = [Case(id=name, task=make_task(), tags=(Tag(name="wrong_tool", by="rules", turn=0),), note="é") for name in ("b", "a")]
    for case in cases:
        save_case(tmp_path / "s", case)
    suite = load_suite(tmp_path / "s")
    assert (suite.name, suite.repeats) == ("s", 1)
    assert suite.cases == (cases[1], cases[0])


def test_a_suite_whose_folder_name_contains_quotes_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / 'é "x"\\'
    save_case(folder, Case(id="a", task=make_task()))
    assert load_suite(folder).name == folder.name


@pytest.mark.parametrize("path", [".", "../suite", "inner/.."])
def test_a_suite_has_the_name_of_its_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "suite"
    (folder / "inner").mkdir(parents=True)
    monkeypatch.chdir(folder)
    save_case(Path(path), Case(id="a", task=make_task()))
    assert load_suite(Path(path)).name == load_suite(folder).name == "suite"
    (folder / "suite.toml").write_text("repeats = 1\n")
    assert load_suite(Path(path)).name == "suite"


@pytest.mark.parametrize("character", ["\x7f", "\n", "\x1b", "\x85", "\u202e", "\udcff"])
def test_the_name_of_a_new_suite_has_only_printable_characters(character: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the name 'a.* of a new suite contains a character") as error:
        save_case(tmp_path / f"a{character}b", Case(id="a", task=make_task()))
    assert str(error.value).isascii() and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("repeats = 0", "repeats = 0"),
        ("repeats = true", "not a valid setting"),
        ("shape = 1", "not a valid setting"),
        ("x", "is not TOML"),
    ],
)
def test_the_error_names_an_invalid_setting(tmp_path: Path, settings: str, message: str) -> None:
    save_case(tmp_path, Case(id="a", task=make_task()))
    (tmp_path / "suite.toml").write_text(settings)
    with pytest.raises(UserError, match=message):
        load_suite(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"id": "other"}'])
def test_the_error_names_an_invalid_case_file(tmp_path: Path, content: bytes) -> None:
    save_case(tmp_path, Case(id="a", task=make_task()))
    (tmp_path / "cases" / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json"):
        load_suite(tmp_path)


def test_newer_fields_of_a_case_are_optional_and_validated(tmp_path: Path) -> None:
    path = save_case(tmp_path, Case(id="a", task=make_task()))
    older = json.loads(path.read_bytes())
    for name in ("by", "threshold", "repeats", "baseline"):
        del older[name]
    path.write_text(json.dumps(older))
    assert load_suite(tmp_path).cases == (Case(id="a", task=make_task()),)
    for wrong in ({"threshold": "much"}, {"repeats": 0}, {"repeats": 10**6}, {"baseline": {"scores": [1]}}):
        path.write_text(json.dumps(older | wrong))
        with pytest.raises(UserError, match=r"a\.json"):
            load_suite(tmp_path)


def test_a_folder_of_suites_loads_all_of_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        save_case(tmp_path / name, Case(id="x", task=make_task()))
    assert [suite.name for suite in load_suites(tmp_path)] == ["a", "b"]
    assert [suite.name for suite in load_suites(tmp_path / "b")] == ["b"]
    with pytest.raises(UserError, match="contains no suites"):
        load_suites(tmp_path / "a" / "cases")


def test_a_folder_without_cases_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"suite\.toml"):
        load_suite(tmp_path)
    with pytest.raises(ValueError, match="is not a valid name"):
        Case(id="../x", task=make_task())


def test_a_trace_is_validated_and_read_back() -> None:
    trace = Trace(id="t", why=CaptureReason.IMPORTED, source="openai", missing=("no tool schemas",))
    assert codec.from_json(Trace, codec.to_json(trace)) == trace
    assert trace.task is None
    with pytest.raises(ValueError, match="both a task and an episode, or neither"):
        Trace(id="t", why=CaptureReason.FAILED, task=make_task())
