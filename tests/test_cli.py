from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli import project_root
from agentrl.errors import RecipeError


def test_the_project_root_is_the_nearest_folder_with_a_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "recipes" / "deep").mkdir(parents=True)
    assert project_root(tmp_path / "recipes" / "deep" / "r.py") == tmp_path


def test_a_recipe_file_must_hold_a_recipe(tmp_path: Path) -> None:
    from agentrl.cli import load_recipe

    (tmp_path / "r.py").write_text("recipe = {}\n")
    with pytest.raises(RecipeError, match=r"not agentrl\.Recipe"):
        load_recipe(tmp_path / "r.py", [])
