"""Process 1 of a container that several sandboxes share: it forks each one's first process and clears up after it, and nothing else.

    python3 -I exec_server.pyc keep:/agentrl/link

The host asks over a socket of packets, and hands each sandbox's own connection over with the question; the keeper has no part in what
goes over it. No program runs as the keeper's user, in its namespaces, or where it could send it anything: it reads from the host alone.
When the host hangs up it ends, and the kernel ends every process of the container.

A sandbox's first process has the modules of the exec server in memory already, which is most of what an exec server costs to start.
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

from agentrl.sandbox.inside.room import CLONE_NEWPID, Groups, last_error, move_in
from agentrl.sandbox.inside.users import ENVIRONMENT, LIBC, SERVER_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from agentrl.sandbox.inside.wire import Request

    Serve = Callable[[Request, socket.socket], None]

PACKET = 1 << 17
MOST_DESCRIPTORS = 3
AGAIN_MS = 5
HOST_FD, EGRESS_FD = 3, 4
"""Descriptors of a sandbox's first process: its connection to the host, and to whom it hands its listener."""
OUT_OF_THE_WAY = 64
STAND_IN = "/agentrl/exec_server.py"


class Keeper:
    """The container's end of the conversation with the host. `serve` turns a process into the exec server of a sandbox."""

    def __init__(self, host: socket.socket, serve: Serve) -> None:
        self.host, self.serve = host, serve
        self.groups = Groups()
        self.own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.rooms: dict[int, Request] = {}  # by the pid of each one's first process
        self.leaving: list[Request] = []  # whose processes are gone and whose control groups are not yet
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        """Never returns; says that it is ready, or what it cannot do."""
        try:
            self.groups.open_up()
        except OSError as error:
            self.say({"cannot": str(error), "errno": error.errno})
            os._exit(1)
        self.say({"ready": True})
        gc.freeze()
        poll = select.poll()
        poll.register(self.host, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll(AGAIN_MS if self.leaving else None):
                if fd == self.wake:
                    self.reap()
                else:
                    self.answer()
            self.see_off()

    def say(self, what: Request) -> None:
        try:
            self.host.send(json.dumps(what).encode())
        except OSError:  # the host is gone, or does not listen
            os._exit(0)

    def answer(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.host, PACKET, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if request["op"] == "open":
            self.open(request, fds)
        else:
            for pid, room in self.rooms.items():
                if room["id"] == request["id"]:
                    os.kill(pid, signal.SIGKILL)
        for fd in fds:
            os.close(fd)

    def open(self, room: Request, fds: list[int]) -> None:
        """Forks the first process of a sandbox, in a pid namespace of its own."""
        pid = 0
        try:
            if LIBC.unshare(CLONE_NEWPID) != 0:
                raise last_error("a new pid namespace")
            pid = os.fork()
            if pid == 0:
                self.become(room, fds)
        except OSError as error:
            self.say({"id": room["id"], "failed": str(error), "errno": error.errno})
            self.say({"id": room["id"], "ended": True})
        finally:
            if LIBC.setns(self.own, CLONE_NEWPID) != 0:
                os._exit(1)
        if pid:
            self.rooms[pid] = room

    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            room = self.rooms.pop(pid, None)
            if room is not None:
                self.leaving.append(room)

    def see_off(self) -> None:
        """Removes the control groups of sandboxes that have ended, and tells the host."""
        for room in self.leaving[:]:
            if self.groups.remove(room["name"]):
                self.leaving.remove(room)
                self.say({"id": room["id"], "ended": True})

    # In the first process of a sandbox ---------------------------------------------------------------------------------

    def become(self, room: Request, fds: list[int]) -> NoReturn:
        """Makes the sandbox around this process and goes on as its exec server; tells the host what is in the way."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handed = {name: fds[number] for number, name in enumerate(room["handed"])}
            program = content_of(handed["program"]) if "program" in handed else b""
            move_in(room, self.groups, program)
            link = self.keep_only(handed)
            if program:
                for fd in range(HOST_FD, EGRESS_FD + ("egress" in handed)):
                    os.set_inheritable(fd, True)
                os.execvpe("python3", ["python3", "-I", STAND_IN, f"fd:{HOST_FD}", json.dumps(room["options"])], ENVIRONMENT)
            self.serve(room["options"], link)
        except BaseException as error:  # once the host's socket is closed the end of the sandbox's own connection says it
            self.say({"id": room["id"], "failed": str(error), "errno": getattr(error, "errno", None)})
        finally:
            os._exit(1)

    def keep_only(self, handed: dict[str, int]) -> socket.socket:
        """Closes everything but what this sandbox was handed; gives its connection to the host."""
        os.setsid()
        nothing = os.open("/dev/null", os.O_RDWR)
        kept = {number: handed[name] for name, number in (("link", HOST_FD), ("egress", EGRESS_FD)) if name in handed}
        moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, OUT_OF_THE_WAY) for number, fd in kept.items()}
        for number, fd in {0: nothing, 1: nothing, 2: nothing, **moved}.items():
            os.dup2(fd, number, inheritable=number <= 2)
        os.closerange(max(kept) + 1, SERVER_FILES)
        self.host.detach()
        return socket.socket(fileno=HOST_FD)


def content_of(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read()
