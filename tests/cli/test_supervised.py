from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.processes import read_stat
from agentrl.cli import supervised
from agentrl.cli.supervised import supervise
from agentrl.observe.summary import SESSIONS_FILE
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# A driver that ends as the next entry of `ends` specifies: with a signal, an exit code, or an end of its session.
DRIVER = """
import json, os, pathlib, signal, sys, time
folder, here = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]) / "ends"
(folder / "starts").open("a").write(" ".join(sys.argv[2:]) + "\\n")
(folder / "pid").write_text(str(os.getpid()))
(folder / "recipe.json").write_text("{}")
first, *rest = json.loads(here.read_text())
here.write_text(json.dumps(rest))
sessions = (folder / "sessions.jsonl").open("a")
sessions.write(json.dumps({"began": str(time.time()), "step": 0}) + "\\n")
if first == "wait":
    sessions.close(); (folder / "waits").touch(); time.sleep(60)
if first == "kill":
    sessions.close(); os.kill(os.getpid(), signal.SIGKILL)
how, code = first
sessions.write(json.dumps({"ended": how, "why": ""}) + "\\n") if how else None
sessions.close()
sys.exit(code)
"""


def run(folder: Path, ends: list[object], restarts: int) -> tuple[int, list[str]]:
    """Returns the exit code and the arguments of each start."""
    (folder / "ends").write_text(json.dumps(ends))
    code = supervise([sys.executable, "-c", DRIVER, str(folder)], folder, restarts=restarts)
    return code, (folder / "starts").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "restarts", "code", "starts"),
    [
        ([["finished", 0]], 3, 0, 1),
        (["kill", ["failed", 1], ["finished", 0]], 3, 0, 3),
        ([["finished", 1]], 3, 1, 1),  # a result with problems
        ([["interrupted", 130]], 3, 130, 1),
        ([["failed", 2]], 3, 2, 1),  # wrong input
        (["kill", ["", 2], ["finished", 0]], 3, 0, 3),  # a cluster that was temporarily unavailable
        (["kill", "kill", "kill"], 2, 137, 3),
        ([["failed", 1], ["failed", 1]], 1, 1, 2),
    ],
)
def test_a_driver_is_resumed_if_it_is_killed_or_fails(
    ends: list[object], restarts: int, code: int, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "_PAUSES_S", (0.0,))
    assert run(tmp_path, ends, restarts) == (code, ["", *["--resume"] * (starts - 1)])
    assert (tmp_path / SESSIONS_FILE).exists()


# A driver that records each signal and exits at the second SIGINT.
RECORDING = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def note(number, frame):
    (folder / "signals").open("a").write(signal.Signals(number).name + "\\n")
    if (folder / "signals").read_text().count("SIGINT") == 2:
        os._exit(130)
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, note)
(folder / "recipe.json").write_text("{}")
(folder / "starts").open("a").write("\\n")
(folder / "pid").write_text(str(os.getpid()))
(folder / "waits").touch()
while True:
    time.sleep(1)
"""


@contextmanager
def supervised_driver(folder: Path, driver: str, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yields the process that supervises a driver, and the id of the driver."""
    code = f"import sys; from pathlib import Path; from agentrl.cli.supervised import supervise; folder = Path({str(folder)!r})\n"
    code += f"sys.exit(supervise([sys.executable, '-c', {driver!r}, str(folder)], folder, restarts=1))"
    ignored = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # if a shell runs the tests in the background
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **options)
    signal.signal(signal.SIGQUIT, ignored)
    try:
        wait_until(lambda: (folder / "waits").exists())
        yield parent, int((folder / "pid").read_text())
    finally:
        parent.kill()
        parent.wait()


def signals_of(folder: Path) -> list[str]:
    return (folder / "signals").read_text().split() if (folder / "signals").exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL])
def test_the_driver_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "ends").write_text(json.dumps(["wait", "wait"]))
    with supervised_driver(tmp_path, DRIVER, stderr=subprocess.DEVNULL) as (parent, pid):
        parent.send_signal(number)
        assert parent.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: read_stat(pid).has_ended)
        assert (tmp_path / "starts").read_text() == "\n", "it was started once"


def test_a_signal_that_interrupts_no_system_call_ends_the_driver(tmp_path: Path) -> None:
    """Such a signal arrives just before the wait or, as here, in another thread."""

    def terminate() -> None:
        wait_until(lambda: (tmp_path / "waits").exists())
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread, start = threading.Thread(target=terminate), time.monotonic()
    thread.start()
    assert run(tmp_path, ["wait"], restarts=0) == (143, [""])
    thread.join()
    assert time.monotonic() - start < 30


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["to the process", "to its group", "by the terminal"])
def test_the_driver_gets_each_signal_once(sent: str, tmp_path: Path) -> None:
    terminal, tty = os.openpty()

    def interrupt(parent: subprocess.Popen[bytes]) -> None:
        if sent == "by the terminal":
            os.write(terminal, b"\x03")
        else:
            (os.killpg if sent == "to its group" else os.kill)(parent.pid, signal.SIGINT)

    def lead() -> None:
        fcntl.ioctl(tty, termios.TIOCSCTTY, 0)

    with supervised_driver(tmp_path, RECORDING, stdin=tty, start_new_session=True, preexec_fn=lead) as (parent, _):
        parent.send_signal(signal.SIGHUP)
        wait_until(lambda: signals_of(tmp_path) == ["SIGHUP"])
        interrupt(parent)
        wait_until(lambda: len(signals_of(tmp_path)) > 1)
        time.sleep(0.5)  # time for an extra signal
        assert signals_of(tmp_path) == ["SIGHUP", "SIGINT"]
        interrupt(parent)
        assert parent.wait(60) == 130
    assert signals_of(tmp_path) == ["SIGHUP", "SIGINT", "SIGINT"] and (tmp_path / "starts").read_text() == "\n"
    for end in (terminal, tty):
        os.close(end)


@pytest.mark.slow
def test_a_suspended_run_stops_and_continues_with_its_driver(tmp_path: Path) -> None:
    with supervised_driver(tmp_path, RECORDING, process_group=0) as (parent, pid):  # a stop of an orphaned group is ignored
        parent.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(read_stat(process).state == "T" for process in (parent.pid, pid)))
        parent.send_signal(signal.SIGCONT)
        wait_until(lambda: all(read_stat(process).state != "T" for process in (parent.pid, pid)))
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 128 + signal.SIGTERM
