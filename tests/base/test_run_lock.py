"""A run folder has one driver at a time. Tested with real processes and the kernel's lock."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.base import run_lock
from agentrl.base.run_lock import DRIVER, PARTS, drive_folder, hold_shared_lock
from agentrl.errors import RunFolderBusy, UserError
from agentrl.session.folder import claim_run_folder

HOLD = """
import sys, time
from pathlib import Path
from agentrl.base.run_lock import drive_folder
with drive_folder(Path(sys.argv[1]), command="agentrl train mine.py"):
    print("holds it", flush=True)
    time.sleep(600)
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = python(HOLD, tmp_path / "run")
    assert line(process) == "holds it"
    yield process
    process.kill()
    process.communicate()


def test_the_error_names_the_holder_and_killing_it_frees_the_folder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunFolderBusy) as error, drive_folder(run, command="mine"):
        pytest.fail("two hold it")
    message = str(error.value)
    assert f"process {holder.pid} on {socket.gethostname()}" in message and "agentrl train mine.py" in message
    assert re.search(r"since \d{4}-\d\d-\d\dT\d\d:\d\d", message) and f"kill -INT {holder.pid}" in error.value.fix
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    started = time.monotonic()
    with drive_folder(run, command="mine"):
        assert time.monotonic() - started < 20.0
        assert json.loads((run / DRIVER).read_text())["pid"] == os.getpid()


def test_no_child_inherits_the_lock(tmp_path: Path) -> None:
    with drive_folder(tmp_path / "run", command="mine"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with drive_folder(tmp_path / "run", command="again"):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_one_of_four_simultaneous_drivers_gets_the_folder(tmp_path: Path) -> None:
    answers = race_for_folder(tmp_path, tmp_path / "run")
    assert sorted(answer.startswith("refused") for answer in answers) == [False, True, True, True], answers
    assert all("is in use by another agentrl: process" in answer for answer in answers if answer.startswith("refused"))


@pytest.mark.slow
def test_four_simultaneous_drivers_without_a_folder_get_one_each(tmp_path: Path) -> None:
    assert sorted(Path(answer).name for answer in race_for_folder(tmp_path)) == ["q", "q-2", "q-3", "q-4"]


def race_for_folder(runs: Path, requested: Path | None = None) -> list[str]:
    """Returns the folders or errors of four forks that start at once. Each keeps its folder until all have tried, then uses it."""
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(4), context.SimpleQueue()

    def race() -> None:
        barrier.wait(60)
        try:
            with claim_run_folder(requested, runs, "q", resume=False, command="race") as folder:
                barrier.wait(60)
                (folder / "recipe.json").write_text("{}")
                answers.put(str(folder))
        except RunFolderBusy as error:
            barrier.wait(60)
            answers.put(f"refused: {error}")

    racers = [context.Process(target=race) for _ in range(4)]
    for racer in racers:
        racer.start()
    collected = [answers.get() for _ in racers]
    for racer in racers:
        racer.join()
    return collected


@pytest.mark.slow
def test_the_next_driver_waits_for_parts_of_the_previous_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learner dies with its driver, but not in the same instant: this one takes a second and a half."""
    part = hold_shared_lock(tmp_path)
    dying = subprocess.Popen(["sleep", "1.5"], pass_fds=(part,))
    os.close(part)
    with drive_folder(tmp_path, command="mine"):
        assert dying.poll() is not None or not Path(f"/proc/{dying.pid}").exists()
    assert "waiting until the servers and the learner of the previous run exit" in capsys.readouterr().err
    dying.wait()


def test_the_error_names_a_part_that_does_not_end(tmp_path: Path) -> None:
    part = hold_shared_lock(tmp_path)
    stuck = subprocess.Popen(["sleep", "600"], pass_fds=(part,))
    os.close(part)
    try:
        with (
            pytest.raises(UserError, match=rf"are still running after 0\.1 s \(processes {stuck.pid}\)"),
            drive_folder(tmp_path, command="", wait_s=0.1),
        ):
            pytest.fail("a part is still there")
    finally:
        stuck.kill()
        stuck.wait()
    with drive_folder(tmp_path, command="mine"):
        pass


def test_a_failed_start_leaves_no_folder_and_a_used_folder_stays(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with pytest.raises(KeyError), drive_folder(run, command="mine"):
        raise KeyError
    assert not run.exists()
    with drive_folder(run, command="mine"):
        (run / "recipe.json").write_text("{}")
    assert (run / "recipe.json").exists()


def test_a_folder_removed_between_opening_and_locking_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous driver removed it at that moment. A lock on a deleted file would not exclude other drivers."""
    run, flock, handles = tmp_path / "run", run_lock.fcntl.flock, []

    def removed_first(handle: int, operation: int) -> None:
        if not handles:
            (run / DRIVER).unlink()
            run.rmdir()
        handles.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(run_lock.fcntl, "flock", removed_first)
    with drive_folder(run, command="mine"):
        assert json.loads((run / DRIVER).read_text())["command"] == "mine" and len(handles) == 2


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used as a run folder"), drive_folder(tmp_path / "file" / "run", command="mine"):
        pass


@pytest.mark.parametrize(("folder", "why"), [("/proc/no-such-run", "No such file"), ("/tmp/\udcff", "not UTF-8")])
def test_a_folder_with_an_impossible_path_is_an_error(folder: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as error, drive_folder(Path(folder), command="mine"):
        pytest.fail("there is no such folder")
    assert str(error.value).isascii()


@pytest.mark.parametrize("kind", ["link", "link to nothing", "folder", "pipe"])
@pytest.mark.parametrize("name", [DRIVER, PARTS])
def test_a_lock_file_that_is_a_link_or_no_file_raises_and_nothing_is_overwritten(name: str, kind: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    lock = run / name
    {
        "link": lambda: lock.symlink_to(victim),
        "link to nothing": lambda: lock.symlink_to(tmp_path / "absent"),
        "folder": lock.mkdir,
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(UserError, match=rf"{name} is not a regular file") as error, drive_folder(run, command="mine", wait_s=0.1):
        pytest.fail("the folder is driven")
    assert f"remove {lock}" in error.value.fix
    if name == PARTS:
        with pytest.raises(UserError, match="is not a regular file"):
            hold_shared_lock(run)
    assert victim.read_text() == "mine" and not (tmp_path / "absent").exists()


def test_a_hard_link_in_place_of_a_lock_file_is_replaced_and_nothing_is_overwritten(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    for name in (DRIVER, PARTS):
        (run / name).hardlink_to(victim)
    with drive_folder(run, command="mine"):
        os.close(hold_shared_lock(run))
        assert victim.read_text() == "mine" and victim.stat().st_nlink == 1
        assert json.loads((run / DRIVER).read_text())["command"] == "mine"


def test_a_hard_linked_copy_of_a_run_folder_gets_a_separate_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    (run / "recipe.json").write_text("{}")
    os.close(hold_shared_lock(run))
    subprocess.run(["cp", "-al", run, copy], check=True)
    for folder in (run, copy):
        with pytest.raises(RunFolderBusy, match=f"process {holder.pid} "), drive_folder(folder, command="second"):
            pytest.fail("the lock file is shared with a running driver")
    os.close(hold_shared_lock(run))  # of a server that is restarted
    holder.kill()
    holder.wait()
    with drive_folder(run, command="first"), drive_folder(copy, command="second"):
        assert [json.loads((folder / DRIVER).read_text())["command"] for folder in (run, copy)] == ["first", "second"]
        with pytest.raises(RunFolderBusy, match="first"), drive_folder(run, command="third"):
            pytest.fail("two drivers hold the lock")
