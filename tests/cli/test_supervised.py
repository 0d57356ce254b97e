from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.base.processes import read_stat
from agentrl.cli import supervised
from agentrl.cli.supervised import supervise
from agentrl.observe.summary import SESSIONS_FILE
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# A driver that ends as the next entry of `ends` says: a signal, an exit code, or how its session ended.
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
    """The exit code, and the arguments of each start."""
    (folder / "ends").write_text(json.dumps(ends))
    code = supervise([sys.executable, "-c", DRIVER, str(folder)], folder, restarts=restarts)
    return code, (folder / "starts").read_text().splitlines()


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "starts"),
    [
        ([["finished", 0]], 3, 0, 1),
        (["kill", ["failed", 1], ["finished", 0]], 3, 0, 3),
        ([["finished", 1]], 3, 1, 1),  # a result with problems
        ([["interrupted", 130]], 3, 130, 1),
        ([["failed", 2]], 3, 2, 1),  # wrong input
        (["kill", ["", 2], ["finished", 0]], 3, 0, 3),  # a cluster that was gone for a while
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_driver_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "ends").write_text(json.dumps(["wait", "wait"]))
    code = f"import sys; from pathlib import Path; from agentrl.cli.supervised import supervise; folder = Path({str(tmp_path)!r})\n"
    code += f"sys.exit(supervise([sys.executable, '-c', {DRIVER!r}, str(folder)], folder, restarts=1))"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "waits").exists())
        pid = int((tmp_path / "pid").read_text())
        parent.send_signal(signal.SIGINT)  # a terminal sends it to the driver too
        parent.send_signal(number)
        assert parent.wait(60) == (128 + number if number == signal.SIGTERM else -number)
        wait_until(lambda: read_stat(pid).has_ended)
        assert (tmp_path / "starts").read_text() == "\n", "it was started once"
    finally:
        parent.kill()
        parent.wait()
