"""Why a learner ended, told to its driver in a typed line and not in its log: through memory, so that a full disk cannot silence it."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from agentrl.causes import disk_full, place, short
from agentrl.errors import AgentRLError, DiskFull, LearnerError, LearnerHalted, UserError

_LONGEST = 1 << 14  # bytes of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """What one process of the learner says when it cannot go on."""

    kind: Literal["user", "halted", "disk", "failed", "other"]
    message: str
    fix: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Farewell:
        if (full := disk_full(error)) is not None:
            return cls(kind="disk", message=str(error) if isinstance(error, AgentRLError) else short(full))
        if isinstance(error, LearnerHalted):
            return cls(kind="halted", message=str(error))
        if isinstance(error, UserError):
            return cls(kind="user", message=error.message, fix=error.fix)
        if isinstance(error, AgentRLError):
            return cls(kind="failed", message=str(error))
        at = place(error)
        return cls(kind="other", message=short(error) + (f" ({at})" if at else ""))

    def error(self, log: Path) -> AgentRLError:
        """The error to raise in the driver; `log` is where the rest is."""
        if self.kind == "user":
            return UserError(self.message, fix=self.fix)
        if self.kind == "halted":
            return LearnerHalted(self.message)
        if self.kind == "disk":
            return DiskFull(f"the learner: {self.message}")
        words = self.message if self.kind == "failed" else f"the learner failed: {self.message}"
        return LearnerError(f"{words}\n  all of its output: {log}")


class Mailbox:
    """Memory of the driver's that a learner's processes write to, by the path of `address`."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("agentrl-learner")
        weakref.finalize(self, os.close, self._handle)
        self.address = f"/proc/{os.getpid()}/fd/{self._handle}"

    def empty(self) -> None:
        os.ftruncate(self._handle, 0)

    def best(self) -> Farewell | None:
        """The most telling word left: when one rank fails, the others only miss it."""
        found = list(self._words())
        for kinds in (("user", "halted", "disk"), ("failed",)):
            for word in found:
                if word.kind in kinds:
                    return word
        return next(iter(found), None)

    def _words(self) -> Iterator[Farewell]:
        for line in os.pread(self._handle, 1 << 20, 0).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                yield Farewell(**json.loads(line))


def say(address: str | None, word: Farewell) -> None:
    """Leaves a word at a `Mailbox.address`; the log has it too, so one that cannot be delivered is not an error."""
    line = json.dumps(asdict(word))
    if len(line) > _LONGEST:
        line = json.dumps(asdict(Farewell(kind=word.kind, message=word.message[: _LONGEST // 8], fix=word.fix[: _LONGEST // 8])))
    if address is not None:
        with contextlib.suppress(OSError):
            handle = os.open(address, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(handle, line.encode() + b"\n")
            finally:
                os.close(handle)
