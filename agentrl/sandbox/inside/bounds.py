"""Limits on kernel resources that are charged to no sandbox: set before any program runs, or counted while programs run.

File locks use kernel memory that is neither charged nor limited. So do the bytes in a loopback connection that is not accepted yet. Both
are counted several times a second. A sandbox with too many is out of memory, as if it had been charged for them.
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
MAX_LOCKS = 4096
MAX_SOCKETS = 1024
"""TCP and UDP sockets, accepted or not."""
CHECK_S = 0.1
"""Interval of the checks while a program runs."""
IDLE_CHECK_S = 0.5
"""Interval of the checks while none runs but some process is left."""
REST_FACTOR = 20
"""A check may take this fraction of the time: reading the table of locks blocks it for the whole machine, however long it is."""
MAX_REST_S = 2.0
_SETTINGS = "/proc/sys"
_PAGE = 65536


def set_bounds(options: Request) -> None:
    """Sets, as root, the limits on terminals and socket buffers that Docker has not set."""
    os.chmod(HOME, 0o1777)  # runc gives a tmpfs the mode of the folder below it
    if "terminals" in options:
        _remount("/dev/pts", MS_NOSUID | MS_NOEXEC, options["terminals"])
    if "settings" in options:  # of this network namespace
        _remount(_SETTINGS, MS_BIND | MS_NOSUID | MS_NODEV)
        for name, value in options["settings"].items():
            with open(f"{_SETTINGS}/{name.replace('.', '/')}", "w") as file:
                file.write(value)
        _remount(_SETTINGS, MS_BIND | MS_NOSUID | MS_NODEV | MS_RDONLY)


def _remount(path: str, flags: int, settings: str = "") -> None:
    if LIBC.mount(b"none", path.encode(), None, MS_REMOUNT | flags, settings.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"remount {path}")


class Watch:
    """Counts uncharged resources. A count that the machine does not show is 0."""

    def __init__(self) -> None:
        self.locks, self.sockets, self.sockets6 = (_open_count(f"/proc/{name}") for name in ("locks", "net/sockstat", "net/sockstat6"))
        self.children = _open_count("/proc/self/task/1/children")
        self.rest_s = 0.0  # minimum time until the next check

    def over_limit(self) -> bool:
        """Whether programs of this sandbox hold more than the limits."""
        start = time.monotonic()
        sockets = sockets_in(_content(self.sockets)) + sockets_in(_content(self.sockets6))
        over = sockets > MAX_SOCKETS or self.too_many_locks()
        self.rest_s = min(MAX_REST_S, REST_FACTOR * (time.monotonic() - start))
        return over

    def too_many_locks(self) -> bool:
        """Counts the locks of this pid namespace. The kernel lists, a page at a time, also others' locks of open files."""
        count = at = 0
        while count <= MAX_LOCKS and (data := _content(self.locks, at)):
            count, at = count + data.count(b"\n") - data.count(b"OFDLCK"), at + len(data)
        return count > MAX_LOCKS

    def has_others(self, waiting: int) -> bool:
        """Whether a process exists besides this one and its child `waiting`. Orphans become children of this process."""
        return any(int(pid) != waiting for pid in _content(self.children).split()) if self.children >= 0 else True


def sockets_in(text: bytes) -> int:
    """Number of TCP and UDP sockets in /proc/net/sockstat or sockstat6, which have lines such as `TCP: inuse 3 ...`."""
    fields = (line.split() for line in text.splitlines())
    return sum(int(line[2]) for line in fields if line[:1] and line[0].startswith((b"TCP", b"UDP")))


def _open_count(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _content(fd: int, at: int = 0) -> bytes:
    return os.pread(fd, _PAGE, at) if fd >= 0 else b""
