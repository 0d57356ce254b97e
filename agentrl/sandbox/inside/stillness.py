"""Programs that are to stand still, and do.

A program cannot refuse SIGSTOP, but have itself woken: by a timer that it has set to send SIGCONT. So while programs are paused
their states are looked at. Who is found moving is stopped again, and at the third time ended.
"""

from __future__ import annotations

import contextlib
import os
import signal

from agentrl.sandbox.inside.program import kill_everything

MOST_SEEN = 3
"""How often a process may be found moving in one pause: one that waits for its share of CPU time comes to its signal late."""
MOVING = (b"R", b"S")


class Stillness:
    """One pause."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        kill_everything(signal.SIGSTOP)

    def look(self) -> None:
        """Stops, or ends, whoever moves."""
        for pid in os.listdir("/proc"):
            if pid.isdigit() and int(pid) != os.getpid() and moves(pid):
                self.seen[pid] = self.seen.get(pid, 0) + 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGSTOP if self.seen[pid] < MOST_SEEN else signal.SIGKILL)


def moves(pid: str) -> bool:
    """Whether some thread of a process runs, or waits for something that would have it run; its first thread may have ended."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b") ")[2][:1] in MOVING:
                    return True
    return False
