"""Restarts the driver of a run, which resumes it: `agentrl train --restarts N`.

The driver has no state that is not in the run folder, so a killed driver loses no finished work. Its parts end with it.
"""

from __future__ import annotations

import os
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
"""Before the first, second, ... restart in a row: a cluster that is lost may come back."""


def supervise(command: Sequence[str], folder: Path, *, restarts: int) -> int:
    """Runs a driver and returns its exit code. If it is killed or fails, it is started again with --resume, except after SIGTERM.

    Args:
        command: `agentrl train ... --run-dir FOLDER`, as arguments.
        folder: the run folder.
        restarts: number of restarts in a row. Work of ten minutes starts the count again.
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
    """Whether a driver was killed, or failed for a reason that may not be there next time. An interrupt ends the run, and so does wrong
    input, unless an earlier driver took it: then a cluster, a disk or a service is gone.
    """
    if not holds_run(folder) or code not in (1, 2):
        return code < 0 and holds_run(folder)
    sessions = read_sessions(folder)
    return bool(sessions) and sessions[-1].ended not in ("finished", "interrupted") and (code == 1 or resumed)


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """Runs a driver. Returns its exit code, and whether this process received SIGTERM."""
    parent = os.getpid()
    process = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(parent))
    with _forwarding(process) as forwarded:
        return process.wait(), bool(forwarded)


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Leaves signals to the driver. A terminal sends ctrl-C to both processes; SIGTERM is forwarded. Yields the forwarded signals."""
    forwarded: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.append(number)
        with suppress(ProcessLookupError):
            process.send_signal(number)

    handlers = {signal.SIGINT: lambda *_: None, signal.SIGHUP: lambda *_: None, signal.SIGTERM: forward}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
