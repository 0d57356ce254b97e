"""The users of the exec server and of its programs, and what both may do.

Started by root, the server becomes a user of its own with the few `rights` it needs. Programs are another user, the agent, without any:
they can neither signal nor trace the server, nor change its limits. With only one user (bubblewrap without root), process 1 still cannot
be signalled from inside and is not dumpable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct

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
"""OOM score of programs: when memory runs out, the kernel ends them rather than the server. If a process with SYS_RESOURCE has set it, they
cannot lower it."""
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 8, 22, 24, 38
SECCOMP_MODE_FILTER = 2
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32
_NICE = 5  # programs without a control group get a third of the CPU time of the driver's processes
_CAPABILITY_VERSION_3 = 0x20080522

LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """See prctl(2). Raises `OSError`."""
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def set_capabilities(numbers: Sequence[int]) -> None:
    """Makes `numbers` the permitted and effective capabilities of this process, none of them inheritable."""
    mask = sum(1 << number for number in numbers)
    if LIBC.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class Users:
    """The users of the server and of its programs; the same one if there is no second user."""

    def __init__(self, server: int, agent: int, open_files: int, *, grouped: bool) -> None:
        """`grouped`: this sandbox has a control group for CPU time."""
        self.server, self.agent, self.open_files, self.grouped = server, agent, open_files, grouped

    @contextlib.contextmanager
    def as_agent(self) -> Iterator[None]:
        """Accesses files with the agent's rights. For signals, tracing and limits this process stays the server's."""
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
        """Whether a process of this user is certainly not the agent's."""
        return user == self.server != self.agent

    def lower_priority(self) -> None:
        """Gives this thread, and what it starts, the priority of programs.

        The server is scheduled before them, so that it can end a program that takes all CPU time. In a control group, programs compete
        only with their server, so the kernel's idle policy costs them nothing. Without one they compete with the driver and the learner
        too, and get a niceness that leaves them a share. A program can undo neither, because `RLIMIT_NICE` is 0.
        """
        if self.grouped:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(_NICE)

    def limit_program(self) -> None:
        """Applies the limits of programs to this forked child, before it becomes the agent's."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))

    def open_oom_score(self) -> int:
        """Descriptor of this forked child's OOM score (see `OOM_SCORE`)."""
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
        prctl(PR_SET_DUMPABLE, 1)  # makes /proc/self accessible; the connection to the host is closed by now


def _is_mapped(user: int) -> bool:
    """Whether this user namespace has `user`. That of a rootless Docker has only the first thousands."""
    with open("/proc/self/uid_map") as file:
        ranges = [line.split() for line in file]
    return any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)


def become_server(options: Request) -> Users:
    """Gives up root irrevocably, except for `rights`. Returns the users; the same one twice if this process was not started by root."""
    if os.geteuid() != 0:
        return Users(os.geteuid(), os.geteuid(), options["open_files"], grouped=options["grouped"])
    for path, limit in options.get("tmpfs", {}).items():
        if LIBC.mount(b"tmpfs", path.encode(), None, MS_REMOUNT | MS_NOSUID | MS_NODEV, limit.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"remount {path}")
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
    """`struct sock_fprog` of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(options: Request) -> None:
    """Applies limits, cores and the system call filter to this process and all that it starts."""
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
        raise OSError(ctypes.get_errno(), "the system call filter")
