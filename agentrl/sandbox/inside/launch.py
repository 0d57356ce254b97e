"""The launch of a program by the waiting child, which goes on waiting afterwards.

A process that turns into a program is forked from the server, and then throws its copy of the server's memory away: more work than
most programs are. So the waiting child starts the program beside itself, as posix_spawn does, without a copy. It waits for the
end, says how that was, and is ready for what comes next. Where it cannot, it becomes the program itself.

A program has to be the agent's from its first instruction, and may signal what is the agent's. The kernel keeps ids for each thread,
and when a process is signalled asks for those of its first. So a thread of its own takes the agent's, and starts the program.
"""

from __future__ import annotations

import _thread
import os
import socket
import struct

from agentrl.sandbox.inside.child import candidates
from agentrl.sandbox.inside.users import ENVIRONMENT, LIBC, VICTIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.spawn import Waiting
    from agentrl.sandbox.inside.users import Users

    Argument = tuple[list[str], dict[str, str] | None]

SET_IDS = {"x86_64": (119, 117), "aarch64": (149, 147)}.get(os.uname().machine, ())
"""Numbers of the system calls setresgid and setresuid. The C library's functions of these names change every thread."""
FEWEST_FILES = 16
"""What the waiting child itself has open, under the limit that the program will have, fits in this many."""
SAID = struct.Struct("=i")
ITSELF = -1


def launches(users: Users) -> bool:
    """Whether waiting children launch programs: not where these, having the same user, could stop them."""
    return users.server != users.agent and bool(SET_IDS) and users.open_files >= FEWEST_FILES


class Launch:
    """What the server knows of a program that a waiting child was asked to launch."""

    def __init__(self, child: Waiting) -> None:
        self.control = child.control
        self.said: int | None = None

    def through(self) -> int | None:
        """Reads what the child says: how the program ended, in the kernel's form. None when it does not say, or has become it."""
        if self.said is None:
            try:
                packet = self.control.recv(SAID.size)
            except OSError:
                packet = b""
            if packet:
                (self.said,) = SAID.unpack(packet)
        return None if self.said == ITSELF else self.said


# In the child ---------------------------------------------------------------------------------------------------------


class Launcher:
    """What a waiting child launches with; no program inherits its descriptors."""

    def __init__(self, users: Users, victim: int, control: int) -> None:
        self.users, self.victim = users, victim
        self.spared = os.pread(victim, 16, 0)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=control)
        self.nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def launch(self, argument: Argument, has_stdin: bool) -> bool:
        """Runs a program to its end, and takes the next one's pipes; False when this process is to become the program."""
        pids: list[int] = []
        done = _thread.allocate_lock()
        done.acquire()

        def launch_and_wait() -> None:
            try:
                pids.append(self.started(argument, has_stdin))
            except Exception:  # whatever it is, who becomes the program meets it again, and says so
                pass
            else:
                self.see_out(pids[0])
            done.release()

        try:
            _thread.start_new_thread(launch_and_wait, ())
            done.acquire()
        except RuntimeError:  # no room for a thread
            pass
        if not pids:
            self.say(ITSELF)
            return False
        self.take_pipes()
        return True

    def started(self, argument: Argument, has_stdin: bool) -> int:
        """Process id of the program, which this thread starts as the agent. Raises whatever it is that does not allow it."""
        agent, server = self.users.agent, self.users.server
        os.write(self.victim, VICTIM)
        self.users.lower_priority()  # not by posix_spawn, which refuses this policy
        try:
            take_ids(agent, agent, server)  # with the server's as the third, this process's limits stay out of reach
            return spawned(argument, has_stdin)
        finally:
            take_ids(server, server, server)
            os.write(self.victim, self.spared)

    def see_out(self, pid: int) -> None:
        """Waits for the end of the program. The thread stays as long: to the kernel it is the parent, whose end a program may mind."""
        for number in range(3):  # a pipe is at its end when the program, and what it leaves, have closed it
            os.dup2(self.nowhere, number)
        _, status = os.waitpid(pid, 0)
        self.say(status)

    def say(self, status: int) -> None:
        """Tells the server; ends the process when that has gone."""
        try:
            self.control.send(SAID.pack(status))
        except OSError:
            os._exit(0)

    def take_pipes(self) -> None:
        """Waits for the next program's pipes, to be this process's own meanwhile; ends it when the server has gone."""
        packet, pipes, _, _ = socket.recv_fds(self.control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            os._exit(0)
        for number, fd in enumerate(pipes):
            os.dup2(fd, number)
            os.close(fd)

    def close(self) -> None:
        """Before this process becomes something else; what it hears from the server by stays open."""
        os.close(self.nowhere)
        self.control.detach()


def take_ids(real: int, effective: int, saved: int) -> None:
    """Gives this thread users and groups of these numbers."""
    for number in SET_IDS:
        if LIBC.syscall(number, real, effective, saved) != 0:
            os._exit(70)  # it is nobody then that it should be


def spawned(argument: Argument, has_stdin: bool) -> int:
    """Process id of a program that this thread starts; by becoming the program, its process gives up the third id and all rights."""
    argv, changes = argument
    environment = {**ENVIRONMENT, **(changes or {})}
    path = next(place for place in candidates(argv[0], environment) if os.access(place, os.X_OK))
    actions = [] if has_stdin else [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
    return os.posix_spawn(path, argv, environment, file_actions=actions, setsid=True)
