"""A suite may only use code and images of its project."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.base import untrusted_files
from agentrl.cli import app
from agentrl.errors import UserError
from agentrl.evaluation.suite_code import check_project, check_suite_code
from agentrl.failure.case import Case, Suite
from agentrl.records import SandboxSpec
from tests.evaluation.suite_parts import HERE, OVERRIDES, make_case, make_suite

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef v(task, episode): return 1.0\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    (root / "evals" / "theirs").mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    for folder in (tmp_path, root, root / "evals" / "theirs"):
        (folder / "evil.py").write_text(EVIL)
    monkeypatch.chdir(root)
    return root


def suite_of(project: Path, case: Case) -> Suite:
    return make_suite(project / "evals" / "theirs", case)


def a_case(*, image: str = "none", **changes: tuple[str, ...]) -> Case:
    case = make_case("a")
    return replace(case, task=replace(case.task, sandbox=SandboxSpec(image=image), **changes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("{outside}/evil.py:v", "outside the project"),
        ("../evil.py:v", "outside the project"),
        ("evals/theirs/../../../evil.py:v", "outside the project"),
        ("link.py:v", "outside the project"),
        ("evals/theirs/evil.py:v", "code in the suite's folder"),
        ("evals.theirs.evil:v", "code in the suite's folder"),
        ("evals.theirs:v", "code in the suite's folder"),
        ("evil\0.py:v", "not a path"),
        ("evil\n.py:v", "not a path"),
        (f"{'x' * 300}.py:v", "not a path"),
        (f"{'x/' * 3000}x.py:v", "not a path"),
        ("evil\0:v", "not a module"),
        ("evil\n:v", "not a module"),
        (".:v", "not a module"),
        ("..evil:v", "not a module"),
        ("a-b/evil:v", "not a module"),
    ],
)
@pytest.mark.parametrize("kind", ["verifiers", "tools"])
def test_foreign_code_raises_before_it_is_imported(kind: str, reference: str, why: str, project: Path, tmp_path: Path) -> None:
    (project / "link.py").symlink_to(tmp_path / "evil.py")
    foreign = suite_of(project, a_case(**{kind: (reference.format(outside=tmp_path),)}))
    with pytest.raises(UserError, match=why):
        check_suite_code(foreign, project)
    arguments = ["eval", "evals/theirs", *OVERRIDES, "--policy", f"{HERE}:policy", "--run-dir", "r"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError) and why in str(result.exception), result.output
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("reference", ["evil:v", "package.part:v", "package.evil.part:v"])
@pytest.mark.parametrize("entry", ["", "{suite}"])
def test_code_found_in_the_current_directory_raises(reference: str, entry: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `python -m agentrl eval .` in the suite's folder."""
    suite = project / "evals" / "theirs"
    (project / "evil.py").unlink()
    (suite / "package").mkdir()
    (suite / "package" / "__init__.py").write_text(EVIL)
    monkeypatch.chdir(suite)
    monkeypatch.syspath_prepend(entry.format(suite=suite))
    with pytest.raises(UserError, match="code in the suite's folder"):
        check_suite_code(suite_of(project, a_case(verifiers=(reference,))), project)


def test_the_project_precedes_the_current_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "evals" / "theirs")
    monkeypatch.syspath_prepend("")
    check_suite_code(suite_of(project, a_case(verifiers=("evil:v", "json:loads", "agentrl.records:Score"))), project)


FOREIGN = ("/etc", "../image", "sandboxes/../../image")
IMPOSSIBLE = ("a\0b", "a\x1b[31m", "a\n", "\x7f", "x" * 256, "é" * 128, "x/" * 2100 + "x")


@pytest.mark.parametrize("image", [*FOREIGN, *IMPOSSIBLE])
def test_a_foreign_image_or_an_impossible_folder_name_raises(image: str, project: Path) -> None:
    with pytest.raises(UserError, match="an image outside" if image in FOREIGN else "name is not a path"):
        check_suite_code(suite_of(project, a_case(image=image)), project)


def test_surrogates_are_not_a_path(project: Path) -> None:
    assert untrusted_files.resolve_inside("a\ud800b", project) is None and untrusted_files.resolve_inside("\udcff", project) is None
    assert untrusted_files.resolve_inside("x" * 255, project) == project / ("x" * 255)


def test_code_of_the_project_and_its_packages_is_allowed(project: Path) -> None:
    names = ("rewards.tables:exact_answer", "rewards/mine.py:exact", f"{project}/rewards/mine.py:exact", "an_entry_point")
    check_suite_code(suite_of(project, a_case(image="sandboxes/tables", verifiers=names, tools=("python", "submit", "mcp:files"))), project)


def test_a_suite_of_another_project_is_evaluated_in_it(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "download"
    other.mkdir()
    (other / "pyproject.toml").write_text("")
    suite = make_suite(other / "evals", make_case("a"))
    with pytest.raises(UserError, match="belongs to a different project") as error:
        check_project([suite], other)
    assert f"cd {other}" in error.value.fix
    result = CliRunner().invoke(app, ["eval", str(other / "evals"), *OVERRIDES, "--policy", f"{HERE}:policy", "--run-dir", "r"])
    assert isinstance(result.exception, UserError) and "a different project" in str(result.exception)
    monkeypatch.chdir(other / "evals")
    check_project([suite], other)
