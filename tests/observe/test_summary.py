from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.errors import StoreError
from agentrl.observe import Summary, summary

from .conftest import make_summary


def test_a_summary_is_read_back_equal_and_has_the_documented_keys(tmp_path: Path) -> None:
    summary = make_summary()
    path = summary.write(tmp_path)
    assert Summary.read(tmp_path) == summary
    data = json.loads(path.read_text())
    assert set(data["heldout_before"]) == {"value", "ci_low", "ci_high", "n"}
    assert {"heldout_real_after", "swap_stall_ms_p50", "wall_s", "versions", "by_kind"} <= set(data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_missing_figures_are_null(tmp_path: Path) -> None:
    summary = Summary(
        name="x",
        finished=False,
        steps=0,
        episodes=0,
        episodes_left_out=0,
        tokens_trained=0,
        weight_swaps=0,
        sandbox_backend="bubblewrap",
        seed=3,
    )
    assert json.loads(summary.write(tmp_path).read_text())["heldout_after"] is None


def test_a_wrong_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Summary.read(tmp_path)
    (tmp_path / "summary.json").write_text('{"name": "x", "unheard_of": 1}')
    with pytest.raises(StoreError, match="not a run summary"):
        Summary.read(tmp_path)
    with pytest.raises(ValidationError, match="unheard_of"):
        Summary(**make_summary().model_dump(), unheard_of=1)


# The starts of a run, including killed drivers and invalid lines.
def test_starts_and_ends_are_read_in_order(tmp_path: Path) -> None:
    assert summary.read_sessions(tmp_path) == ()
    summary.record_start(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 2}\n')
    summary.record_start(tmp_path)
    summary.record_end(tmp_path, "failed", why="the daemon\x1b[31m died", figures={"attempts_failed": 7.0, "attempts_ended": 9.0})
    summary.record_end(tmp_path, "finished")
    summary.record_start(tmp_path)
    summary.record_end(tmp_path, "interrupted")
    first, second, third = summary.read_sessions(tmp_path)
    assert (first.step, first.ended) == (0, "killed"), "it recorded no end"
    assert (second.step, second.ended, second.attempts_failed) == (2, "failed", 7), "an end is recorded once"
    assert second.why == "the daemon\ufffd[31m died" and third.ended == "interrupted"


def test_an_end_without_a_start_is_ignored(tmp_path: Path) -> None:
    summary.record_end(tmp_path, "finished")
    assert not list(tmp_path.iterdir())


def test_invalid_lines_are_ignored(tmp_path: Path) -> None:
    lines = [
        "[]",
        "7",
        "null",
        '{"ended": "failed"}',
        '{"began": 5}',
        '{"began": "x", "step": 1}',
        '{"ended": "exploded"}',
        "[" * 100_000,
        '{"b',
    ]
    (tmp_path / summary.SESSIONS_FILE).write_text("\n".join(lines) + "\n")
    (session,) = summary.read_sessions(tmp_path)
    assert (session.began, session.ended) == ("x", "killed")
