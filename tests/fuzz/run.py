"""Runs targets, each in its own process, a few at a time, and collects their reports."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UserError
from tests.fuzz.catalog import find
from tests.fuzz.child import HANG_S, MARK, Job, attempt, command

GRACE_S = 300.0
"""Extra seconds of a process, for its start, its last input, and shrinking a finding."""
MEMORY = Path("/dev/shm")
_COVERAGE = re.compile(r"\bcov: (\d+)")
_EXECUTED = re.compile(r"stat::number_of_executed_units: +(\d+)")
_FILE = re.compile(r"Test unit written to (.+)$")


@dataclass(slots=True, kw_only=True)
class Status:
    """The progress of one target, and its result once it has ended."""

    target: str
    inputs: int = 0
    most: int = 0  # inputs to feed; 0: no limit
    seconds: float = 0.0
    coverage: int = 0  # branches reached, as libFuzzer counts them
    finding: str = ""  # file with the input
    error: str = ""  # the error it provoked, or why the target could not run
    trace: str = ""
    ended: bool = False

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def inputs_per_s(self) -> float:
        return self.inputs / self.seconds if self.seconds else 0.0


Report = Callable[[Status], None]


def check_engine() -> None:
    """Raises `UserError` when atheris is not installed."""
    if importlib.util.find_spec("atheris") is None:
        fix = "pip install atheris, or `make setup`; `python -m tests.fuzz TARGET --replay FILE` works without it"
        raise UserError("fuzzing needs atheris, which is not installed", fix=fix)


def run(
    targets: Sequence[str],
    *,
    inputs: int | None,
    seconds: int,
    jobs: int,
    folder: Path,
    report: Report,
    hang_s: int = HANG_S,
    seed: int = 0,
) -> list[Status]:
    """Feeds every target `inputs` inputs or for `seconds` seconds (0: no limit), `jobs` at a time; a finding ends a target.

    If `inputs` is None, each target is fed `Target.brief` inputs.

    `folder` keeps inputs that reached new code (`corpus/TARGET`) and findings (`findings`) for the next run. `report` is called from
    other threads. With a `seed` and an empty `folder`, the same code gets the same inputs in the same order, as far as time allows; with
    0 they differ each time. Raises `UserError` for an unknown target, before any is run.
    """
    check_engine()
    for name in targets:
        find(name)
    running = _Running(inputs=inputs, seconds=seconds, hang_s=hang_s, seed=seed)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(running.feed, name, folder, report) for name in targets]
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            running.stop()
            raise


def replay(name: str, data: bytes) -> BaseException | None:
    """Feeds one input to a target in this process; returns the exception, or None if every guarantee holds."""
    target = find(name)
    with tempfile.TemporaryDirectory(prefix="agentrl-fuzz-") as scratch:
        return attempt(target.prepare(Path(scratch)), data)


class _Running:
    """The running processes, which can be stopped."""

    def __init__(self, *, inputs: int | None, seconds: int, hang_s: int, seed: int) -> None:
        self._inputs, self._seconds, self._hang_s, self._seed = inputs, seconds, hang_s, seed
        self._processes: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                _kill(process)

    def feed(self, name: str, folder: Path, report: Report) -> Status:
        target = find(name)
        status = Status(target=name, most=target.brief if self._inputs is None else self._inputs)
        corpus, findings = folder.resolve() / "corpus" / target.name, folder.resolve() / "findings"
        for path in (corpus, findings):
            path.mkdir(parents=True, exist_ok=True)
        parent = MEMORY if os.access(MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="agentrl-fuzz-", dir=parent) as parent_folder:
            scratch = Path(parent_folder) / "scratch"
            scratch.mkdir()
            job = Job(
                target=name,
                inputs=status.most,
                seconds=self._seconds,
                corpus=str(corpus),
                findings=str(findings),
                scratch=str(scratch),
                hang_s=self._hang_s,
                seed=self._seed,
            )
            with self._started(job) as process:
                _follow(process, status, report, deadline_s=self._seconds + GRACE_S if self._seconds else None)
        if not self._stopped:
            status.ended = True
            report(status)
        return status

    @contextlib.contextmanager
    def _started(self, job: Job) -> Iterator[subprocess.Popen[str]]:
        with self._lock:
            if self._stopped:
                raise RuntimeError("stopped")
            process = subprocess.Popen(
                command(job), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
                start_new_session=True, env={**os.environ, "PYTHONHASHSEED": str(job.seed) if job.seed else "random"},
            )  # fmt: skip
            self._processes.add(process)
        try:
            yield process
        finally:
            _kill(process)
            process.wait()
            with self._lock:
                self._processes.discard(process)


def _follow(process: subprocess.Popen[str], status: Status, report: Report, *, deadline_s: float | None) -> None:
    """Reads a process's reports until it ends."""
    started = time.monotonic()
    timer = threading.Timer(deadline_s, _kill, [process]) if deadline_s is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    tail: deque[str] = deque(maxlen=30)
    assert process.stderr is not None
    for line in process.stderr:
        if not line.startswith("INFO:"):
            tail.append(line.rstrip())
        before = status.inputs, status.coverage
        _read_line(line, status)
        status.seconds = time.monotonic() - started
        if (status.inputs, status.coverage) != before:
            report(status)
    status.seconds = time.monotonic() - started
    if timer is not None:
        timer.cancel()
    code = process.wait()
    if code != 0 and not status.error:
        cause = next((line.partition("ERROR: ")[2] for line in tail if "ERROR: libFuzzer: " in line), f"ended with exit status {code}")
        status.error, status.trace = cause, "\n".join(tail)


def _read_line(line: str, status: Status) -> None:
    """Updates the status from one line of a process's stderr."""
    if line.startswith(MARK):
        report = json.loads(line.removeprefix(MARK))
        status.inputs = max(status.inputs, report["inputs"])
        status.finding, status.error, status.trace = report.get("finding", ""), report.get("error", ""), report.get("trace", "")
    elif match := _COVERAGE.search(line):
        status.coverage = int(match[1])
    elif match := _EXECUTED.search(line):
        status.inputs = max(status.inputs, int(match[1]))
    elif match := _FILE.search(line):
        status.finding = match[1].strip()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
