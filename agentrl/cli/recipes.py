"""The recipe that a command is given, and the project that it belongs to."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import RecipeError
from agentrl.plugins import add_project_root, resolve
from agentrl.recipe import Recipe, apply_overrides


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


def project_root(path: Path) -> Path:
    """The nearest folder above a file that holds a pyproject.toml, else the current directory."""
    for folder in path.resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    return Path.cwd()
