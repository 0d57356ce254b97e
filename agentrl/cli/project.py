"""Writing a project of the user's own from the quickstart's files. There is one copy of each: a wheel carries them under
`agentrl/_project`, an editable install finds them at the root of the repository. Files that only such a project has (README,
Makefile, test, ...) are templates in `agentrl/cli/template`, named like their result with `.in` added.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from agentrl.errors import UserError
from agentrl.installation import requirement
from agentrl.plugins import CONTENT, content_root

FOLDER = Path(__file__).resolve().parent
NAME_MARK, AGENTRL_MARK = "@NAME@", "@AGENTRL@"


def init_project(target: Path, name: str) -> list[Path]:
    """Writes a project that trains at once into `target`, a new or empty folder; returns the files written, sorted.

    Raises `UserError` when the folder holds something, is a file, or cannot be written, and when `name` has no letter or digit.
    """
    shown = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    if not shown:
        raise UserError(f"{name!r} is not a project name", fix="use a folder name with letters, digits and dashes")
    root = content_root()
    try:
        _make_empty(target)
        for part in CONTENT:
            _copy(root / part, target / part)
        for template in sorted((FOLDER / "template").rglob("*.in")):
            result = target / template.relative_to(FOLDER / "template").with_suffix("")
            result.parent.mkdir(parents=True, exist_ok=True)
            text = template.read_text(encoding="utf-8").replace(NAME_MARK, shown).replace(AGENTRL_MARK, requirement())
            result.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}", fix="choose a folder that you may write to") from error
    return sorted(path for path in target.rglob("*") if path.is_file())


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
