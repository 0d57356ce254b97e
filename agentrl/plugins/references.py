"""Resolves plug-in references: `module:attr`, `./file.py:attr`, or the name of an entry point.

No other module imports user-supplied code. References come from recipes and tasks, never from a sandbox, a judge or a model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from agentrl.base.error_text import display_path, one_line_error, raise_location, validation_text
from agentrl.base.installation import install_command
from agentrl.base.user_code import raising_as
from agentrl.errors import PluginError, UserError

ENTRY_POINT_GROUP = "agentrl.plugins"
PACKAGE = Path(__file__).resolve().parents[1]
CONTENT = (
    "sandboxes/tables",
    "rewards/algebra.py",
    "rewards/asked.py",
    "rewards/bags.py",
    "rewards/exact.py",
    "rewards/extract.py",
    "rewards/form.py",
    "rewards/hidden_tests.py",
    "rewards/json_schema.py",
    "rewards/late.py",
    "rewards/mathematics.py",
    "rewards/notation.py",
    "rewards/numeric.py",
    "rewards/outputs.py",
    "rewards/pattern.py",
    "rewards/scalars.py",
    "rewards/signs.py",
    "rewards/sql.py",
    "rewards/sql_copies.py",
    "rewards/sql_text.py",
    "rewards/tables.py",
    "rewards/tool_use.py",
    "rewards/units.py",
    "recipes/cartpole.py",
    "recipes/frozen_lake.py",
    "recipes/quickstart.py",
    "recipes/base_policy.py",
    "recipes/models/tables-base",
    "recipes/outside_agent.py",
    "recipes/agents",
    "evals/regressions",
)
"""The files that `agentrl init` copies. In a wheel, they are under `agentrl/_project`; in an editable install, in the repository."""


_added: list[Path] = []  # the root of the project in use


def add_project_root(root: Path) -> None:
    """Puts a project's root first on `sys.path`, so that `rewards.tables:exact_answer` refers to a file in the project."""
    _added[:] = [root.resolve()]
    if sys.path[:1] != [str(_added[0])]:
        sys.path.insert(0, str(_added[0]))


def current_project() -> Path:
    """Returns the root of the project in use. If no root was added, returns the root of the project that contains the current directory."""
    return _added[0] if _added else project_root(Path.cwd() / "x")


def project_root(path: Path) -> Path:
    """Returns the nearest folder above `path` that contains a pyproject.toml; the current directory if there is none."""
    for folder in path.resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    return Path.cwd()


def content_root() -> Path:
    """Returns the folder with the shipped `sandboxes`, `rewards`, `recipes` and `evals`. Raises `UserError` if the folder is missing."""
    for root in (PACKAGE / "_project", PACKAGE.parent):
        if all((root / part).exists() for part in CONTENT):
            return root
    raise UserError("this installation of agentrl lacks the quickstart files", fix=f"install it again: {install_command()}")


def resolve(reference: str) -> Any:
    """Returns the object that a reference denotes. Raises a `PluginError` that names the part that did not resolve.

    `pkg.module:attr`   a module on `sys.path` (the project root is on it)
    `./path/file.py:attr`   a file, relative to the current directory
    `name`   an entry point in the group `agentrl.plugins` of an installed package
    """
    where, sep, attribute = reference.rpartition(":")
    if not sep:
        return _from_entry_point(reference)
    if not where or not attribute:
        raise PluginError(f"{reference!r} is not a plug-in reference", fix="write module:attr, ./file.py:attr, or an entry point's name")
    module = _load_file(where, reference) if where.endswith(".py") else _import(where, reference)
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise PluginError(f"{reference!r}: {where} has no attribute {attribute!r}", fix=f"it has: {names}") from None


def _import(name: str, reference: str) -> ModuleType:
    def failed(error: BaseException) -> PluginError:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            return _failed(reference, error)
        fix = "run from the project root, or refer to a file: ./path/file.py:attr"
        return PluginError(f"{reference!r}: no module named {missing!r}", fix=fix)

    with raising_as(failed):
        return importlib.import_module(name)


def _load_file(path_text: str, reference: str) -> ModuleType:
    path = Path(path_text).resolve()
    if not path.is_file():
        raise PluginError(f"{reference!r}: no such file: {path}", fix="give the path relative to the current directory")
    name = f"agentrl_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{reference!r}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with raising_as(partial(_failed, display_path(str(path)))):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _failed(reference: str, error: BaseException) -> PluginError:
    """Returns the error for an exception during the import of user-supplied code, with the location of the exception. If the exception is a
    `UserError`, the returned error has the same fix."""
    at = raise_location(error) or reference
    if isinstance(error, SyntaxError):
        at = at if error.filename is not None else reference  # for a null byte, Python reports neither the file nor the line
        return PluginError(f"{at}: {type(error).__name__}: {error.msg}", fix="correct that line")
    if isinstance(error, ValidationError):
        return PluginError(f"{at}: {validation_text(error)}", fix="correct it there; the lines above show the key and the accepted values")
    if isinstance(error, UserError):
        return PluginError(f"{at}: {error.message}", fix=error.fix)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return PluginError(f"{at}: {one_line_error(error)}", fix=f"install {error.name!r}, or correct its name")
    return PluginError(f"{at}: {one_line_error(error)}", fix="correct the code there")


def installed_plugins() -> tuple[str, ...]:
    """Returns the names of installed entry points in the group `agentrl.plugins`, without importing them."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def _from_entry_point(name: str) -> Any:
    matches = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not matches:
        known = ", ".join(installed_plugins()) or "none"
        raise PluginError(f"no plug-in named {name!r} (installed: {known})", fix="write module:attr or ./file.py:attr")
    with raising_as(partial(_failed, name)):
        return next(iter(matches)).load()
