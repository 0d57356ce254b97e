"""CPU seconds used by each part of a run, summed over the process trees below this process and read from `proc(5)`. Linux only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DRIVER, SANDBOXES, DOCKER, OTHERS, IDLE = "driver", "sandboxes", "docker", "others", "idle"
"""Parts: this process; processes that it or a worker starts and that belong to no other part; the Docker daemon with all its containers;
all other processes on the machine; time in which no process ran."""
MODULES = {"agentrl.serving": "server", "agentrl.learner": "learner", "agentrl.run.worker": "workers", "agentrl.reward": "scoring"}
"""Module in a process's command -> the part to which that process and the processes that it starts belong."""
_STARTERS = (DRIVER, "workers")  # parts whose processes start sandboxes
_DAEMONS = ("dockerd", "containerd")  # prefixes of program names
_COMMAND_BYTES = 4096
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """CPU times of a process, in clock ticks."""

    parent: int
    started: int  # identifies a process together with its id
    own: int
    children: int  # ticks of its exited children for which it waited, and of their children
    program: str


Processes = Mapping[int, ProcessTimes]


class CpuClock:
    """Counts the CPU seconds that each part of a run has used since the clock was constructed. The counts of all parts add up to the time
    of all CPUs.

    The kernel adds the CPU time of an exited process to the process that waited for it, so short-lived programs count too. Only the time of
    a process whose parent did not wait for it is missing from its part and counts as `others`.

    Args:
        processes: reads the processes on the machine.
        totals: reads the busy and the idle time of all CPUs, in clock ticks.
        command: reads the command of a process.
    """

    def __init__(
        self,
        *,
        root: int | None = None,
        processes: Callable[[], Processes] | None = None,
        totals: Callable[[], tuple[int, int]] | None = None,
        command: Callable[[int], str] | None = None,
    ) -> None:
        self._root = os.getpid() if root is None else root
        self._processes, self._totals, self._command = processes or read_processes, totals or read_totals, command or read_command
        self._before = self._processes()
        self._busy, self._idle = self._began = self._totals()
        self._ticks: dict[str, int] = {}

    def read(self) -> dict[str, float]:
        """Returns a mapping from part to the CPU seconds that it has used so far. Parts that used none are absent, except
        `others` and `idle`."""
        now, (busy, idle) = self._processes(), self._totals()
        parts = self._classify(now)
        for pid, ticks in _spent(self._before, now).items():
            part = parts.get(pid)
            if part is not None:
                own, children = ticks
                self._add(part, own)
                self._add(SANDBOXES if part in _STARTERS else part, children)
        self._before, self._busy, self._idle = now, busy, idle
        used = sum(self._ticks.values())
        counts = self._ticks | {OTHERS: max(0, busy - self._began[0] - used), IDLE: max(0, idle - self._began[1])}
        return {part: ticks / _TICKS_PER_S for part, ticks in counts.items()}

    def _add(self, part: str, ticks: int) -> None:
        if ticks:
            self._ticks[part] = self._ticks.get(part, 0) + ticks

    def _classify(self, processes: Processes) -> dict[int, str]:
        """Returns the part of each process below the driver and of each process of the Docker daemon, by process id."""
        below: dict[int, list[int]] = {}
        for pid, one in processes.items():
            below.setdefault(one.parent, []).append(pid)
        parts = {pid: DOCKER for pid, one in processes.items() if one.program.startswith(_DAEMONS)}
        parts |= {self._root: DRIVER} if self._root in processes else {}
        queue = list(parts)
        for pid in queue:
            for child in below.get(pid, ()):
                if child not in parts:
                    parts[child] = self._part(child, parts[pid])
                    queue.append(child)
        return parts

    def _part(self, pid: int, parent: str) -> str:
        if parent not in _STARTERS:
            return parent
        command = self._command(pid)
        return next((part for module, part in MODULES.items() if module in command), SANDBOXES)


def _spent(before: Processes, now: Processes) -> dict[int, tuple[int, int]]:
    """Returns the clock ticks used since `before`, as process -> (own ticks, ticks of its exited children). Ticks that these children had
    already used at `before` are excluded."""
    alive = {pid: before[pid] for pid, one in now.items() if pid in before and before[pid].started == one.started}
    counted: dict[int, int] = {}  # process -> ticks of its exited descendants that were counted before
    for pid, ended in before.items():
        if pid not in alive:
            parent = ended.parent
            while parent not in alive and parent in before:
                parent = before[parent].parent
            counted[parent] = counted.get(parent, 0) + ended.own + ended.children
    spent: dict[int, tuple[int, int]] = {}
    for pid, one in now.items():
        earlier = alive.get(pid)
        own, children = (one.own, one.children) if earlier is None else (one.own - earlier.own, one.children - earlier.children)
        spent[pid] = max(0, own), max(0, children - counted.get(pid, 0))
    return spent


def read_processes() -> Processes:
    """Returns the visible processes on this machine; empty on systems other than Linux."""
    return dict(_each_process())


def _each_process() -> Iterator[tuple[int, ProcessTimes]]:
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(_PROC)
    for name in names:
        if name.isdecimal():
            with suppress(OSError, ValueError, IndexError):  # the process has exited
                head, _, tail = (_PROC / name / "stat").read_bytes().rpartition(b")")
                fields = tail.split()
                own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
                program = head.partition(b"(")[2].decode("utf-8", "replace")
                yield int(name), ProcessTimes(int(fields[1]), int(fields[19]), own, children, program)


def read_totals() -> tuple[int, int]:
    """Returns the busy and idle ticks of all CPUs since the machine started; zeros on systems other than Linux."""
    with suppress(OSError, ValueError, IndexError):
        fields = [int(field) for field in (_PROC / "stat").read_text().partition("\n")[0].split()[1:9]]
        idle = fields[3] + fields[4]  # waiting for a disk counts as idle
        return sum(fields) - idle, idle
    return 0, 0


def read_command(pid: int) -> str:
    """Returns the first 4096 bytes of a process's command line; empty if the process has exited."""
    with suppress(OSError), (_PROC / str(pid) / "cmdline").open("rb") as file:
        return file.read(_COMMAND_BYTES).replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
