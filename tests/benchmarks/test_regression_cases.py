"""The timing of regression cases: what is asked is a suite, and a figure that is missed is told."""

from __future__ import annotations

from pathlib import Path

from agentrl.failure.case import load_suite
from benchmarks.regression_cases import Timed, make_suite, table


def test_the_suite_is_one_and_the_figure_is_held_to_what_is_stated(tmp_path: Path) -> None:
    make_suite(tmp_path / "suite", 3)
    assert len({case.key for case in load_suite(tmp_path / "suite").cases}) == 3
    quick = Timed(whole_s=120.0, asking_s=80.0, passed=150, unscored=0, attempts=200)
    assert quick.ok and not Timed(whole_s=181.0, asking_s=80.0, passed=150, unscored=0, attempts=200).ok
    assert not Timed(whole_s=120.0, asking_s=80.0, passed=150, unscored=1, attempts=200).ok, "what was not scored was not asked"
    assert "| 1 | 120 | 80 | 2.5 | 150 | 0 |" in table([quick], 200, "docker")
