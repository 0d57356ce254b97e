"""The suite in `evals/regressions`, whose policy exists after the quickstart: a suite records the policy that is evaluated by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.errors import UserError
from agentrl.evaluation.policies import PolicySource, find_policy, recorded_policy
from agentrl.evaluation.suite_code import check_suite_code
from agentrl.failure.case import load_suite
from agentrl.records import Split
from sandboxes.tables import Tables
from tests.evaluation.suite_parts import make_case, make_suite

ROOT = Path(__file__).resolve().parents[2]


def test_the_suite_has_a_failed_held_out_task_of_each_kind_and_documents_its_policy() -> None:
    suite = load_suite(ROOT / "evals" / "regressions")
    check_suite_code(suite, ROOT)
    kinds = {Tables(seed=0).task(Split.HELDOUT, index).data["kind"] for index in range(96)}
    assert sorted(case.task.data["kind"] for case in suite.cases) == sorted(kinds)
    assert {case.task.split for case in suite.cases} == {Split.HELDOUT}
    assert {case.baseline and case.baseline.mean for case in suite.cases} == {0.0}, "each failed"
    assert not any(case.by for case in suite.cases)
    assert suite.policy == "runs/quickstart@24" and "agentrl train recipes/quickstart.py" in suite.note


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    for version in ("runs/q/versions/000003", "model"):
        (tmp_path / version).mkdir(parents=True)
        (tmp_path / version / "config.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(project: Path, policy: str, *, name: str = "s") -> Path:
    folder = make_suite(project / name, make_case("a")).folder
    (folder / "suite.toml").write_text(f'name = "{name}"\npolicy = "{policy}"\nnote = "train it: agentrl train r.py"\n')
    return folder


@pytest.mark.parametrize(("ref", "source"), [("runs/q@3", PolicySource.VERSION), ("model", PolicySource.FOLDER)])
def test_the_recorded_policy_equals_the_named_one(ref: str, source: PolicySource, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = load_suite(record(project, ref))
    assert recorded_policy([suite]) == find_policy(ref) and find_policy(ref).source is source
    monkeypatch.chdir(project / "sub")
    assert recorded_policy([suite]).model == str(project / ("runs/q/versions/000003" if "@" in ref else "model")), "from any directory"


def test_a_missing_policy_is_an_error_with_a_fix(project: Path) -> None:
    record(project, "runs/gone@24")
    result = CliRunner().invoke(app, ["eval", "s"])
    assert isinstance(result.exception, UserError) and "policy = 'runs/gone@24' does not exist (train it: agentrl train r.py)" in str(
        result.exception
    )
    assert "--policy FOLDER or RUN@VERSION" in result.exception.fix
    record(project, "runs/q@4")
    result = CliRunner().invoke(app, ["eval", "s"])
    assert isinstance(result.exception, UserError) and "no complete model of version 4" in str(result.exception)


def test_suites_that_disagree_or_record_none_need_the_option(project: Path) -> None:
    record(project, "model", name="one"), record(project, "runs/q@3", name="two")
    make_suite(project / "none", make_case("a"))
    for arguments, why in (
        (["one", "two"], "different policies"),
        (["none"], "sets no policy"),
        (["one", "--key-env", "K"], "need --policy"),
    ):
        result = CliRunner().invoke(app, ["eval", *arguments])
        assert isinstance(result.exception, UserError) and why in str(result.exception), (arguments, result.exception)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("link", "outside the project"),
        ("link@3", "outside the project"),
        ("runs/../../outside@3", "outside the project"),
        ("/etc", "outside the project"),
        ("s/theirs@3", "is in the folder of a suite"),
        ("s/theirs", "is in the folder of a suite"),
        ("s/borrowed@3", "is in the folder of a suite"),
        ("borrowed@3", "outside the project"),
    ],
)
def test_a_recorded_policy_outside_the_project_raises(
    policy: str, why: str, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run's recipe may refer to code."""
    outside = tmp_path_factory.mktemp("outside")
    for run in (outside, project / "s" / "theirs"):
        (run / "versions" / "000003").mkdir(parents=True)
        (run / "versions" / "000003" / "config.json").write_text("{}")
    (project / "link").symlink_to(outside)
    borrowed = tmp_path_factory.mktemp("borrowed")
    (project / "borrowed").symlink_to(borrowed)
    for run in (borrowed, project / "s" / "borrowed"):  # a third-party recipe with a model of the project
        (run / "versions").mkdir(parents=True)
        (run / "versions" / "000003").symlink_to(project / "model")
    with pytest.raises(UserError, match=why):
        recorded_policy([load_suite(record(project, policy))])
