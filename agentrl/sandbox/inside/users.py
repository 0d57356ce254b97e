"""The users that the exec server and its programs run as, and what each user may do.

If root starts the server, the server switches to a separate user with the few capabilities (`rights`) that it needs. Programs run as a
different user, the agent, without these rights: they cannot signal or trace the server, or change its limits. If there is only one user
(bubblewrap without root), process 1 still cannot be signalled from inside the sandbox and is not dumpable.

Some kernel resources are not charged to any sandbox. Such resources are limited before any program runs, or counted while programs run.
File locks use kernel memory that is neither charged nor limited, and so do the bytes in a loopback connection that is not accepted yet.
File locks and sockets are therefore counted several times a second. A sandbox that holds too many of them is treated as out of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentrl.sandbox.inside.wire import Request

HOME = "/home/agent"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}
SERVER_FILES = 256
OOM_SCORE = b"1000"
"""OOM score of programs: when memory runs out, the kernel kills them rather than the server. They cannot lower it if a process with
SYS_RESOURCE set it."""
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 8, 22, 24, 38
SECCOMP_MODE_FILTER = 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MAX_LOCKS = 4096
MAX_SOCKETS = 1024
"""Maximum number of TCP and UDP sockets, accepted or not."""
CHECK_S = 0.1
"""Interval of the checks while a program runs."""
IDLE_CHECK_S = 0.5
"""Interval of the checks while no program runs but some process is left."""
REST_FACTOR = 20
"""Minimum pause after a check, as a multiple of its duration. Reading the table of locks, which may be long, blocks it machine-wide."""
MAX_REST_S = 2.0
_SETTINGS = "/proc/sys"
_PAGE = 65536
_NICE = 5  # programs without a control group get a third of the CPU time of the driver's processes
_CAPABILITY_VERSION_3 = 0x20080522

LIBC = ctypes.CDLL(None, use_errno=True)


def last_error(action: str) -> OSError:
    """Returns the error of the last call into the C library."""
    code = ctypes.get_errno()
    return OSError(code, f"{action}: {os.strerror(code)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, settings: str = "") -> None:
    """See mount(2). Raises `OSError`."""
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if LIBC.mount(*words, flags, settings.encode() or None) != 0:
        raise last_error(f"mount of {kind or source or 'flags'} on {target}")


def prctl(option: int, value: int) -> None:
    """See prctl(2). Raises `OSError`."""
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise last_error(f"prctl({option}, {value})")


def set_capabilities(numbers: Sequence[int]) -> None:
    """Sets the permitted and effective capabilities of this process to `numbers`, and clears the inheritable ones. Raises `OSError`."""
    mask = sum(1 << number for number in numbers)
    if LIBC.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)) != 0:
        raise last_error("capset")


class Users:
    """The users of the server and of its programs. If root did not start the server, the server and its programs have the same user."""

    def __init__(self, server: int, agent: int, open_files: int, *, grouped: bool) -> None:
        """`grouped`: whether this sandbox has a control group for CPU time."""
        self.server, self.agent, self.open_files, self.grouped = server, agent, open_files, grouped

    @contextlib.contextmanager
    def as_agent(self) -> Iterator[None]:
        """Gives this process the agent's rights for access to files during the block. For signals, tracing and limits, the process still
        belongs to the server's user."""
        if self.server == self.agent:
            yield
            return
        LIBC.setfsgid(self.agent)
        LIBC.setfsuid(self.agent)
        try:
            yield
        finally:
            LIBC.setfsuid(self.server)
            LIBC.setfsgid(self.server)

    def is_servers(self, user: int) -> bool:
        """Whether a process of the user `user` certainly belongs to the server and not to the agent."""
        return user == self.server != self.agent

    def lower_priority(self) -> None:
        """Gives this thread, and the processes that it starts, the priority of programs.

        The server is scheduled before programs, so that it can kill a program that uses all CPU time. In a control group, programs compete
        only with their server, so the kernel's idle policy costs them nothing. Without a control group, programs also compete with the
        driver and the learner, and get a nice value that leaves them a share. A program can undo neither setting, because `RLIMIT_NICE` is
        0.
        """
        if self.grouped:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(_NICE)

    def limit_program(self) -> None:
        """Applies the limits for programs to this forked child before it becomes a process of the agent."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))

    def open_oom_score(self) -> int:
        """Returns a descriptor for this forked child's OOM score (see `OOM_SCORE`)."""
        prctl(PR_SET_DUMPABLE, 1)  # makes /proc/self accessible for the next line
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        prctl(PR_SET_DUMPABLE, 0)
        return fd

    def become_agent(self) -> None:
        """Turns this forked child into a process of the agent, irrevocably."""
        self.lower_priority()
        if self.server != self.agent:
            os.setresgid(self.agent, self.agent, self.agent)
            os.setresuid(self.agent, self.agent, self.agent)
            set_capabilities(())
        prctl(PR_SET_DUMPABLE, 1)  # makes /proc/self accessible; the connection to the host is already closed


def _is_mapped(user: int) -> bool:
    """Whether this user namespace contains `user`. The namespace of a rootless Docker daemon contains only the first few thousand users."""
    with open("/proc/self/uid_map") as file:
        ranges = [line.split() for line in file]
    return any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)


def become_server(options: Request) -> Users:
    """Gives up root irrevocably, except for the capabilities `rights`. Returns the users of the server and the programs, who are the same
    user if this process was not started as root."""
    if os.geteuid() != 0:
        return Users(os.geteuid(), os.geteuid(), options["open_files"], grouped=options["grouped"])
    for path, limit in options.get("tmpfs", {}).items():
        mount(None, path, None, MS_REMOUNT | MS_NOSUID | MS_NODEV, limit)
    agent, server = options["agent"], options["server"]
    if not (_is_mapped(agent) and _is_mapped(server)):
        agent, server = 65534, 65533
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the kernel's last capability
    os.setgroups([])
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresgid(server, server, server)
    os.setresuid(server, server, server)
    set_capabilities(options["rights"])
    return Users(server, agent, options["open_files"], grouped=options["grouped"])


class FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(options: Request) -> None:
    """Applies the limits, the set of cores and the system call filter to this process and all processes that it starts. Raises
    `OSError` or `ValueError` if the kernel rejects one of them."""
    for name, value in options["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    resource.setrlimit(resource.RLIMIT_NOFILE, (SERVER_FILES, max(SERVER_FILES, options["open_files"])))
    usable = os.sched_getaffinity(0).intersection(options["cores"])
    if usable:  # Docker may reserve other cores for containers
        os.sched_setaffinity(0, usable)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    code = bytes.fromhex(options["filter"])
    if code and LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(FilterProgram(len(code) // 8, code)), 0, 0) != 0:
        raise last_error("the system call filter")


# Uncharged resources --------------------------------------------------------------------------------------------------


def set_bounds(options: Request) -> None:
    """Sets, as root, the limits on terminals and socket buffers that Docker has not set."""
    os.chmod(HOME, 0o1777)  # runc gives a tmpfs the mode of the folder below it
    if "terminals" in options:
        mount(None, "/dev/pts", None, MS_REMOUNT | MS_NOSUID | MS_NOEXEC, options["terminals"])
    if "settings" in options:  # settings of this network namespace
        mount(None, _SETTINGS, None, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
        for name, value in options["settings"].items():
            with open(f"{_SETTINGS}/{name.replace('.', '/')}", "w") as file:
                file.write(value)
        mount(None, _SETTINGS, None, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | MS_RDONLY)


class Watch:
    """Counts resources that are not charged to any sandbox. A count is 0 if the machine does not provide it."""

    def __init__(self) -> None:
        self.locks, self.sockets, self.sockets6 = (_open_count(f"/proc/{name}") for name in ("locks", "net/sockstat", "net/sockstat6"))
        self.children = _open_count("/proc/self/task/1/children")
        self.rest_s = 0.0  # minimum time until the next check

    def over_limit(self) -> bool:
        """Whether programs of this sandbox hold more than `MAX_SOCKETS` sockets or more than `MAX_LOCKS` locks."""
        start = time.monotonic()
        sockets = sockets_in(_content(self.sockets)) + sockets_in(_content(self.sockets6))
        over = sockets > MAX_SOCKETS or self.too_many_locks()
        self.rest_s = min(MAX_REST_S, REST_FACTOR * (time.monotonic() - start))
        return over

    def too_many_locks(self) -> bool:
        """Whether this pid namespace holds more than `MAX_LOCKS` locks. Skips locks of open files, because the kernel lists such locks of
        all sandboxes."""
        count = at = 0
        while count <= MAX_LOCKS and (data := _content(self.locks, at)):
            count, at = count + data.count(b"\n") - data.count(b"OFDLCK"), at + len(data)
        return count > MAX_LOCKS

    def has_others(self, waiting: int) -> bool:
        """Whether this process has a child other than `waiting`; True if that is unknown. Orphaned processes in the sandbox become its
        children."""
        return any(int(pid) != waiting for pid in _content(self.children).split()) if self.children >= 0 else True


def sockets_in(text: bytes) -> int:
    """Returns the number of TCP and UDP sockets from /proc/net/sockstat or sockstat6, which have lines such as `TCP: inuse 3 ...`."""
    fields = (line.split() for line in text.splitlines())
    return sum(int(line[2]) for line in fields if line[:1] and line[0].startswith((b"TCP", b"UDP")))


def _open_count(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _content(fd: int, at: int = 0) -> bytes:
    return os.pread(fd, _PAGE, at) if fd >= 0 else b""
