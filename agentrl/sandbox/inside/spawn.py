"""Starts programs. A child process is forked and prepared before it is needed, so that a call waits only for the program.

The server forks the child after a reply. The waiting child runs as the server's user, so programs that were left running cannot reach it.
The child counts towards the limit on processes. The child becomes the snippet or the session that it receives, or launches a program and
waits again. No child waits while a snippet runs; a child waits during a call in a session. The first bytes of a child's standard input
describe its work; the rest is the program's input.

If the child became the program, it would discard its copy of the server's memory, which is more work than most programs do. So the child
launches programs with posix_spawn(3), which does not copy the memory. If posix_spawn fails, the child becomes the program. A program must
belong to the agent from its first instruction, and may signal every process of the agent. The kernel keeps user ids per thread, and checks
signals against the ids of a process's first thread. So a second thread assumes the agent's ids and starts the program.
"""

from __future__ import annotations

import _thread
import marshal
import os
import signal
import socket
import struct

from agentrl.sandbox.inside.child import CONTROL, candidates, rehearse, run_argv, run_session, run_snippet
from agentrl.sandbox.inside.users import ENVIRONMENT, HOME, LIBC, OOM_SCORE, SERVER_FILES
from agentrl.sandbox.inside.wire import read_exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from agentrl.sandbox.inside.users import Users

    Argument = tuple[list[str], dict[str, str] | None]

_NOT_STARTED, _FAULT = 126, 1
"""Exit codes of a child that fails before, or after, it belongs to the agent. The first code shows the server that no program ran."""
_WORK_SIZE = struct.Struct("=Q")
_RUNNERS: dict[str, Callable[[Any], int]] = {"exec": run_argv, "python": run_snippet, "session": run_session}

_SET_IDS = {"x86_64": (119, 117), "aarch64": (149, 147)}.get(os.uname().machine, ())
"""Numbers of the system calls setresgid and setresuid. The C library functions of these names change the ids of every thread."""
_FEWEST_FILES = 16  # descriptors of the waiting child, which count towards the program's limit, fit in this number
_STATUS = struct.Struct("=i")
_BECOMES_PROGRAM = -1


class Pipes:
    """Standard input, output and error of a program: the server's ends, which never block, and the program's ends (`theirs`)."""

    def __init__(self) -> None:
        (stdin, self.stdin), (self.stdout, stdout), (self.stderr, stderr) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        self.theirs = [stdin, stdout, stderr]
        self.ours = [self.stdin, self.stdout, self.stderr]
        for fd in self.ours:
            os.set_blocking(fd, False)

    def close_theirs(self) -> None:
        """Closes the program's ends after the program has received them."""
        for fd in self.theirs:
            os.close(fd)

    def close(self) -> None:
        """Closes the server's ends if the program never ran."""
        for fd in self.ours:
            os.close(fd)


class WaitingChild:
    """A child that waits for its work, which is probably of the kind `likely`. Raises `OSError` if no process or descriptor is free."""

    def __init__(self, users: Users, likely: str) -> None:
        self.pipes = Pipes()
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        try:
            self.pid = os.fork()
        except OSError:
            self.pipes.close_theirs()
            self.close()
            raise
        if self.pid == 0:
            _wait_and_work(users, likely, self.pipes, control.fileno())
        self.pipes.close_theirs()
        control.close()

    def reuse(self) -> bool:
        """Sends the pipes of the next program to a child that has launched a program. Returns False if the child cannot receive them.
        Raises `OSError` if no descriptor is free."""
        self.pipes = Pipes()
        try:
            socket.send_fds(self.control, [b"\0"], self.pipes.theirs)
        except OSError:
            return False
        finally:
            self.pipes.close_theirs()
        return True

    def close(self) -> None:
        """Closes the descriptors of a child that died while it waited."""
        self.pipes.close()
        self.control.close()


def work(kind: str, argument: Any, has_stdin: bool = False) -> bytes:
    """Returns the description of a waiting child's work, which precedes the program's standard input."""
    text = marshal.dumps((kind, argument, has_stdin))
    return _WORK_SIZE.pack(len(text)) + text


def can_launch(users: Users) -> bool:
    """Whether waiting children launch programs instead of becoming them. False if there is no second user (programs could signal the
    children), on architectures that `_SET_IDS` lacks, and if a program may open fewer than `_FEWEST_FILES` files."""
    return users.server != users.agent and bool(_SET_IDS) and users.open_files >= _FEWEST_FILES


class Launch:
    """The server's end of the connection to a waiting child that launches a program."""

    def __init__(self, child: WaitingChild) -> None:
        self.control = child.control
        self.status: int | None = None

    def read_status(self) -> int | None:
        """Returns the program's status in the form of waitpid(2); None if the child does not report a status, or becomes the program."""
        if self.status is None:
            try:
                packet = self.control.recv(_STATUS.size)
            except OSError:
                packet = b""
            if packet:
                (self.status,) = _STATUS.unpack(packet)
        return None if self.status == _BECOMES_PROGRAM else self.status


class Launcher:
    """Launches programs in a waiting child. No program inherits the descriptors of this object."""

    def __init__(self, users: Users, victim: int, control: int) -> None:
        self.users, self.victim = users, victim
        self.own_score = os.pread(victim, 16, 0)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=control)
        self.nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def launch(self, argument: Argument, has_stdin: bool) -> bool:
        """Runs a program until it exits, and receives the next program's pipes. Returns False if this process must become the program."""
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
        """Starts the program as the agent, from this thread. Returns its pid. Raises an exception if the program cannot start."""
        agent, server = self.users.agent, self.users.server
        os.write(self.victim, OOM_SCORE)
        self.users.lower_priority()  # posix_spawn cannot set this policy
        try:
            _set_ids(agent, agent, server)  # the saved id stays the server's, so programs cannot change this process's limits
            return _spawn(argument, has_stdin)
        finally:
            _set_ids(server, server, server)
            os.write(self.victim, self.own_score)

    def _wait_for(self, pid: int) -> None:
        """Waits for the program to exit, in the thread that started it, because a program may react when its parent thread exits."""
        for number in range(3):  # a pipe ends when the program and the processes that it leaves behind have closed it
            os.dup2(self.nowhere, number)
        _, status = os.waitpid(pid, 0)
        self._report(status)

    def _report(self, status: int) -> None:
        try:
            self.control.send(_STATUS.pack(status))
        except OSError:  # the server has ended
            os._exit(0)

    def close(self) -> None:
        """Prepares this process to become a program, snippet or session. The connection to the server stays open."""
        os.close(self.nowhere)
        self.control.detach()


def _set_ids(real: int, effective: int, saved: int) -> None:
    """Sets the user and group ids of this thread only. Exits this process on failure."""
    for number in _SET_IDS:
        if LIBC.syscall(number, real, effective, saved) != 0:
            os._exit(70)  # it must not continue as the wrong user


def _spawn(argument: Argument, has_stdin: bool) -> int:
    """Starts a program from this thread and returns its pid. Executing the program drops the saved id and all capabilities."""
    argv, changes = argument
    environment = {**ENVIRONMENT, **(changes or {})}
    path = next(path for path in candidates(argv[0], environment) if os.access(path, os.X_OK))
    actions = [] if has_stdin else [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
    return os.posix_spawn(path, argv, environment, file_actions=actions, setsid=True)


def _wait_and_work(users: Users, likely: str, pipes: Pipes, control: int) -> NoReturn:
    """Prepares a forked child, waits, does its work as the agent, and exits."""
    status = _NOT_STARTED
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for standard, fd in enumerate(pipes.theirs):
            os.dup2(fd, standard)
        os.dup2(control, CONTROL, inheritable=False)
        os.closerange(CONTROL + 1, SERVER_FILES)
        os.chdir(HOME)
        users.limit_program()
        victim = users.open_oom_score()
        rehearse(likely)
        kind, argument, has_stdin = _read_work()
        if kind == "exec" and can_launch(users):
            launcher = Launcher(users, victim, CONTROL)
            while kind == "exec" and launcher.launch(argument, has_stdin):
                kind, argument, has_stdin = _read_work()
            launcher.close()
        os.write(victim, OOM_SCORE)
        os.close(victim)
        if not has_stdin:
            nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(nothing, 0)
            os.close(nothing)
        if kind != "session":
            os.close(CONTROL)
        users.become_agent()
        status = _FAULT
        status = _RUNNERS[kind](argument)
    except BaseException as error:
        os.write(2, (f"agentrl: {error!r}\n").encode())
    finally:
        os._exit(status)


def _read_work() -> tuple[str, Any, bool]:
    (size,) = _WORK_SIZE.unpack(read_exactly(0, _WORK_SIZE.size))
    kind, argument, has_stdin = marshal.loads(read_exactly(0, size))
    return kind, argument, has_stdin
