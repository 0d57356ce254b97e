"""Launch of a program by the waiting child, which then waits again.

A child that turns into a program discards its copy of the server's memory: more work than most programs do. So it starts the program with
posix_spawn(3), without a copy, reports its end, and is ready for the next one. If it cannot, it turns into the program itself.

A program must belong to the agent from its first instruction, and may signal every process of the agent. The kernel keeps user ids per
thread, and checks signals against the ids of a process's first thread. So a second thread takes the agent's ids and starts the program.
"""

from __future__ import annotations

import _thread
import os
import socket
import struct

from agentrl.sandbox.inside.child import candidates
from agentrl.sandbox.inside.users import ENVIRONMENT, LIBC, OOM_SCORE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.spawn import WaitingChild
    from agentrl.sandbox.inside.users import Users

    Argument = tuple[list[str], dict[str, str] | None]

_SET_IDS = {"x86_64": (119, 117), "aarch64": (149, 147)}.get(os.uname().machine, ())
"""Numbers of the system calls setresgid and setresuid. The C library's functions of these names change every thread."""
_FEWEST_FILES = 16  # under the program's limit, the waiting child's own descriptors fit in this many
_STATUS = struct.Struct("=i")
_BECOMES_PROGRAM = -1


def can_launch(users: Users) -> bool:
    """Whether waiting children launch programs. Without a second user, programs could signal them."""
    return users.server != users.agent and bool(_SET_IDS) and users.open_files >= _FEWEST_FILES


class Launch:
    """The server's end: a program that a waiting child launches."""

    def __init__(self, child: WaitingChild) -> None:
        self.control = child.control
        self.status: int | None = None

    def read_status(self) -> int | None:
        """The program's status, in the form of waitpid(2), once the child reports it. None if it does not, or becomes the program."""
        if self.status is None:
            try:
                packet = self.control.recv(_STATUS.size)
            except OSError:
                packet = b""
            if packet:
                (self.status,) = _STATUS.unpack(packet)
        return None if self.status == _BECOMES_PROGRAM else self.status


class Launcher:
    """The child's end. No program inherits its descriptors."""

    def __init__(self, users: Users, victim: int, control: int) -> None:
        self.users, self.victim = users, victim
        self.own_score = os.pread(victim, 16, 0)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=control)
        self.nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def launch(self, argument: Argument, has_stdin: bool) -> bool:
        """Runs a program to its end, and receives the next one's pipes. False if this process must become the program."""
        pids: list[int] = []
        done = _thread.allocate_lock()
        done.acquire()

        def launch_and_wait() -> None:
            try:
                pids.append(self._start(argument, has_stdin))
            except Exception:  # this process becomes the program instead, and reports the same error
                pass
            else:
                self._wait_for(pids[0])
            done.release()

        try:
            _thread.start_new_thread(launch_and_wait, ())
            done.acquire()
        except RuntimeError:  # no thread can start
            pass
        if not pids:
            self._report(_BECOMES_PROGRAM)
            return False
        packet, pipes, _, _ = socket.recv_fds(self.control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        if not packet:  # the server has ended
            os._exit(0)
        for number, fd in enumerate(pipes):
            os.dup2(fd, number)
            os.close(fd)
        return True

    def _start(self, argument: Argument, has_stdin: bool) -> int:
        """Starts the program as the agent, from this thread. Returns its pid, or raises what prevents it."""
        agent, server = self.users.agent, self.users.server
        os.write(self.victim, OOM_SCORE)
        self.users.lower_priority()  # posix_spawn does not support this policy
        try:
            _set_ids(agent, agent, server)  # the saved id stays the server's, so programs cannot change this process's limits
            return _spawn(argument, has_stdin)
        finally:
            _set_ids(server, server, server)
            os.write(self.victim, self.own_score)

    def _wait_for(self, pid: int) -> None:
        """Waits for the end of the program in the thread that started it, because a program may react to the end of its parent thread."""
        for number in range(3):  # a pipe ends once the program, and what it leaves behind, have closed it
            os.dup2(self.nowhere, number)
        _, status = os.waitpid(pid, 0)
        self._report(status)

    def _report(self, status: int) -> None:
        try:
            self.control.send(_STATUS.pack(status))
        except OSError:  # the server has ended
            os._exit(0)

    def close(self) -> None:
        """Prepares this process to become something else. The connection to the server stays open."""
        os.close(self.nowhere)
        self.control.detach()


def _set_ids(real: int, effective: int, saved: int) -> None:
    """Sets the user and group ids of this thread only."""
    for number in _SET_IDS:
        if LIBC.syscall(number, real, effective, saved) != 0:
            os._exit(70)  # it must not continue as the wrong user


def _spawn(argument: Argument, has_stdin: bool) -> int:
    """Starts a program from this thread, and returns its pid. Executing it drops the saved id and all capabilities."""
    argv, changes = argument
    environment = {**ENVIRONMENT, **(changes or {})}
    path = next(path for path in candidates(argv[0], environment) if os.access(path, os.X_OK))
    actions = [] if has_stdin else [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
    return os.posix_spawn(path, argv, environment, file_actions=actions, setsid=True)
