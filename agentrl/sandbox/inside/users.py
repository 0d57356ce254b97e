"""Who the server is, who its programs are, and what both may do.

Started by root the server becomes a user of its own, keeps the few `rights` it needs, and gives programs another user, the agent,
and none of them: a program can neither signal it, nor trace it, nor change its limits. Where only one user is to be had
(bubblewrap without root), process 1 is still out of reach of signals from inside, and not dumpable.
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
NICE = 5
"""Added to the niceness of programs in a sandbox without a control group: they get a third of the CPU time of the driver's processes."""
VICTIM = b"1000"
"""The mark of programs: without memory they go, not the server. What has it from a process with SYS_RESOURCE cannot take it back."""
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 8, 22, 24, 38
SECCOMP_MODE_FILTER = 2
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32

LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def set_capabilities(numbers: Sequence[int]) -> None:
    """Makes `numbers` the permitted and effective rights of this process, with nothing inheritable."""
    mask = sum(1 << number for number in numbers)
    if LIBC.capset(struct.pack("=Ii", CAPABILITY_VERSION_3, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class Users:
    """Who the server is and who its programs are; the same where no second user is to be had."""

    def __init__(self, server: int, agent: int, open_files: int, *, grouped: bool) -> None:
        """`grouped`: this sandbox has a separate control group for CPU time."""
        self.server, self.agent, self.open_files, self.grouped = server, agent, open_files, grouped

    @contextlib.contextmanager
    def as_agent(self) -> Iterator[None]:
        """Files are opened and made with the agent's rights, while signals, tracing and limits still see the server."""
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
        """Whether a process of this user is known not to be the agent's."""
        return user == self.server != self.agent

    def lower_priority(self) -> None:
        """Lowers the priority of this thread, and so of what it starts, to that of programs.

        The server is scheduled before programs, so that it can end a program that takes all CPU time. In a separate control group, programs
        compete only with their server, so the kernel's idle policy costs them nothing. Without a group they also compete with the driver
        and the learner, and get `NICE` instead, which leaves them a share. A program can undo neither: `RLIMIT_NICE` is 0.
        """
        if self.grouped:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(NICE)

    def limit_program(self) -> None:
        """What holds for this process, a forked child, from before it becomes the agent's."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))

    def open_victim(self) -> int:
        """Descriptor of this forked child's mark by which the kernel chooses whom to end without memory (see `VICTIM`)."""
        prctl(PR_SET_DUMPABLE, 1)  # its /proc/self is its own for the next line
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        prctl(PR_SET_DUMPABLE, 0)
        return fd

    def become_agent(self) -> None:
        """Turns this process, a forked child, into the agent's, for good."""
        self.lower_priority()
        if self.server != self.agent:
            os.setresgid(self.agent, self.agent, self.agent)
            os.setresuid(self.agent, self.agent, self.agent)
            set_capabilities(())
        prctl(PR_SET_DUMPABLE, 1)  # its /proc/self is its own; the channel is closed by now


def mapped(user: int) -> bool:
    """Whether this user namespace knows `user`; one of a rootless engine knows only the first thousands."""
    with open("/proc/self/uid_map") as file:
        ranges = [line.split() for line in file]
    return any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)


def own_user(options: Request) -> Users:
    """The users of a sandbox that was not started by root: server and agent are the same user."""
    return Users(os.geteuid(), os.geteuid(), options["open_files"], grouped=options["grouped"])


def leave_root(options: Request) -> Users:
    """Gives up root for good, keeping `rights`; gives the users from here on."""
    for path, limit in options.get("tmpfs", {}).items():
        if LIBC.mount(b"tmpfs", path.encode(), None, MS_REMOUNT | MS_NOSUID | MS_NODEV, limit.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"remount {path}")
    agent, server = options["agent"], options["server"]
    if not (mapped(agent) and mapped(server)):
        agent, server = 65534, 65533
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last capability of this kernel
    os.setgroups([])
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresgid(server, server, server)
    os.setresuid(server, server, server)
    set_capabilities(options["rights"])
    return Users(server, agent, options["open_files"], grouped=options["grouped"])


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(options: Request) -> None:
    """What holds for this process and all that come from it: limits, cores, and a filter of system calls."""
    for name, value in options["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    resource.setrlimit(resource.RLIMIT_NOFILE, (SERVER_FILES, max(SERVER_FILES, options["open_files"])))
    usable = os.sched_getaffinity(0).intersection(options["cores"])
    if usable:  # an engine may have cores of its own for containers
        os.sched_setaffinity(0, usable)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    code = bytes.fromhex(options["filter"])
    if code and LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(FilterProgram(len(code) // 8, code)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the system call filter")
