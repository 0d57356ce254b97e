"""The processes of a sandbox as the host sees them, and their end from outside.

An exec server ends its programs itself. When it does not answer in time, either it is at fault or it gets no CPU time because programs
take all of it. `Residents.end_programs` settles which: it kills the programs and returns whether any were there or the server was waiting
for a CPU. A program can therefore not turn its own time-out into a fault of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FRESH_S = 0.5
"""How old a list of the machine's processes may be: many sandboxes that are late at once share one."""
END_S = 5.0
PAUSE_S = 0.2
WAITING = "RD"
"""States of a process that has work to do: it waits for a CPU or for the kernel, or runs."""
DEAD = "ZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A process: `Seen(pid=4711, parent=4710, user=1879048199, inner=1, state="S")`."""

    pid: int
    parent: int
    user: int
    inner: int  # pid in its innermost namespace
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """Who lives in one sandbox. If server and agent are one user, they are told apart as descendants of the process `top`."""

    server: int
    agent: int
    top: int = 0

    @classmethod
    def of(cls, options: dict[str, Any], top: int) -> Residents:
        """For an exec server started with `options` (see `allowance.server_options`), below the process `top` if this user is not root."""
        if os.geteuid() == 0 or not top:
            return cls(server=options["server"], agent=options["agent"])
        return cls(server=os.geteuid(), agent=os.geteuid(), top=top)

    async def end_programs(self) -> bool:
        """Kills the programs, and waits up to `END_S` for their end.

        Returns whether there were any, or the exec server was waiting for a CPU: then a late answer proves nothing against the server.
        """
        seen = await asyncio.to_thread(_processes, FRESH_S)
        programs = self._programs(seen)
        late = bool(programs) or any(process.state in WAITING for process in self._servers(seen))
        deadline = time.monotonic() + END_S
        while programs and time.monotonic() < deadline:
            for process in programs:
                self._kill(process)
            await asyncio.sleep(PAUSE_S)
            programs = self._programs(await asyncio.to_thread(_processes, PAUSE_S))
        return late

    def _programs(self, seen: list[Seen]) -> list[Seen]:
        living = [process for process in self._inside(seen) if process.state not in DEAD]
        return [process for process in living if process.user == self.agent and process.inner != 1]

    def _servers(self, seen: list[Seen]) -> list[Seen]:
        return [process for process in self._inside(seen) if process.user == self.server and process.inner == 1]

    def _inside(self, seen: list[Seen]) -> list[Seen]:
        if not self.top:
            return [process for process in seen if process.user in (self.server, self.agent)]
        inside, newest = {self.top}, {self.top}
        while newest:
            newest = {process.pid for process in seen if process.parent in newest} - inside
            inside |= newest
        return [process for process in seen if process.pid in inside and process.pid != self.top]

    def _kill(self, process: Seen) -> None:
        """Kills a process, unless its number belongs to another one by now, or this user may not."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                now = _seen(process.pid)
                if now is not None and (now.user, now.inner) == (process.user, process.inner):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


_lock = threading.Lock()
_last: tuple[float, list[Seen]] = (0.0, [])


def _processes(age_s: float) -> list[Seen]:
    """The machine's processes, as of at most `age_s` ago."""
    global _last
    asked = time.monotonic()
    with _lock:
        if _last[0] < asked - age_s:
            began = time.monotonic()
            _last = (began, list(_all()))
        return _last[1]


def _all() -> Iterator[Seen]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (seen := _seen(int(name))) is not None:
            yield seen


def _seen(pid: int) -> Seen | None:
    """The process `pid`; None if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return Seen(
            pid=pid,
            parent=int(lines["PPid"]),
            user=int(lines["Uid"].split()[1]),
            inner=int(lines["NSpid"].split()[-1]),
            state=lines["State"].strip()[:1],
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None
