from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.cli.running import project_root
from agentrl.errors import RecipeError, UserError
from agentrl.records import Split


def test_the_project_root_is_the_nearest_folder_with_a_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "recipes" / "deep").mkdir(parents=True)
    assert project_root(tmp_path / "recipes" / "deep" / "r.py") == tmp_path


def test_a_recipe_file_must_hold_a_recipe(tmp_path: Path) -> None:
    from agentrl.cli.running import load_recipe

    (tmp_path / "r.py").write_text("recipe = {}\n")
    with pytest.raises(RecipeError, match=r"not agentrl\.Recipe"):
        load_recipe(tmp_path / "r.py", [])
    (tmp_path / "README.md").write_text("")
    for other in ("README.md", "."):
        with pytest.raises(RecipeError, match="is not a recipe"):
            load_recipe(tmp_path / other, [])


def test_check_applies_overrides_to_a_recipe_and_rejects_them_for_a_folder() -> None:
    from agentrl.cli.check import open_target

    source, config, _ = open_target("recipes/quickstart.py", "bubblewrap", ['tasks.verifiers=["rewards.close:close_number"]'])
    assert source.open().task(Split.TRAIN, 0).verifiers == ("rewards.close:close_number",) and config.backend.ref == "bubblewrap"
    with pytest.raises(UserError, match="sandboxes/chores accepts no overrides"):
        open_target("sandboxes/chores", None, ["tasks.verifiers=[]"])


def test_check_passes_the_address_of_a_server_on() -> None:
    result = CliRunner().invoke(app, ["check", "ors:http://127.0.0.1:1/x"])
    assert isinstance(result.exception, UserError) and "127.0.0.1:1: request /list_environments failed" in str(result.exception)


def test_a_report_is_written_only_into_run_folders(tmp_path: Path) -> None:
    from agentrl.cli.runs import report

    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="contains no run, evaluation"):
        report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
