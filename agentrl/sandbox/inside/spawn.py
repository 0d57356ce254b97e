"""The start of programs: a child waits, forked and made ready ahead of need, so that a call waits only for the program itself.

The server forks it after a reply, when nobody waits for anything. It is still the server's user, out of reach of programs left
running, and in a place that a program has under the limit on processes. It becomes the snippet or the session that it is given;
a program it launches (see `launch`), and waits again after it. While a snippet runs there is none; during a call in a session one
goes on waiting.
What it is to do comes as the first bytes of its standard input; what follows is the program's own.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import struct

from agentrl.sandbox.inside.child import rehearse, run_argv, run_snippet
from agentrl.sandbox.inside.launch import Launcher, launches
from agentrl.sandbox.inside.session import CONTROL, run_session
from agentrl.sandbox.inside.users import HOME, SERVER_FILES, VICTIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from agentrl.sandbox.inside.users import Users

NOT_STARTED, FAULT = 126, 1
"""How a child ends that fails: before it is the agent's, which the server sees and takes for no program's end, and as the agent."""
WORK_SIZE = struct.Struct("=Q")
KINDS_OF_WORK: dict[str, Callable[[Any], int]] = {"exec": run_argv, "python": run_snippet, "session": run_session}


class Pipes:
    """Standard input, output and error of a program: the server's ends, which never block, and the program's, in `theirs`."""

    def __init__(self) -> None:
        (stdin, self.stdin), (self.stdout, stdout), (self.stderr, stderr) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        self.theirs = [stdin, stdout, stderr]
        self.ours = [self.stdin, self.stdout, self.stderr]
        for fd in self.ours:
            os.set_blocking(fd, False)

    def handed_over(self) -> None:
        for fd in self.theirs:
            os.close(fd)

    def close(self) -> None:
        """For a program that never ran."""
        for fd in self.ours:
            os.close(fd)


class Waiting:
    """A child that waits for its work, likely of the kind `likely`. Raises `OSError` where there is no room for one."""

    def __init__(self, users: Users, likely: str) -> None:
        self.pipes = Pipes()
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        try:
            self.pid = os.fork()
        except OSError:
            self.pipes.handed_over()
            self.close()
            raise
        if self.pid == 0:
            wait_and_work(users, likely, self.pipes, control.fileno())
        self.pipes.handed_over()
        control.close()

    def again(self) -> bool:
        """Hands over the pipes of the next program to a child that has launched one; False when it does not take them."""
        self.pipes = Pipes()
        try:
            socket.send_fds(self.control, [b"\0"], self.pipes.theirs)
        except OSError:
            return False
        finally:
            self.pipes.handed_over()
        return True

    def close(self) -> None:
        """For one that has died waiting."""
        self.pipes.close()
        self.control.close()


def work(kind: str, argument: Any, has_stdin: bool = False) -> bytes:
    """What a waiting child is told, ahead of the program's standard input."""
    text = marshal.dumps((kind, argument, has_stdin))
    return WORK_SIZE.pack(len(text)) + text


# In the child ---------------------------------------------------------------------------------------------------------


def wait_and_work(users: Users, likely: str, pipes: Pipes, control: int) -> NoReturn:
    """Makes a forked child the leader of a session with its own pipes, waits, does its work as the agent, and never returns."""
    status = NOT_STARTED
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
        victim = users.open_victim()
        rehearse(likely)
        kind, argument, has_stdin = taken_work()
        if kind == "exec" and launches(users):
            launcher = Launcher(users, victim, CONTROL)
            while kind == "exec" and launcher.launch(argument, has_stdin):
                kind, argument, has_stdin = taken_work()
            launcher.close()
        os.write(victim, VICTIM)
        os.close(victim)
        if not has_stdin:
            nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(nothing, 0)
            os.close(nothing)
        if kind != "session":
            os.close(CONTROL)
        users.become_agent()
        status = FAULT
        status = KINDS_OF_WORK[kind](argument)
    except BaseException as error:
        os.write(2, (f"agentrl: {error!r}\n").encode())
    finally:
        os._exit(status)


def taken_work() -> tuple[str, Any, bool]:
    """What this process is to do; ends it when the server has gone."""
    (size,) = WORK_SIZE.unpack(taken(WORK_SIZE.size))
    kind, argument, has_stdin = marshal.loads(taken(size))
    return kind, argument, has_stdin


def taken(size: int) -> bytes:
    """The next `size` bytes of standard input; ends the process when the server has gone."""
    parts = []
    while size:
        data = os.read(0, size)
        if not data:
            os._exit(0)
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
