"""Monitors the process of a side: its memory including descendants, its run time, and its complete termination."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from agentrl.base.processes import die_with_parent

SAMPLE_S = 2.0
GRACE_S = 240.0  # for a run to finish its step, after the first signal
TERM_S = 20.0


class Watched:
    """A running command. `peak_bytes`: the largest sum of the proportional set sizes of its processes, sampled every `SAMPLE_S`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.peak_bytes = 0
        self.began = time.monotonic()
        self._family: dict[int, psutil.Process] = {}  # all descendants seen so far, including those whose parent has died
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def ended(self) -> bool:
        return self.process.poll() is not None

    def finish(self, grace_s: float = GRACE_S) -> None:
        """Interrupts the command as ctrl-C does, then kills it. No process of it remains."""
        for number, seconds in ((signal.SIGINT, grace_s), (signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
            if self.ended():
                break
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.clean()

    def clean(self) -> None:
        """Kills the remaining descendants and stops sampling."""
        self._over.set()
        self._sampler.join()
        self._look()
        remaining = [member for member in self._family.values() if member.is_running()]
        for member in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(remaining, timeout=TERM_S)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._look()
            self.peak_bytes = max(self.peak_bytes, sum(_pss(member) for member in self._family.values()))

    def _look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for member in (root, *root.children(recursive=True)):
                self._family.setdefault(member.pid, member)


@contextlib.contextmanager
def running(command: Sequence[str], *, log: Path, root: Path, stdin: Any = subprocess.DEVNULL) -> Iterator[Watched]:
    """Runs a command in a separate process group until the block ends. The kernel kills it if this process dies.

    If memory runs out, the kernel kills it before any other process.
    """
    parent = os.getpid()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _prepare_child(parent),
        )
    watched = Watched(process)
    try:
        yield watched
    except BaseException:
        watched.finish(grace_s=1.0)
        raise
    watched.finish()


def _prepare_child(parent: int) -> None:
    """Runs in the new process before the command."""
    die_with_parent(parent)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Progress:
    """Shows the progress of a run in one line of the terminal, or prints a line every minute if there is no terminal."""

    def __init__(self, name: str, minutes: float) -> None:
        self._name = name
        self._limit_s = minutes * 60
        self._printed_at_s = -60.0

    def show(self, elapsed_s: float, what: str) -> None:
        remaining_s = max(0.0, self._limit_s - elapsed_s)
        line = f"{self._name}: {elapsed_s / 60:.1f} min, at most {remaining_s / 60:.0f} more; {what}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif elapsed_s - self._printed_at_s >= 60.0:
            self._printed_at_s = elapsed_s
            print(line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}{self._name}: {line}", file=sys.stderr, flush=True)


def poll(watched: Watched, every_s: float, step: Callable[[], bool]) -> None:
    """Calls `step` until it returns True or the command has ended."""
    while not step():
        if watched.ended():
            step()
            return
        time.sleep(every_s)


def _pss(member: psutil.Process) -> int:
    try:
        return int(member.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
