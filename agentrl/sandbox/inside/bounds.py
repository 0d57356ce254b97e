"""What the kernel charges to no sandbox: bounded before any program runs where it has a setting, else counted while programs run.

Locks on files are kernel memory without an owner, and without a limit. So is what lies in a connection on the loopback until somebody
has accepted it. Both are counted several times a second; a sandbox that holds too many is out of memory, as if it had been charged.
"""

from __future__ import annotations

import ctypes
import os
import time

from agentrl.sandbox.inside.users import HOME, LIBC, MS_NODEV, MS_NOSUID, MS_REMOUNT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Request

MS_RDONLY, MS_NOEXEC, MS_BIND = 1, 8, 4096
SETTINGS = "/proc/sys"
MOST_LOCKS = 4096
MOST_SOCKETS = 1024
"""Of IP, waiting to be accepted or not."""
LOOK_S = 0.1
"""How often is looked while a program runs."""
LOOK_BETWEEN_S = 0.5
"""And how often while none does but something has been left behind."""
RARELY = 20
"""What part of the time a look may take: whoever reads the table of locks holds it for the whole machine, however long others make it."""
MOST_REST_S = 2.0
PAGE = 65536


def set_bounds(options: Request) -> None:
    """Sets, as root, what this sandbox has of terminals, and how its sockets are buffered: what the engine has not done already."""
    os.chmod(HOME, 0o1777)  # runc gives a tmpfs the mode of the folder that it covers
    if "terminals" in options:
        _mount("/dev/pts", MS_REMOUNT | MS_NOSUID | MS_NOEXEC, options["terminals"])
    if "settings" in options:  # of this network namespace
        _mount(SETTINGS, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
        for name, value in options["settings"].items():
            with open(f"{SETTINGS}/{name.replace('.', '/')}", "w") as file:
                file.write(value)
        _mount(SETTINGS, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | MS_RDONLY)


def _mount(path: str, flags: int, settings: str = "") -> None:
    if LIBC.mount(b"none", path.encode(), None, flags, settings.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"remount {path}")


class Watch:
    """Counts what is charged to nobody; a machine that does not show a count has none."""

    def __init__(self) -> None:
        self.locks, self.sockets, self.sockets6 = (count_at(f"/proc/{name}") for name in ("locks", "net/sockstat", "net/sockstat6"))
        self.children = count_at("/proc/self/task/1/children")
        self.rest_s = 0.0  # until the next look, at least

    def overdrawn(self) -> bool:
        """Whether programs of this sandbox hold more than it may have."""
        began = time.monotonic()
        over = self._holds_too_much()
        self.rest_s = min(MOST_REST_S, RARELY * (time.monotonic() - began))
        return over

    def _holds_too_much(self) -> bool:
        return sockets_in(shown(self.sockets)) + sockets_in(shown(self.sockets6)) > MOST_SOCKETS or self.too_many_locks()

    def too_many_locks(self) -> bool:
        """The kernel gives a page at a time: locks of this process namespace, and, of all others, those of open files."""
        count = at = 0
        while count <= MOST_LOCKS and (data := shown(self.locks, at)):
            count, at = count + data.count(b"\n") - data.count(b"OFDLCK"), at + len(data)
        return count > MOST_LOCKS

    def somebody_is_left(self, waiting: int) -> bool:
        """Whether a process lives here besides this one and its child `waiting`. What has lost its parent is a child of this one."""
        return any(int(pid) != waiting for pid in shown(self.children).split()) if self.children >= 0 else True


def sockets_in(text: bytes) -> int:
    """TCP and UDP sockets in the words of /proc/net/sockstat and sockstat6, which have a line `TCP: inuse 3 ...`."""
    words = (line.split() for line in text.splitlines())
    return sum(int(line[2]) for line in words if line[:1] and line[0].startswith((b"TCP", b"UDP")))


def count_at(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def shown(fd: int, at: int = 0) -> bytes:
    return os.pread(fd, PAGE, at) if fd >= 0 else b""
