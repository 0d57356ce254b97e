"""The recipe that a command is given, and the project that it belongs to."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.recipe import Recipe, apply_overrides
from agentrl.errors import RecipeError
from agentrl.plugins.references import add_project_root, resolve
from agentrl.plugins.references import project_root as project_root


def load_recipe(path: Path, overrides: list[str]) -> tuple[Path, Recipe]:
    """The project root and the recipe of a file, with overrides laid over it; the root is put on `sys.path`."""
    if not path.is_file():
        raise RecipeError(f"no recipe file {path}", fix="give the path of a Python file with a module-level `recipe`")
    root = project_root(path)
    add_project_root(root)
    found = resolve(f"{path.resolve()}:recipe")
    if not isinstance(found, Recipe):
        raise RecipeError(f"{path}: `recipe` is {type(found).__name__}, not agentrl.Recipe", fix="write recipe = Recipe(...)")
    return root, apply_overrides(found, overrides)
