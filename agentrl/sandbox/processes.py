"""The processes of a sandbox as the host sees them, and a way to kill its programs from outside.

An exec server ends its programs. If it does not answer in time, either it is at fault, or programs take all CPU time.
`SandboxProcesses.end_programs` decides: it kills the programs and returns whether there were any, or the server was waiting for a CPU. So a
program cannot turn its time-out into an infrastructure fault.
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
"""Largest age of a list of the machine's processes, which sandboxes that are late at the same time share."""
END_S = 5.0
PAUSE_S = 0.2
WAITING = "RD"
"""States of a process that runs, or waits for a CPU or the kernel."""
DEAD = "ZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process: `Process(pid=4711, parent=4710, user=1879048199, inner=1, state="S")`."""

    pid: int
    parent: int
    user: int
    inner_pid: int  # pid in its innermost namespace
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProcesses:
    """The users of one sandbox, which identify its processes. If both are the user of the host, descendants of the process `top` do."""

    server: int
    agent: int
    top: int = 0

    @classmethod
    def from_options(cls, options: dict[str, Any], top: int) -> SandboxProcesses:
        """For an exec server started with `options` (see `allowance.server_options`), below the process `top` if this user is not root."""
        if os.geteuid() == 0 or not top:
            return cls(server=options["server"], agent=options["agent"])
        return cls(server=os.geteuid(), agent=os.geteuid(), top=top)

    async def kill_programs(self) -> bool:
        """Kills the programs, and waits up to `END_S` for their end.

        Returns whether there were any, or the exec server was waiting for a CPU. Then a late answer is not the server's fault.
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

    def _programs(self, seen: list[Process]) -> list[Process]:
        living = [process for process in self._inside(seen) if process.state not in DEAD]
        return [process for process in living if process.user == self.agent and process.inner_pid != 1]

    def _servers(self, seen: list[Process]) -> list[Process]:
        return [process for process in self._inside(seen) if process.user == self.server and process.inner_pid == 1]

    def _inside(self, seen: list[Process]) -> list[Process]:
        if not self.top:
            return [process for process in seen if process.user in (self.server, self.agent)]
        inside, newest = {self.top}, {self.top}
        while newest:
            newest = {process.pid for process in seen if process.parent in newest} - inside
            inside |= newest
        return [process for process in seen if process.pid in inside and process.pid != self.top]

    def _kill(self, process: Process) -> None:
        """Kills a process, unless its pid now belongs to another process, or this user lacks the right."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                now = _seen(process.pid)
                if now is not None and (now.user, now.inner_pid) == (process.user, process.inner_pid):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


_lock = threading.Lock()
_last: tuple[float, list[Process]] = (0.0, [])


def _processes(age_s: float) -> list[Process]:
    """The machine's processes, as of at most `age_s` ago."""
    global _last
    asked = time.monotonic()
    with _lock:
        if _last[0] < asked - age_s:
            began = time.monotonic()
            _last = (began, list(_all()))
        return _last[1]


def _all() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (seen := _seen(int(name))) is not None:
            yield seen


def _seen(pid: int) -> Process | None:
    """The process `pid`; None if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return Process(
            pid=pid,
            parent=int(lines["PPid"]),
            user=int(lines["Uid"].split()[1]),
            inner_pid=int(lines["NSpid"].split()[-1]),
            state=lines["State"].strip()[:1],
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None
