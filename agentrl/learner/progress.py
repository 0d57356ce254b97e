"""Progress reports from the learner to its driver, through a pipe on which neither side blocks.

Rank 0 reports for all ranks: it waits for the others in collectives, so one stuck rank stops its reports.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import weakref

from agentrl.base.liveness import Liveness

_LONGEST = 80  # characters of one kind of work
_READ_BYTES = 1 << 20  # more than the pipe holds


class ProgressReporter:
    """The learner's end: `pulse("computing a micro-batch", tokens)`. `address` is `ProgressPipe.address`; None disables reports."""

    def __init__(self, address: str | None = None) -> None:
        self._pipe: int | None = None
        if address is not None:
            with contextlib.suppress(OSError):  # the driver has ended, so this process ends soon
                self._pipe = os.open(address, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __call__(self, work: str, size: float = 1.0) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the pipe is full until the driver reads it; later reports follow
                os.write(self._pipe, f"{json.dumps([time.monotonic(), size, work[:_LONGEST]])}\n".encode())


SILENT = ProgressReporter()


class ProgressPipe:
    """The driver's end. `address` is valid in all processes of this machine while this object exists."""

    def __init__(self) -> None:
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for end in (self._read, write):
            weakref.finalize(self, os.close, end)
        self.address = f"/proc/{os.getpid()}/fd/{write}"
        self._rest = b""

    def discard(self) -> None:
        """Discards the reports of a learner that has ended."""
        self._lines()
        self._rest = b""

    def forward(self, liveness: Liveness) -> None:
        """Forwards the reports since the last call to `liveness`. Malformed lines are ignored."""
        for line in self._lines():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                at, size, work = json.loads(line)
                if isinstance(work, str) and math.isfinite(at) and math.isfinite(size):
                    liveness.progress(work[:_LONGEST], float(size), at=float(at))

    def _lines(self) -> list[bytes]:
        try:
            data = os.read(self._read, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
