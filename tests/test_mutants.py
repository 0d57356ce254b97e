"""The files of `scripts/mutants.py` and the mutants in `tests/mutants.toml` exist in the code."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_laws_name_files_that_exist() -> None:
    laws = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))["LAWS"]
    paths = {path for law in laws.values() for path in (*law.files, *law.tests)}
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_explained_mutants_name_code_that_exists() -> None:
    explained = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["equivalent"]
    lines = {mutant["file"]: {line.strip() for line in (ROOT / mutant["file"]).read_text().splitlines()} for mutant in explained}
    assert not [mutant for mutant in explained if mutant["code"] not in lines[mutant["file"]]]
