"""`agentrl init`: creates a project from the files of the quickstart.

A wheel contains these files under `agentrl/_project`; an editable install uses the files in the repository. Files that only a project has
(README, Makefile, test, ...) are templates in `agentrl/cli/template`, with the suffix `.in`. `template_empty` contains the templates for a
project without the quickstart.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from agentrl.base.installation import requirement
from agentrl.errors import UserError
from agentrl.plugins.references import CONTENT, content_root

FOLDER = Path(__file__).resolve().parent
NAME_MARK, AGENTRL_MARK = "@NAME@", "@AGENTRL@"
NEXT = {
    False: ("agentrl doctor", "agentrl check recipes/quickstart.py", "agentrl train recipes/quickstart.py"),
    True: ("agentrl doctor", "python -m pytest", "agentrl check recipes/mine.py", "agentrl train recipes/mine.py"),
}
"""The next commands to print, by whether the project is empty: False for a project with the quickstart, True for an empty project."""
_BOTH = ("pyproject.toml", ".gitignore")


def init_project(target: Path, name: str, *, empty: bool = False) -> list[Path]:
    """Creates a project in `target`, a new or empty folder. Returns the paths of the written files, sorted.

    Args:
        empty: write a minimal family, verifier, recipe and test instead of the quickstart.

    Raises:
        UserError: the folder is not empty, is a file or cannot be written, or `name` has no letter or digit.
    """
    shown = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    if not shown:
        raise UserError(f"{name!r} is not a valid project name", fix="use a folder name with letters, digits and dashes")
    root, parts = content_root(), () if empty else CONTENT
    try:
        _make_empty(target)
        for part in parts:
            _copy(root / part, target / part)
        for template, result in _templates(target, empty=empty):
            result.parent.mkdir(parents=True, exist_ok=True)
            text = template.read_text(encoding="utf-8").replace(NAME_MARK, shown).replace(AGENTRL_MARK, requirement())
            result.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}", fix="choose a writable folder") from error
    return sorted(path for path in target.rglob("*") if path.is_file())


def _templates(target: Path, *, empty: bool) -> Iterator[tuple[Path, Path]]:
    """Yields pairs of a template and the path of the file that is written from it."""
    folder = FOLDER / ("template_empty" if empty else "template")
    for template in sorted(folder.rglob("*.in")):
        yield template, target / template.relative_to(folder).with_suffix("")
    for name in _BOTH if empty else ():
        yield FOLDER / "template" / f"{name}.in", target / name


def _make_empty(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file", fix="choose a new folder")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UserError(f"{target} is not empty", fix="choose a new folder; this one was not changed")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)
