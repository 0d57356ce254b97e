"""The timing of regression cases: the generated suite, the target, and the table."""

from __future__ import annotations

from pathlib import Path

from agentrl.failure.case import load_suite
from benchmarks.regression_cases import Timed, make_suite, table


def test_the_suite_has_distinct_cases_and_the_time_is_compared_with_the_target(tmp_path: Path) -> None:
    make_suite(tmp_path / "suite", 3)
    assert len({case.key for case in load_suite(tmp_path / "suite").cases}) == 3
    quick = Timed(command_s=120.0, cases_s=80.0, passed=150, unscored=0, attempts=200)
    assert quick.ok and not Timed(command_s=181.0, cases_s=80.0, passed=150, unscored=0, attempts=200).ok
    assert not Timed(command_s=120.0, cases_s=80.0, passed=150, unscored=1, attempts=200).ok, "an attempt without a score misses the target"
    assert "| 1 | 120 | 80 | 2.5 | 150 | 0 |" in table([quick], 200, "docker")
