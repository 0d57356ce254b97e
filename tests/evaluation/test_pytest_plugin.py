"""The pytest plug-in in separate pytest runs: items, failures, wrong options, and imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.evaluation import results
from agentrl.evaluation.pytest_cases import BackgroundEvaluation
from tests.evaluation.suite_parts import HERE, OVERRIDES, make_case, make_suite

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "agentrl.evaluation.pytest_plugin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


RUNS = """
import contextlib, io, json, pytest, sys
for arguments in json.loads(sys.argv[1]):
    with io.StringIO() as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        ended = int(pytest.main(arguments)), out.getvalue()
    print(json.dumps(ended), file=sys.__stdout__)
"""


def run_pytests(project: Path, *argument_lists: list[str]) -> list[tuple[int, str]]:
    """Returns exit codes and outputs of pytest runs in a project, in one process, with only this plug-in loaded as by its entry point."""
    commands = [["-p", PLUGIN, "-p", "no:cacheprovider", *arguments] for arguments in argument_lists]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUNS, json.dumps(commands)]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


def run_pytest(project: Path, *arguments: str) -> tuple[int, str]:
    return run_pytests(project, list(arguments))[0]


@pytest.mark.slow
def test_cases_are_items_with_readable_failures(project: Path) -> None:
    make_suite(
        project / "evals" / "one", make_case("bad"), make_case("broken"), make_case("flaky", threshold=0.5, repeats=4), make_case("good")
    )
    make_suite(project / "evals" / "two", make_case("good_too"), make_case("bad_deselected"))
    (project / "test_mine.py").write_text("def test_mine(): pass\n")
    code, out = run_pytest(
        project,
        *("-v", "-k", "not deselected", "--agentrl-suite", "evals", "--agentrl-policy", f"{HERE}:policy"),
        *("--agentrl-set", OVERRIDES[0], "--agentrl-run-dir", "r"),
    )
    assert code == 1 and "1 failed, 3 passed, 1 deselected, 1 error" in out, out
    assert "test_mine" not in out, "only suites run if no tests are named"
    for item, ending in (("one::bad", "FAILED"), ("one::broken", "ERROR"), ("one::flaky", "PASSED"), ("two::good_too", "PASSED")):
        assert any(row.startswith(f"evals/{item} {ending}") for row in out.splitlines()), (item, out)
    report = out[out.index("ERRORS") :]
    for text in ("What is case bad?", "evidence  wanted pass, got fail", "failed  0.00 of 1 in 1 attempt", "call submit", "score   0"):
        assert text in report, text
    assert "more: agentrl failures show r one:bad-r0-a0" in report
    assert "no judge" in report and "pytest_cases.py" not in report, "frames of agentrl are hidden"
    assert "\x1b[31m" not in report and "\u202e" not in report
    assert "agentrl: one: 2 of 4 cases passed" in out
    assert results.load_results(project / "r" / "suites" / "one").scores()["flaky"] == [1.0, 0.0, 1.0, 0.0]
    assert results.load_results(project / "r" / "suites" / "two").scores() == {"good_too": [1.0]}, "a deselected case is not evaluated"


WRONG = [
    (["--agentrl-suite", "s"], "sets no policy"),
    (["s"], "use --agentrl-policy FOLDER"),
    (["s", "--agentrl-key-env", "KEY"], "require --agentrl-policy"),
    (["--agentrl-policy", "a:b"], "needs a suite"),
    (["--agentrl-suite", "s", "--agentrl-policy", "a:b", "--agentrl-set", "rollout.size=3"], "rollout.size: unknown key"),
    (["--agentrl-suite", "s", "--agentrl-policy", f"{HERE}:no_policy"], "generate"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_case_that_finishes_just_after_the_timeout_has_its_outcome(fails: bool) -> None:
    class FinishesLate(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            if timeout is not None and not self.done():
                self.set_exception(TimeoutError("of the evaluation")) if fails else self.set_result("its outcome")
                raise TimeoutError
            return super().result(timeout)

    evaluation = BackgroundEvaluation(cast(Any, SimpleNamespace(suites=())))
    evaluation._thread, evaluation._outcomes["s", "c"] = cast(Any, "started"), FinishesLate()
    if fails:
        with pytest.raises(TimeoutError, match="of the evaluation"):
            evaluation.outcome("s", "c")
    else:
        assert evaluation.outcome("s", "c") == "its outcome"


def test_wrong_options_are_an_error_before_anything_starts(project: Path) -> None:
    make_suite(project / "s", make_case("good"))
    for (_, message), (code, out) in zip(WRONG, run_pytests(project, *(["-q", *arguments] for arguments, _ in WRONG)), strict=True):
        assert (code, message in out, "Traceback" in out) == (int(pytest.ExitCode.USAGE_ERROR), True, False), out
    assert not (project / "runs").exists() or not any((project / "runs").rglob("*.json"))


@pytest.mark.slow
def test_a_suites_folder_may_be_an_argument(project: Path) -> None:
    make_suite(project / "s", make_case("bad"), make_case("good"))
    make_suite(project / "t", make_case("good"))
    (project / "test_mine.py").write_text("def test_mine(): pass\n")
    options = ("-q", "--agentrl-set", OVERRIDES[0], "--agentrl-policy", f"{HERE}:policy")
    code, out = run_pytest(project, "s", *options)
    assert code == 1 and "1 failed, 1 passed" in out and "agentrl: s: 1 of 2 cases passed" in out, out
    code, out = run_pytest(project, "s", "test_mine.py", "--agentrl-suite", "t", "--agentrl-suite", "s", "-k", "not bad", *options)
    assert code == 0 and "3 passed, 1 deselected" in out, f"a suite that an argument names is not added a second time: {out}"
    code, out = run_pytest(project, "-q")
    assert code == 0 and "1 passed" in out, f"a suite that no argument names is not evaluated: {out}"


@pytest.mark.slow
def test_a_suite_may_record_a_model_but_no_code(project: Path) -> None:
    policies = ("runs/quickstart@24", "http://127.0.0.1:9/v1", "evil.py:policy", "/etc", "../elsewhere", "a\\u0000b")
    (project / "evil.py").write_text("raise SystemExit(7)\n")
    for number, policy in enumerate(policies):
        make_suite(project / f"s{number}", make_case("good"))
        (project / f"s{number}" / "suite.toml").write_text(f'policy = "{policy}"\nnote = "made by: agentrl train recipes/quickstart.py"\n')
    for number, (code, out) in enumerate(run_pytests(project, *(["-q", f"s{number}"] for number in range(len(policies))))):
        assert code == int(pytest.ExitCode.USAGE_ERROR) and "Traceback" not in out, out
        assert ("is outside the project" if number > 2 else "does not exist (made by: agentrl train") in out
        assert "--agentrl-policy FOLDER or RUN@VERSION" in out or "is outside" in out


@pytest.mark.slow
def test_an_evaluation_that_cannot_start_is_an_error_of_every_case(project: Path) -> None:
    make_suite(project / "s", make_case("bad"), make_case("good"))
    options = ("-q", "--agentrl-suite", "s", "--agentrl-set", OVERRIDES[0])
    code, out = run_pytest(project, *options, "--agentrl-policy", f"{HERE}:failing_policy")
    assert code == 1 and "2 errors" in out and "there are no weights" in out, out
    assert "is not stored" in out and "Traceback" not in out


@pytest.mark.slow
def test_collecting_tests_starts_no_run(project: Path) -> None:
    make_suite(project / "s", make_case("good"), make_case("bad"))
    code, out = run_pytest(project, "-q", "--collect-only", "--agentrl-suite", "s", "--agentrl-policy", "gone.module:policy")
    assert code == 0 and "s::good" in out and not (project / "runs").exists(), out


@pytest.mark.slow
def test_a_pytest_run_without_suites_imports_only_the_entry_point(project: Path) -> None:
    """The entry point is loaded in every pytest run if agentrl is installed."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert entry_points == {"agentrl": PLUGIN}
    (project / "test_mine.py").write_text(
        "import sys\n"
        "def test_mine():\n"
        "    ours = sorted(name for name in sys.modules if name.split('.')[0] in ('agentrl', 'pydantic', 'httpx', 'torch'))\n"
        f"    assert ours == ['agentrl', 'agentrl.evaluation', {PLUGIN!r}], ours\n"
    )
    code, out = run_pytest(project, "-q")
    assert code == 0 and "1 passed" in out, out
