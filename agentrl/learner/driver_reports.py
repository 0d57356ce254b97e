"""Reports from the learner to its driver: progress through a pipe on which neither side blocks, and the exit reason through a file in
memory. The pipe and the file are on the learner's host (`agentrl.protocols.cluster`).

Rank 0 reports progress for all ranks. Rank 0 waits for the other ranks in collectives, so its reports stop if any rank is stuck. The exit
reason arrives even if the disk is full.

This module also reads and writes the log `failures/updates.jsonl` in the run folder (groups and optimizer steps excluded from training),
and converts disk errors in the learner to `DiskFull` or `LearnerError`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from agentrl.base.error_text import disk_full_error, one_line_error, raise_location
from agentrl.base.files import append_lines, complete_lines, write_atomically
from agentrl.base.liveness import Liveness
from agentrl.errors import AgentRLError, DiskFull, LearnerError, LearnerHalted, StoreError, UserError
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import codec

_LONGEST = 1 << 14  # maximum length of a line, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReason:
    """The error that made one process of the learner exit."""

    kind: Literal["user", "halted", "disk", "failed", "other"]
    message: str
    fix: str = ""

    @classmethod
    def from_error(cls, error: BaseException) -> ExitReason:
        """Returns the exit reason for an error."""
        if (full := disk_full_error(error)) is not None:
            return cls(kind="disk", message=str(error) if isinstance(error, AgentRLError) else one_line_error(full))
        if isinstance(error, LearnerHalted):
            return cls(kind="halted", message=str(error))
        if isinstance(error, UserError):
            return cls(kind="user", message=error.message, fix=error.fix)
        if isinstance(error, AgentRLError):
            return cls(kind="failed", message=str(error))
        at = raise_location(error)
        return cls(kind="other", message=one_line_error(error) + (f" ({at})" if at else ""))

    def to_error(self, log: Path) -> AgentRLError:
        """Returns the error to raise in the driver; `log` is the path of the learner's output."""
        if self.kind == "user":
            return UserError(self.message, fix=self.fix)
        if self.kind == "halted":
            return LearnerHalted(self.message)
        if self.kind == "disk":
            return DiskFull(f"the learner: {self.message}")
        message = self.message if self.kind == "failed" else f"the learner failed: {self.message}"
        return LearnerError(f"{message}\n  full output: {log}")


def best_reason(lines: bytes) -> ExitReason | None:
    """Returns the most informative reason in `lines`, or None if no line contains a reason. If one rank fails, the other ranks report only
    that it is missing."""
    reasons = list(_reasons(lines))
    for kinds in (("user", "halted", "disk"), ("failed",)):
        for reason in reasons:
            if reason.kind in kinds:
                return reason
    return next(iter(reasons), None)


def _reasons(lines: bytes) -> Iterator[ExitReason]:
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            yield ExitReason(**json.loads(line))


def send_exit_reason(address: str | None, reason: ExitReason) -> None:
    """Appends a reason to the file at `address` (`agentrl.protocols.cluster.REASONS`). Errors are ignored, because the log
    also contains the reason."""
    line = json.dumps(asdict(reason))
    if len(line) > _LONGEST:
        line = json.dumps(asdict(ExitReason(kind=reason.kind, message=reason.message[: _LONGEST // 8], fix=reason.fix[: _LONGEST // 8])))
    if address is not None:
        with contextlib.suppress(OSError):
            handle = os.open(address, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(handle, line.encode() + b"\n")
            finally:
                os.close(handle)


_WORK_CHARACTERS = 80
_ALERT_CHARACTERS = 400


class ProgressReporter:
    """Sends reports from the learner to the driver, for example `report("computing a micro-batch", tokens)`.

    `address` is the address of a pipe (`agentrl.protocols.cluster.PROGRESS`); None disables reports. A report is dropped if the pipe is
    full or the driver has exited.
    """

    def __init__(self, address: str | None = None) -> None:
        self._pipe: int | None = None
        if address is not None:
            with contextlib.suppress(OSError):  # the driver has exited, so this process exits soon
                self._pipe = os.open(address, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __call__(self, work: str, size: float = 1.0) -> None:
        self._send([time.monotonic(), size, work[:_WORK_CHARACTERS]])

    def alert(self, text: str) -> None:
        """Sends an alert to the run's user."""
        self._send(text[:_ALERT_CHARACTERS])

    def _send(self, value: object) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the pipe is full; reports resume after the driver has read from it
                os.write(self._pipe, f"{json.dumps(value)}\n".encode())


SILENT = ProgressReporter()


class ProgressLines:
    """Receives the reports of one learner in the driver. A line may arrive in several pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def forward(self, data: bytes, liveness: Liveness, alert: Callable[[str], None], *, offset_s: float = 0.0) -> None:
        """Forwards the progress reports in `data` to `liveness` and the alerts to `alert`. Malformed lines are ignored.

        Args:
            offset_s: added to the reports' times, which come from the clock of the learner's machine.
        """
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_LONGEST]
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                report = json.loads(line)
                if isinstance(report, str):
                    alert(report[:_ALERT_CHARACTERS])
                    continue
                at, size, work = report
                if isinstance(work, str) and math.isfinite(at) and math.isfinite(size):
                    liveness.progress(work[:_WORK_CHARACTERS], float(size), at=float(at) + offset_s)


@contextmanager
def disk_errors_raised(what: str) -> Iterator[None]:
    """Raises `DiskFull` if the block runs out of disk space, and `LearnerError` for any other `OSError`.

    `what` names the file in the message. Some libraries report a full disk with an error other than `OSError`.
    """
    try:
        yield
    except Exception as error:
        if disk_full_error(error) is not None:
            raise DiskFull(f"no room to write {what}") from error
        if isinstance(error, OSError):
            raise LearnerError(f"cannot write {what}: {error.strerror or error}") from error
        raise


FILE = "failures/updates.jsonl"


class UpdateFailureLog:
    """The log of a run's setbacks, one JSON line each, in step order. The learner writes the log, and the driver reads it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE

    def append(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Appends setbacks durably. Raises `DiskFull` or `LearnerError` on a write error."""
        if setbacks:
            with disk_errors_raised(str(self.path)):
                append_lines(self.path, map(_line, setbacks), durable=True)

    def remove_from(self, step: int) -> None:
        """Removes the entries of `step` and later steps, because these steps are run and logged again after a crash or halt. Raises the
        errors of `append`."""
        setbacks = self.read()
        if any(setback.step >= step for setback in setbacks):
            with disk_errors_raised(str(self.path)):
                write_atomically(self.path, b"".join(_line(setback) for setback in setbacks if setback.step < step), durable=True)

    def read(self, step: int | None = None) -> tuple[UpdateFailure, ...]:
        """Returns all setbacks, or those of one step. An incomplete last line, which a killed process may leave, is ignored. Raises
        `StoreError` if another line is damaged."""
        try:
            setbacks = [codec.from_json(UpdateFailure, line) for line in complete_lines(self.path)]
        except ValueError as error:
            why = " ".join(str(error).split())[:200]
            raise StoreError(f"{self.path} is damaged: {why}\n  fix: restore the file from a copy") from error
        return tuple(setback for setback in setbacks if step is None or setback.step == step)


def _line(setback: UpdateFailure) -> bytes:
    return codec.to_json(setback) + b"\n"
