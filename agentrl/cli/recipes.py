"""Loading the recipe of a command."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.recipe import Recipe, apply_overrides
from agentrl.errors import RecipeError
from agentrl.plugins.references import add_project_root, resolve
from agentrl.plugins.references import project_root as project_root


def load_recipe(path: Path, overrides: list[str]) -> tuple[Path, Recipe]:
    """Loads a recipe file with overrides. Returns the root of its project, which is added to `sys.path`, and the recipe."""
    if not path.is_file():
        raise RecipeError(f"no recipe file {path}", fix="give the path of a Python file with a module-level `recipe`")
    root = project_root(path)
    add_project_root(root)
    recipe = resolve(f"{path.resolve()}:recipe")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{path}: `recipe` is {type(recipe).__name__}, not agentrl.Recipe", fix="write recipe = Recipe(...)")
    return root, apply_overrides(recipe, overrides)
