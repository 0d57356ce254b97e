"""`agentrl score`: late scores by command and from files, and the server as a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from agentrl.session.late_scores import import_scores
from tests.commands import agentrl
from tests.late import REVIEW, late_group, opened_store, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", late_group(0), late_group(1, replace(REVIEW, name="past\n\x1b[2J", expires_at=4e9), size=1))


def score(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return agentrl("score", str(run), *arguments)


def test_pending_scores_are_listed_with_their_ranges_and_the_time_left(run: Path) -> None:
    listed = json.loads(score(run, "--list", "--json").stdout)
    assert [(item["episode_id"], item["task_id"], item["low"], item["high"]) for item in listed] == [
        ("g0-0", "t0", 0.0, 1.0),
        ("g0-1", "t0", 0.0, 1.0),
        ("g1-0", "t1", 0.0, 1.0),
    ]
    assert listed[0]["left_s"] is None and listed[2]["left_s"] > 1e8
    text = score(run, "--list").stdout
    assert "g0-0  review 0 to 1  no limit  t0" in text and "left  t1" in text and "3 pending scores" in text and "\x1b" not in text


def test_listing_records_expiries_without_a_driver(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", late_group(0, replace(REVIEW, expires_at=1.0)), late_group(1))
    assert [item["episode_id"] for item in json.loads(score(run, "--list", "--json").stdout)] == ["g1-0", "g1-1"]
    with opened_store(run) as store:
        assert [entry.state for entry in store.entries()] == ["ready", "parked"]


def test_a_score_by_command_is_stored_once(run: Path) -> None:
    first, second = (score(run, "g0-0", "review", "0.5", "--by", "anna", "--key", "k") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "is stored: attempt 0 of group 0, which waits for 1 more" in first.stdout and "was already stored" in second.stdout
    assert json.loads(score(run, "g0-1", "review", "1", "--json").stdout) == {
        "group": 0,
        "attempt": 1,
        "remaining": 0,
        "repeated": False,
        "replaced": None,
    }
    with opened_store(run) as store:
        assert [entry.state for entry in store.entries()] == ["ready", "parked"]


def test_a_mistyped_score_is_replaced_and_both_values_are_shown(run: Path) -> None:
    assert score(run, "g0-0", "review", "1").returncode == 0
    rejected = score(run, "g0-0", "review", "0.25")
    assert rejected.returncode == 2 and "--replace" in rejected.stderr
    assert "is stored and replaces 1: attempt 0" in score(run, "g0-0", "review", "0.25", "--replace").stdout
    with opened_store(run) as store:
        assert store.groups([0])[0].episodes[0].score.value == 0.25


def test_a_score_can_be_corrected_back_and_forth(run: Path) -> None:
    """By command and in a file, with the default keys, even if the file is imported twice."""
    assert score(run, "g0-0", "review", "1").returncode == 0
    for value in ("0.25", "1", "0.25"):
        result = score(run, "g0-0", "review", value, "--replace")
        assert result.returncode == 0 and "replaces" in result.stdout, result
    file = run.parent / "scores.jsonl"
    values = (1.0, 0.5, 1.0, 0.5, 1.0, 0.25, 0.5)
    lines = [json.dumps({"episode_id": "g0-0", "part": "review", "value": value, "replace": True}) for value in values]
    file.write_text("\n".join(lines))
    with opened_store(run) as store:
        assert import_scores(store, file, scored_by="anna").counts == {"accepted": 7, "repeated": 0, "rejected": 0}
        assert store.groups([0])[0].episodes[0].score.value == 0.5
        assert import_scores(store, file, scored_by="anna").counts["accepted"] == 0
        assert store.groups([0])[0].episodes[0].score.value == 0.5


REJECTED = {
    ("--list", "--replace"): "needs EPISODE",
    ("missing", "review", "0.5"): "episode",
    ("g0-0", "nothing", "0.5"): "part",
    ("g0-0", "review", "nan"): "not finite",
    ("g0-0", "review", "1e999"): "not finite",
    ("g0-0", "review", "1.5"): "from 0 to 1",
    ("g0-0", "review", "--", "-0.5"): "from 0 to 1",
    ("g0-0", "review", "0.5", "--by", "b" * 201): "200 characters",
    ("g0-0", "review"): "must be given together",
    (): "exactly one",
    ("--list", "--serve"): "exactly one",
}


@pytest.mark.parametrize("arguments", REJECTED, ids=" ".join)
def test_a_rejected_score_has_a_cause_and_a_fix(arguments: tuple[str, ...], run: Path) -> None:
    result = score(run, *arguments)
    assert result.returncode == 2 and REJECTED[arguments] in result.stderr and "fix:" in result.stderr, result
    with opened_store(run) as store:
        assert [entry.pending for entry in store.entries()] == [2, 1]


def test_a_file_of_scores_is_imported_completely_and_can_be_reimported(run: Path, tmp_path: Path) -> None:
    lines = [
        '{"episode_id": "g0-0", "part": "review", "value": 0.5}',
        "",
        '{"episode_id": "g0-0", "part": "review", "value": 0.5}',
        '{"episode_id": "g0-0", "part": "review", "value": 0.75}',
        '{"episode_id": "g0-1", "part": "review", "value": NaN}',
        "no JSON",
        f'{{"episode_id": "{"x" * 100_000}"}}',
        '{"episode_id": "g0-1", "part": "review", "value": 1}',  # and no line end
    ]
    file = tmp_path / "scores.jsonl"
    file.write_text("\n".join(lines))
    result = score(run, "--import", str(file), "--by", "anna", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 1 and (report["accepted"], report["repeated"], report["rejected"]) == (2, 1, 4)
    assert [(line["line"], line["cause"]) for line in report["lines"]] == [
        (4, "contradictory"),
        (5, "not_finite"),
        (6, "malformed"),
        (7, "malformed"),
    ]
    second = score(run, "--import", str(file), "--by", "anna")
    assert "0 accepted, 3 repeated, 4 rejected" in second.stdout and f"{file}:4: contradictory: " in second.stderr
    file.write_text(lines[0] + "\n")
    assert score(run, "--import", str(file), "--by", "anna").returncode == 0
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        refused = score(run, "--import", str(path))
        assert refused.returncode == 2 and str(path) in refused.stderr, refused


@pytest.mark.slow
def test_a_server_and_commands_accept_scores_together_and_a_killed_server_loses_none(run: Path) -> None:
    """The workflow of docs/verifiers.md with real processes: a program over HTTP, a command, and SIGKILL between them."""

    def serve() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "agentrl", "score", str(run), "--serve", "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        assert "#" not in second, "the token is not written into a log"
        return process, first.split()[2].removesuffix("/scores,")

    process, url = serve()
    try:
        token = (run / "score.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        sent = {"episode_id": "g0-0", "part": "review", "value": 0.25, "scored_by": "bot", "key": "1"}
        assert httpx.post(f"{url}/scores", json=sent, headers=headers, timeout=60).json()["remaining"] == 1
        assert score(run, "g0-1", "review", "0.75").returncode == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process, url = serve()
        pending = httpx.get(f"{url}/pending", headers=headers, timeout=60).json()["pending"]
        assert [item["episode_id"] for item in pending] == ["g1-0"]
        assert httpx.post(f"{url}/scores", json=sent, headers=headers, timeout=60).json()["repeated"] is True
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        with opened_store(run) as store:
            assert [scored.score.value for scored in store.groups([0])[0].episodes] == [0.25, 0.75]
    finally:
        process.kill()
        process.wait()
