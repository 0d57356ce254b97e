"""The limits of `scripts/figures.py` that the code base meets stay met, and both scripts print what they promise."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MET = ("modules at the root", "the longest file", "the longest function", "without a docstring", "words in docs")
"""Parts of the names of figures."""


def test_limits_that_are_met_stay_met() -> None:
    figures = runpy.run_path(str(ROOT / "scripts" / "figures.py"))["figures"]()
    for name in MET:
        (figure,) = [figure for figure in figures if name in figure.name]
        assert figure.ok, f"{figure.name}: {figure.value}, at most {figure.limit}: {figure.offenders}"


def test_a_sample_of_sentences_depends_on_the_seed_alone() -> None:
    def sample(seed: int) -> str:
        command = [sys.executable, str(ROOT / "scripts" / "sentences.py"), "--seed", str(seed), "--count", "5"]
        return subprocess.run(command, text=True, capture_output=True, timeout=120, check=True).stdout

    assert sample(3) == sample(3) != sample(4)
    assert [line.split()[0] for line in sample(3).splitlines()[::2]] == ["1", "2", "3", "4", "5"]
