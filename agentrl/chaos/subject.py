"""The run under test: a real `agentrl train` in a separate process. The run is observed through its run folder, its output and `/proc`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl.base.files import read_json_lines
from agentrl.base.processes import die_with_parent, process_tree, read_stat
from agentrl.errors import StoreError
from agentrl.experience import SqliteStore
from agentrl.plugins.references import content_root
from agentrl.records import LedgerEntry, PolicyVersion, VersionState
from agentrl.version import FolderRegistry

PER_STEP, STALENESS = 4, 1
SMALL = (
    *(f"rollout.groups_per_step={PER_STEP}", f"max_staleness={STALENESS}", "rollout.group.size=8", "rollout.concurrency=32"),
    "learner.keep_versions=8",
    *("learner.keep_checkpoints=3", "evaluation.heldout=16", "evaluation.heldout_real=0"),
    'tasks.verifiers=["agentrl.chaos.verifier:unreliable"]',
)
"""Overrides for the quickstart's recipe. A step has four groups of eight attempts and takes seconds."""
SERVER, RANK, LAUNCHER = "agentrl.serving.launch", "agentrl.learner.main", "agentrl.learner.launch"
MARK = "AGENTRL_CHAOS"
"""Environment variable of every process of a run under test. It identifies the processes that outlive the run."""
MOMENT_S = 900.0
"""Maximum number of seconds to wait for an event or a recovery."""
_POLL_S = 0.05


class ChaosError(Exception):
    """Raised if a fault cannot be injected, or if the run does not survive it."""


class Subject:
    """One run under test, across all of its starts."""

    def __init__(self, run_dir: Path, *, steps: int, backend: str, log: Path, overrides: Sequence[str] = SMALL) -> None:
        """`log`: the file for the output of all starts. `overrides`: changes to the quickstart's recipe.

        Raises `UserError` if this installation lacks the quickstart.
        """
        self.run_dir, self.steps = run_dir, steps
        self.root = content_root()
        """The project folder, in which the command is started."""
        self.log_path = log
        self._options = (*overrides, "--run-dir", str(run_dir), "--sandbox", backend)
        self.mark = uuid.uuid4().hex
        self.resumes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._store: SqliteStore | None = None
        self._output_start = 0

    @property
    def command(self) -> tuple[str, ...]:
        """The command of the first start."""
        return (sys.executable, "-m", "agentrl", "train", "recipes/quickstart.py", f"steps={self.steps}", *self._options)

    def extend(self, steps: int) -> None:
        """Adds steps to a run that has finished, for its next start."""
        self.steps += steps

    def start(self) -> None:
        """Starts the command, with --resume if the folder contains a run."""
        resume = (self.run_dir / "recipe.json").exists()
        self.resumes += resume
        with self.log_path.open("ab") as log:
            self._output_start = log.tell()
            self._process = self.spawn((*self.command, *(["--resume"] if resume else [])), log.fileno())

    def spawn(self, command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        """Starts a command in the project folder with the environment variable that marks this run's processes, and with the default
        handlers for ctrl-C and a closed terminal.

        The command is killed when this process exits.
        """
        parent = os.getpid()

        def prepare() -> None:
            for number in (signal.SIGINT, signal.SIGHUP):  # shells and nohup may have made this process ignore them
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(parent)

        return subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )

    @property
    def pid(self) -> int:
        """The process id of the driver."""
        assert self._process is not None, "call start() first"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the newest start; None while the run is active."""
        return None if self._process is None else self._process.poll()

    def output(self, start: int | None = None) -> str:
        """Returns the output of the newest start, or everything after byte `start` of the log."""
        with self.log_path.open("rb") as log:
            log.seek(self._output_start if start is None else start)
            return " ".join(log.read().decode(errors="replace").split())

    def output_size(self) -> int:
        """Returns the number of bytes of output so far, which can be passed to `output`."""
        return self.log_path.stat().st_size

    def wait_for(self, condition: Callable[[], object], what: str, *, timeout_s: float = MOMENT_S, poll_s: float = _POLL_S) -> float:
        """Waits until `condition` holds and returns the seconds waited. Raises `ChaosError` if the run exits first, or after
        `timeout_s`."""
        began = time.monotonic()
        while not condition():
            if self.exit_code is not None:
                raise ChaosError(f"the run ended with exit code {self.exit_code} while the suite waited for {what}: {self.last_output()}")
            if time.monotonic() - began > timeout_s:
                raise ChaosError(f"timed out after {timeout_s:.0f} s while the suite waited for {what}: {self.last_output()}")
            time.sleep(poll_s)
        return time.monotonic() - began

    def wait_for_end(self, *, timeout_s: float = MOMENT_S) -> int:
        """Waits until the newest start has exited and returns its exit code. Raises `ChaosError` after `timeout_s`."""
        assert self._process is not None, "call start() first"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"the run did not end within {timeout_s:.0f} s: {self.last_output()}") from None

    def last_output(self) -> str:
        """Returns the last part of the output, for an error message."""
        return f"... {self.output()[-1500:]} (full output: {self.log_path})"

    def processes(self, module: str) -> list[int]:
        """Returns the ids of the processes below the driver that run a Python module, the newest last.

        A forked child that has not yet started its program has the command line of its parent. Such a child does not count.
        """
        words = {pid: command_line(pid).split() for pid in process_tree(self.pid)}
        forked = {pid for pid in words if words[pid] == words.get(read_stat(pid).parent)}
        return [pid for pid in words if pid not in forked and module in words[pid] and (module == LAUNCHER or LAUNCHER not in words[pid])]

    def sandboxes(self) -> set[int]:
        """Returns the ids of the bubblewrap processes of open sandboxes."""
        return {pid for pid in process_tree(self.pid) if command_line(pid).startswith("bwrap ")}

    @property
    def store(self) -> SqliteStore:
        """The run's ledger."""
        if self._store is None:
            self._store = SqliteStore(self.run_dir / "experience.sqlite")
        return self._store

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Returns the ledger's entries; empty before the first group is stored, and while the ledger cannot be read."""
        if not (self.run_dir / "experience.sqlite").exists():
            return ()
        with contextlib.suppress(StoreError):  # another process is creating the ledger, or the disk is full
            return self.store.entries()
        return ()

    def steps_done(self) -> int:
        """Returns the number of learner steps that the ledger records as completed."""
        return len({entry.step for entry in self.entries() if entry.use is not None})

    def wait_for_step(self) -> None:
        """Waits until the learner has completed another step and both the learner and the server are running, so that the next case starts
        with a recovered run."""
        steps = self.steps_done()
        self.wait_for(lambda: self.steps_done() > steps and self.processes(RANK) and self.processes(SERVER), "another step")

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines in metrics.jsonl that describe steps."""
        return [line for line in read_json_lines(self.run_dir / "metrics.jsonl") if "episodes" in line]

    def version(self, *states: VersionState) -> PolicyVersion | None:
        """Returns the newest policy version that is in one of the given states; None if there is none."""
        registry = FolderRegistry(self.run_dir / "versions")
        try:
            return registry.latest(*states)
        finally:
            registry.close()

    def served(self) -> int:
        """Returns the number of the version that is being served; -1 if there is none yet."""
        version = self.version(VersionState.SERVING, VersionState.PROMOTED)
        return -1 if version is None else version.number

    def resume_command(self) -> list[str]:
        """Returns the command, printed by the newest start, that continues the run. Raises `ChaosError` if it printed none."""
        with self.log_path.open("rb") as log:
            log.seek(self._output_start)
            text = log.read().decode(errors="replace")
        _, separator, rest = text.rpartition("continue with: ")
        if not separator:
            raise ChaosError(f"the run ended without printing a command that resumes it: {self.last_output()}")
        return shlex.split(rest.splitlines()[0])

    def left(self) -> dict[int, str]:
        """Returns the command lines, by process id, of the processes whose environment marks them as part of this run."""
        wanted = f"{MARK}={self.mark}".encode()
        marked: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):  # the process is exiting, or belongs to another user
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        marked[int(entry.name)] = command_line(int(entry.name))
        return marked

    def close(self) -> None:
        """Kills the driver. The run's other processes are killed when the driver dies. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._store is not None:
            self._store.close()
            self._store = None


def command_line(pid: int) -> str:
    """Returns the command line of a process; empty if the process has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to processes, some of which may have exited."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ended(pid: int) -> bool:
    """Whether a process has exited. A zombie counts as exited."""
    return process_tree(pid).get(pid, "Z") in "ZX"
