"""The processes of a sandbox as the host sees them, and how the host kills the programs among them.

Normally the exec server kills the programs. If the exec server does not reply in time, either it is at fault or programs use all CPU time.
`SandboxProcesses.kill_programs` distinguishes the two cases, so that a program cannot turn its timeout into an infrastructure fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

DEAD = "ZX"
"""States of a process that has exited."""
_WAITING = "RD"  # states of a process that runs, or waits for a CPU or the kernel
_FRESH_S = 0.5  # maximum age of a process list; sandboxes whose replies are late at the same time share a list
_END_S = 5.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, such as `Process(pid=4711, parent=4710, user=1879048199, inner_pid=1, state="S")`."""

    pid: int
    parent: int
    user: int
    inner_pid: int  # pid in the innermost namespace
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProcesses:
    """Identifies the processes of one sandbox by their user ids or, if `top` is set, as the descendants of the process `top`."""

    server: int
    agent: int
    top: int = 0

    @classmethod
    def from_options(cls, options: dict[str, Any], top: int) -> SandboxProcesses:
        """Returns the processes of the sandbox whose exec server has these start options.

        `top` is an ancestor of the exec server, or 0 if none is known. `top` is used only if this user is not root.
        """
        if os.geteuid() == 0 or not top:
            return cls(server=options["server"], agent=options["agent"])
        return cls(server=os.geteuid(), agent=os.geteuid(), top=top)

    async def kill_programs(self) -> bool:
        """Kills the programs of the sandbox and waits up to 5 seconds for them to exit.

        Returns True if there were programs, or if the exec server was running or waiting for a CPU or the kernel. In these cases, a late
        reply is not the fault of the exec server.
        """
        processes = await asyncio.to_thread(_processes, _FRESH_S)
        programs = self._programs(processes)
        blocked = bool(programs) or any(process.state in _WAITING for process in self._servers(processes))
        deadline = time.monotonic() + _END_S
        while programs and time.monotonic() < deadline:
            for process in programs:
                self._kill(process)
            await asyncio.sleep(_PAUSE_S)
            programs = self._programs(await asyncio.to_thread(_processes, _PAUSE_S))
        return blocked

    def _programs(self, processes: list[Process]) -> list[Process]:
        living = [process for process in self._inside(processes) if process.state not in DEAD]
        return [process for process in living if process.user == self.agent and process.inner_pid != 1]

    def _servers(self, processes: list[Process]) -> list[Process]:
        return [process for process in self._inside(processes) if process.user == self.server and process.inner_pid == 1]

    def _inside(self, processes: list[Process]) -> list[Process]:
        if not self.top:
            return [process for process in processes if process.user in (self.server, self.agent)]
        inside, newest = {self.top}, {self.top}
        while newest:
            newest = {process.pid for process in processes if process.parent in newest} - inside
            inside |= newest
        return [process for process in processes if process.pid in inside and process.pid != self.top]

    def _kill(self, process: Process) -> None:
        """Kills a process. Does nothing if the pid now belongs to a different process, or if this user may not kill the process."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                now = read_process(process.pid)
                if now is not None and (now.user, now.inner_pid) == (process.user, process.inner_pid):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


_lock = threading.Lock()
_last: tuple[float, list[Process]] = (0.0, [])


def _processes(age_s: float) -> list[Process]:
    """Returns the machine's processes from a list that is at most `age_s` seconds old."""
    global _last
    called = time.monotonic()
    with _lock:
        if _last[0] < called - age_s:
            _last = (time.monotonic(), _all())
        return _last[1]


def _all() -> list[Process]:
    return [process for name in os.listdir("/proc") if name.isdigit() and (process := read_process(int(name))) is not None]


def read_process(pid: int) -> Process | None:
    """Returns the process `pid`, or None if it has exited."""
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
