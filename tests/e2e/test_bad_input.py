"""Bad input fails before anything starts, with exit code 2, the problem and the fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.commands import agentrl as in_this_process

from .conftest import ROOT, agentrl

pytestmark = pytest.mark.e2e

RECIPE = "recipes/quickstart.py"
BASE = ROOT / "recipes" / "models" / "tables-base"


def assert_rejected(*arguments: str, message: str, env: dict[str, str] | None = None) -> None:
    code, output = agentrl(*arguments, env=env, timeout=300)
    _check_error(code, output, message)


def assert_rejected_here(*arguments: str, message: str) -> None:
    """Like `assert_rejected`, in this process."""
    completed = in_this_process(*arguments)
    _check_error(completed.returncode, completed.stdout + completed.stderr, message)


def _check_error(code: int, output: str, message: str) -> None:
    assert code == 2, output
    assert message in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", "learner.lrr: unknown key"),
        ("learner.lr=fast", "learner.lr"),
        ("policy.model=./nowhere", "policy.model: there is no folder"),
        ("tasks.family=sandboxes.tables:Tabels", "it has:"),
        ("tasks.family=sandboxes.nothing:X", "no module named"),
        ('tasks.family.options={"sede": 1}', "tasks.family"),
    ],
)
def test_recipe_mistakes(override: str, message: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert_rejected_here("train", RECIPE, override, "--run-dir", str(run), message=message)
    assert not run.exists()


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    assert_rejected_here("train", "recipes/none.py", message="no recipe file")
    (tmp_path / "r.py").write_text("recipe = 3\n")
    assert_rejected_here("train", str(tmp_path / "r.py"), message="not agentrl.Recipe")


def test_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert_rejected("train", RECIPE, f"policy.model={model}", "--run-dir", str(tmp_path / "run"), message="no chat template")


def test_verifier_that_does_not_resolve(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom sandboxes.tables import Tables\n"
        "class Mine(Tables):\n    def task(self, split, index):\n"
        "        return replace(super().task(split, index), verifiers=('rewards.gone:score',))\n"
    )
    assert_rejected(
        "train", RECIPE, f"tasks.family={tmp_path}/mine.py:Mine", "--run-dir", str(tmp_path / "run"), message="rewards.gone"
    )  # fmt: skip


def test_without_a_sandbox_backend_nothing_runs_on_the_host(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    env = {"PATH": str(empty), "DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    assert_rejected("train", RECIPE, "--run-dir", str(tmp_path / "run"), message="fix:", env=env)


def test_help_has_examples() -> None:
    verbs = ("list", "diff", "compare", "promote", "rollback", "pin")
    single = ("train", "sample", "worker", "eval", "check", "doctor", "init", "report", "store", "score")
    for command in (*((name,) for name in single), *(("versions", verb) for verb in verbs), ("chaos", "run")):
        completed = in_this_process(*command, "--help")
        assert completed.returncode == 0 and "Example: agentrl" in completed.stdout, completed
