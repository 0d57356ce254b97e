"""The starts of a run, also with killed drivers and invalid lines."""

from __future__ import annotations

from pathlib import Path

from agentrl.observe import summary


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
    assert (first.step, first.ended) == (0, "killed"), "it left no word"
    assert (second.step, second.ended, second.attempts_failed) == (2, "failed", 7), "an end is noted once"
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
    (one,) = summary.read_sessions(tmp_path)
    assert (one.began, one.ended) == ("x", "killed")
