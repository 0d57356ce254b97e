from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.concurrency=16",
    "evaluation.heldout=12",
    "evaluation.heldout_real=6",
    "sandbox.warm=2",
]


def start(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts the command line with ctrl-C at its default: a shell that runs the tests in the background hands it down ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def agentrl(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None, timeout: float = 900) -> tuple[int, str]:
    process = start(*arguments, cwd=cwd, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"agentrl {' '.join(arguments)} did not end within {timeout} s:\n{output}")
    return process.returncode, output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float) -> None:
    """Waits until a run has come as far as `condition`; fails with its output when it ends or takes too long."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"the run did not come this far (exit code {process.returncode}):\n{output[-4000:]}")
        time.sleep(0.1)


def descendants(process: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    """Processes below `process` that run a Python module, oldest first."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone, or a zombie: programs of sandboxes come and go
            found += [child] if module in " ".join(child.cmdline()) else []
    return found


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def steps_logged(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "episodes" in line]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, shared-memory file or container outlives the test."""
    shm, processes, containers = _shm(), _ours(), _containers()
    yield
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (_ours() - processes or _shm() - shm or _containers() - containers):
        time.sleep(0.2)
    left = {pid: line for pid, line in _command_lines().items() if pid in _ours() - processes}
    assert not left, left
    assert _shm() - shm == set()
    assert _containers() - containers == set()


def _command_lines() -> dict[int, str]:
    """Of every process that is no zombie."""
    found = psutil.process_iter(["cmdline", "status"])  # without those that end meanwhile
    return {one.pid: " ".join(one.info["cmdline"] or ()) for one in found if one.info["status"] != psutil.STATUS_ZOMBIE}


def _ours() -> set[int]:
    marks = ("agentrl", "vllm", "bwrap", "torch.distributed")
    found = {pid for pid, line in _command_lines().items() if any(mark in line for mark in marks) and "pytest" not in line}
    return found - {os.getpid()}


def _shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _containers() -> set[str]:
    listed = subprocess.run(["docker", "ps", "-aq", "--filter", "label=agentrl.run"], capture_output=True, text=True, check=False)
    return set(listed.stdout.split())


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
