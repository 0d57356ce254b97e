"""Restarts the driver of a run, which resumes it: `agentrl train --restarts N`.

All of the driver's state is in the run folder, so a killed driver loses no finished work. The processes that the driver started exit with
it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from agentrl.base.liveness import Restarts
from agentrl.base.processes import die_with_parent
from agentrl.observe.summary import read_sessions
from agentrl.session.folder import holds_run

_PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)
"""Seconds to wait before the first, second, ... consecutive restart, because a lost cluster may come back."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP)


def supervise(command: Sequence[str], folder: Path, *, restarts: int) -> int:
    """Runs a driver and returns its exit code (128 + N for signal N). Restarts the driver with --resume if it is killed or fails after the
    run folder was written, unless this process received a signal to exit.

    Args:
        command: `agentrl train ... --run-dir FOLDER`, as arguments.
        folder: the run folder.
        restarts: maximum number of consecutive restarts. The count returns to 0 when a driver has worked for ten minutes.
    """
    counted, resume = Restarts(), "--resume" in command
    while True:
        code, terminated = _run([*command, *(["--resume"] if holds_run(folder) and not resume else [])])
        counted.progress()
        if terminated or not _may_resume(code, folder, resumed=counted.total > 0) or (failures := counted.failed()) > restarts:
            return code if code >= 0 else 128 - code
        how = f"was killed by signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        print(f"the driver {how}; restart {failures} of at most {restarts} in a row", file=sys.stderr, flush=True)
        time.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])
        counted.started()


def _may_resume(code: int, folder: Path, *, resumed: bool) -> bool:
    """Whether a driver was killed, or failed for a reason that may not exist at the next start. Returns False for an interrupt, and
    if the folder contains no run. Also returns False for invalid input, unless an earlier driver accepted the same input: then a cluster, a
    disk or a service is unavailable.
    """
    if not holds_run(folder) or code not in (1, 2):
        return code < 0 and holds_run(folder)
    sessions = read_sessions(folder)
    return bool(sessions) and sessions[-1].ended not in ("finished", "interrupted") and (code == 1 or resumed)


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """Runs a driver. Returns the driver's exit code, and whether this process received one of the signals in `_ENDING`.

    The driver has its own process group, so that a terminal and `kill` reach only this process, which forwards each signal once.
    """
    parent, held = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)

    def prepare() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # so that `stty tostop` does not stop it
        signal.pthread_sigmask(signal.SIG_SETMASK, held)

    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=prepare)
        with _forwarding(process) as forwarded:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            return _wait(process), not forwarded.isdisjoint(_ENDING)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for the process to exit and returns its exit code. Signal handlers run within a second, even for a signal that arrives just
    before a system call and so does not interrupt it.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        ending = select.poll()
        ending.register(descriptor, select.POLLIN)
        while not ending.poll(1000):
            pass
    finally:
        os.close(descriptor)
    return process.wait()


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Forwards signals to the driver, and stops and continues together with it after ctrl-Z and `fg` in a shell. Yields the set of
    forwarded signals."""
    forwarded: set[int] = set()

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.add(number)
        with suppress(ProcessLookupError):
            process.send_signal(number)

    def stop(number: int, frame: FrameType | None) -> None:
        forward(signal.SIGTSTP, frame)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when this process is continued
        signal.signal(signal.SIGTSTP, stop)
        forward(signal.SIGCONT, frame)

    before = {number: signal.signal(number, stop if number == signal.SIGTSTP else forward) for number in _FORWARDED}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
