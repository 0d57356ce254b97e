from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.sandbox import list_open
from agentrl.sandbox.lease import alive

from . import forked as forking

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "rollout.groups_per_step=4",
    "rollout.group.size=4",
    "rollout.concurrency=16",
    "evaluation.heldout=4",
    "evaluation.heldout_real=2",
]


def start(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None, by: Sequence[str] = ("agentrl",)) -> subprocess.Popen[str]:
    """Starts the command line with the default ctrl-C handler, because a shell may run the tests with it ignored.

    `by`: the module to run and its first arguments; see also the fixture `forked`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *by, *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def agentrl(
    *arguments: str,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: float = 900,
    by: Sequence[str] = ("agentrl",),
) -> tuple[int, str]:
    process = start(*arguments, cwd=cwd, env=env, by=by)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"agentrl {' '.join(arguments)} did not end within {timeout} s:\n{output}")
    return process.returncode, output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float) -> None:
    """Waits until `condition` is true for a run. Fails with its output if the run ends or takes too long."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"the run ended or took too long (exit code {process.returncode}):\n{output[-4000:]}")
        time.sleep(0.1)


def descendants(process: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    """Processes below `process` that run a Python module, oldest first."""
    matches = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended or a zombie, such as programs of sandboxes
            matches += [child] if module in " ".join(child.cmdline()) else []
    return matches


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def steps_logged(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "episodes" in line]


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    with forking.hosting(tmp_path_factory.mktemp("hosts")) as addresses:
        yield addresses


@pytest.fixture
def forked(hosts: tuple[Path, Path]) -> Iterator[tuple[str, ...]]:
    """For `by` of tests that do not test how server and learner start; none of them outlives the test."""
    yield ("tests.e2e.forked", *map(str, hosts))
    deadline = time.monotonic() + 120
    while (live := [child for host in hosts for child in psutil.Process(int(host.stem)).children()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not live


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process, shared-memory file or sandbox. Other programs of the machine do not matter.

    Processes are identified by an inherited environment variable. Sandboxes, whose processes inherit nothing, are identified by a dead
    driver.
    """
    mark = f"AGENTRL_TEST={uuid.uuid4()}"
    shm, orphans = _shm(), _orphans()
    monkeypatch.setenv(*mark.split("="))
    yield
    deadline = time.monotonic() + 120
    while (remaining := (_marked(mark), _orphans() - orphans, _shm() - shm)) != ({}, set(), set()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert remaining == ({}, set(), set())


def _marked(mark: str) -> dict[int, str]:
    """Command lines of the processes with `mark` in their environment; zombies have none."""
    command_lines = {}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it is ending
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                command_lines[process.pid] = " ".join(process.cmdline())
    return command_lines


def _orphans() -> set[str]:
    """Sandboxes (folder, container or process) whose driver is dead."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    leases = {match for line in lines if "bwrap" in line for match in re.findall(r"agentrl-([0-9a-f]{9}-\d+-\d+)-\d+", line)}
    return {sandbox.name for sandbox in list_open() if sandbox.driver_alive is False} | {lease for lease in leases if alive(lease) is False}


def _shm() -> set[str]:
    """Returns the files in /dev/shm that no process has mapped or open. Others belong to tests and fuzzers that run at the same time."""
    files = {str(path) for path in Path("/dev/shm").iterdir()}
    for process in Path("/proc").glob("[0-9]*") if files else ():
        with contextlib.suppress(OSError):  # it has ended
            files -= {os.readlink(link) for link in (process / "fd").iterdir()}
            maps = (process / "maps").read_text()
            files -= {path for path in files if path in maps}
    return files
