"""Process 1 of a shared container: it forks the first process of each sandbox, and removes what is left after the sandbox exits.

    python3 -I exec_server.pyc keep:/agentrl/link

The host sends requests over a packet socket. A request for a sandbox carries the sandbox's connection, which the keeper does not use. No
program runs as the keeper's user or in its namespaces, and no program can send data to the keeper, which reads only from the host. When the
host closes the socket, the keeper exits, and the kernel kills every process in the container. A sandbox's first process already has the
exec server's modules in memory, which saves most of its start-up time.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket

from agentrl.sandbox.inside.isolation import CLONE_NEWPID, Groups, isolate
from agentrl.sandbox.inside.users import ENVIRONMENT, LIBC, SERVER_FILES, last_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from agentrl.sandbox.inside.wire import Request

    Serve = Callable[[Request, socket.socket], None]

PACKET = 1 << 17
HOST_FD, EGRESS_FD = 3, 4
"""Descriptors of a sandbox's first process: its connection to the host, and the socket for its egress listener."""
_MOST_DESCRIPTORS = 3
_RETRY_MS = 5
_HIGH_FD = 64
_REPLACEMENT = "/agentrl/exec_server.py"


class Keeper:
    """The container's end of the connection to the host. `serve` turns a process into the exec server of a sandbox."""

    def __init__(self, host: socket.socket, serve: Serve) -> None:
        self.host, self.serve = host, serve
        self.groups = Groups()
        self.own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.sandboxes: dict[int, Request] = {}  # by the pid of each sandbox's first process
        self.leaving: list[Request] = []  # sandboxes whose control groups are not removed yet
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        """Reports to the host that the keeper is ready, and serves requests. If the keeper cannot change control groups, reports the error
        and exits."""
        try:
            self.groups.open_up()
        except OSError as error:
            self._report({"cannot": str(error), "errno": error.errno})
            os._exit(1)
        self._report({"ready": True})
        gc.freeze()
        poll = select.poll()
        poll.register(self.host, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll(_RETRY_MS if self.leaving else None):
                if fd == self.wake:
                    self._reap()
                else:
                    self._answer()
            for sandbox in self.leaving[:]:
                if self.groups.remove(sandbox["name"]):
                    self.leaving.remove(sandbox)
                    self._report({"id": sandbox["id"], "ended": True})

    def _report(self, message: Request) -> None:
        try:
            self.host.send(json.dumps(message).encode())
        except OSError:  # the host is gone or does not read
            os._exit(0)

    def _answer(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.host, PACKET, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if request["op"] == "open":
            self._open(request, fds)
        else:
            for pid, sandbox in self.sandboxes.items():
                if sandbox["id"] == request["id"]:
                    os.kill(pid, signal.SIGKILL)
        for fd in fds:
            os.close(fd)

    def _open(self, sandbox: Request, fds: list[int]) -> None:
        """Forks the first process of a sandbox, in a new pid namespace."""
        pid = 0
        try:
            if LIBC.unshare(CLONE_NEWPID) != 0:
                raise last_error("a new pid namespace")
            pid = os.fork()
            if pid == 0:
                self._become(sandbox, fds)
        except OSError as error:
            self._report({"id": sandbox["id"], "failed": str(error), "errno": error.errno})
            self._report({"id": sandbox["id"], "ended": True})
        finally:
            if LIBC.setns(self.own, CLONE_NEWPID) != 0:
                os._exit(1)
        if pid:
            self.sandboxes[pid] = sandbox

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self.sandboxes:
                    self.leaving.append(self.sandboxes.pop(pid))

    def _become(self, sandbox: Request, fds: list[int]) -> NoReturn:
        """Isolates this process in a new sandbox, and continues as the exec server of the sandbox. Reports a failure to the host."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handed = {name: fds[number] for number, name in enumerate(sandbox["handed"])}
            program = b""
            if "program" in handed:
                with open(handed["program"], "rb", closefd=False) as file:
                    program = file.read()
            isolate(sandbox, self.groups, program)
            link = self._keep_only(handed)
            if program:
                for fd in range(HOST_FD, EGRESS_FD + ("egress" in handed)):
                    os.set_inheritable(fd, True)
                os.execvpe("python3", ["python3", "-I", _REPLACEMENT, f"fd:{HOST_FD}", json.dumps(sandbox["options"])], ENVIRONMENT)
            self.serve(sandbox["options"], link)
        except BaseException as error:  # once the keeper's socket is closed, the end of the sandbox's connection reports the failure
            self._report({"id": sandbox["id"], "failed": str(error), "errno": getattr(error, "errno", None)})
        finally:
            os._exit(1)

    def _keep_only(self, handed: dict[str, int]) -> socket.socket:
        """Closes every descriptor except the descriptors that the host sent for this sandbox. Returns the sandbox's connection to the
        host."""
        os.setsid()
        nothing = os.open("/dev/null", os.O_RDWR)
        targets = {number: handed[name] for name, number in (("link", HOST_FD), ("egress", EGRESS_FD)) if name in handed}
        moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for number, fd in targets.items()}
        for number, fd in {0: nothing, 1: nothing, 2: nothing, **moved}.items():
            os.dup2(fd, number, inheritable=number <= 2)
        os.closerange(max(targets) + 1, SERVER_FILES)
        self.host.detach()
        return socket.socket(fileno=HOST_FD)
