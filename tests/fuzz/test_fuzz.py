"""The fuzzer finds planted bugs, stores the inputs, and prints the command that replays them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.errors import UserError
from tests.fuzz import child
from tests.fuzz.__main__ import fuzz as fuzz_command
from tests.fuzz.run import Status, run

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "tests.fuzz.planted"


def fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)


def fuzzed(target: str, corpus: Path, *options: object) -> tuple[int, dict[str, Any], str]:
    completed = fuzz(f"{PLANTED}:{target}", "--corpus", corpus, "--json", *options)
    assert completed.stdout, completed.stderr
    return completed.returncode, json.loads(completed.stdout)[0], completed.stderr


@pytest.mark.slow
def test_a_planted_bug_is_found_stored_and_replayed(tmp_path: Path) -> None:
    code, result, _ = fuzzed("raising", tmp_path, "--inputs", 2_000_000)
    assert code == 1 and not result["ok"] and result["error"] == "KeyError: 'planted'"
    finding = Path(result["finding"])
    assert finding.parent == tmp_path / "findings" and finding.read_bytes() == b"bug"  # shrunk to the minimum
    assert "planted" in result["trace"] and 0 < result["inputs"] < 2_000_000

    replayed = fuzz(f"{PLANTED}:raising", "--replay", finding)
    assert replayed.returncode == 1 and "KeyError: 'planted'" in replayed.stdout
    finding.write_bytes(b"harmless")
    assert fuzz(f"{PLANTED}:raising", "--replay", finding).returncode == 0


@pytest.mark.slow
def test_a_sound_target_is_fed_all_inputs_and_leaves_nothing(tmp_path: Path) -> None:
    code, result, _ = fuzzed("sound", tmp_path, "--brief")  # 5000 of them
    assert code == 0 and result["ok"] and 5000 <= result["inputs"] < 10_000 and not result["finding"]
    assert list((tmp_path / "findings").iterdir()) == []
    completed = fuzz(f"{PLANTED}:sound", "--corpus", tmp_path, "--minutes", 0.03)
    assert completed.returncode == 0 and "ok" in completed.stdout and "inputs" in completed.stdout


@pytest.mark.slow
def test_superlinear_work_is_a_finding(tmp_path: Path) -> None:
    code, result, _ = fuzzed("slow", tmp_path, "--minutes", 1)
    assert code == 1 and result["error"].startswith("Slow: ")
    assert Path(result["finding"]).stat().st_size > 5000


@pytest.mark.parametrize(("pace", "is_slow"), [(0.01, True), (0.08, True), (0.12, True), (0.2, False)])
def test_a_slow_machine_does_not_cause_a_finding(monkeypatch: pytest.MonkeyPatch, pace: float, is_slow: bool) -> None:
    clock = itertools.count(0, 2)  # each input takes two seconds
    monkeypatch.setattr(child.time, "process_time", lambda: float(next(clock)))
    monkeypatch.setattr(child, "_fixed_work", lambda: pace)
    assert isinstance(child.attempt(lambda data: None, b"any"), child.Slow) == is_slow


@pytest.mark.slow
def test_an_input_that_never_ends_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (status,) = run([f"{PLANTED}:endless"], inputs=0, seconds=60, jobs=1, folder=tmp_path, report=lambda status: None, hang_s=2)
    assert not status.ok and "timeout" in status.error
    assert Path(status.finding).read_bytes().startswith(b"!")


@pytest.mark.slow
def test_ending_the_process_is_a_finding(tmp_path: Path) -> None:
    code, result, _ = fuzzed("ending", tmp_path, "--inputs", 100)
    assert code == 1 and result["error"] == "SystemExit: 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "no fuzz target 'nothing'"),
        ((f"{PLANTED}:raises",), "not a fuzz target"),
        (("frames", "--minutes", "1", "--inputs", "1"), "exclude each other"),
        (("frames", "--brief", "--inputs", "1"), "exclude each other"),
        (("--replay", "x"), "--replay feeds one target"),
        (("frames", "--replay", "missing"), "cannot be read"),
    ],
)
def test_invalid_usage_raises(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    app = typer.Typer()
    app.command()(fuzz_command)
    with pytest.raises(UserError, match=message) as raised:
        app(args=["--corpus", str(tmp_path), *arguments], standalone_mode=False)
    assert raised.value.fix


def test_a_missing_atheris_raises_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    with pytest.raises(UserError, match="atheris") as raised:
        run(["frames"], inputs=1, seconds=0, jobs=1, folder=tmp_path, report=lambda status: None)
    assert "pip install atheris" in raised.value.fix


def test_a_finding_is_shrunk_to_an_input_with_the_same_error() -> None:
    def check(data: bytes) -> None:
        if b"x" in data and len(data) < 3:
            raise ValueError("another one")
        if b"abc" in data:
            raise KeyError("this one")

    error = child.attempt(check, b"0123456789abc0123456789")
    assert isinstance(error, KeyError)
    small, same = child.shrunk(check, b"0123456789abc0123456789", error)
    assert small == b"abc" and isinstance(same, KeyError)


def test_inputs_per_second_without_inputs_are_0() -> None:
    assert Status(target="a").inputs_per_s == 0.0 and Status(target="a", inputs=10, seconds=2.0).inputs_per_s == 5.0
