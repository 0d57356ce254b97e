"""Writing a project of the user's own from the quickstart's files. There is one copy of each: a wheel carries them under
`agentrl/_project`, an editable install finds them at the root of the repository. Files that only such a project has (README,
Makefile, test, ...) are templates in `agentrl/cli/template`, named like their result with `.in` added; `template_empty` has those of a
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
"""Whether a new project is empty -> the next commands."""
_BOTH = ("pyproject.toml", ".gitignore")


def init_project(target: Path, name: str, *, empty: bool = False) -> list[Path]:
    """Writes a project that trains at once into `target`, a new or empty folder; returns the files written, sorted.

    `empty`: a family, a verifier, a recipe and a test of a few lines each, in place of the quickstart's.

    Raises `UserError` when the folder holds something, is a file, or cannot be written, and when `name` has no letter or digit.
    """
    shown = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    if not shown:
        raise UserError(f"{name!r} is not a project name", fix="use a folder name with letters, digits and dashes")
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
        raise UserError(f"cannot write {target}: {error.strerror or error}", fix="choose a folder that you may write to") from error
    return sorted(path for path in target.rglob("*") if path.is_file())


def _templates(target: Path, *, empty: bool) -> Iterator[tuple[Path, Path]]:
    """Yields each template with the path of its result."""
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
        raise UserError(f"{target} is not empty", fix="choose a new folder; nothing in it was changed")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)
