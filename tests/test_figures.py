"""The code base still meets the limits of `scripts/figures.py`, and the scripts print their results."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MET_LIMITS = ("modules at the root", "the longest file", "the longest function", "without a docstring", "words in docs")
"""Parts of the names of figures whose limits are met."""


@pytest.mark.slow
def test_the_code_base_meets_its_limits() -> None:
    figures = runpy.run_path(str(ROOT / "scripts" / "figures.py"))["figures"]()
    for name in MET_LIMITS:
        (figure,) = [figure for figure in figures if name in figure.name]
        assert figure.ok, f"{figure.name}: {figure.value}, at most {figure.limit}: {figure.offenders}"


@pytest.mark.slow
def test_a_sample_of_sentences_depends_only_on_the_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = ROOT / "scripts" / "sentences.py"
    main = runpy.run_path(str(script))["main"]
    monkeypatch.setitem(main.__globals__, "sentences", functools.cache(main.__globals__["sentences"]))

    def sample(seed: int) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), "--seed", str(seed), "--count", "5"])
        main()
        return capsys.readouterr().out

    command = [sys.executable, str(script), "--seed", "3", "--count", "5"]
    elsewhere = subprocess.run(command, text=True, capture_output=True, timeout=120, check=True).stdout
    assert sample(3) == elsewhere != sample(4)
    assert [line.split()[0] for line in elsewhere.splitlines()[::2]] == ["1", "2", "3", "4", "5"]
