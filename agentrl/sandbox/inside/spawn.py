"""The start of programs: a child is forked and prepared ahead of need, so that a call waits only for the program itself.

The server forks it after a reply. The child is still the server's user, out of reach of programs that were left running, and counts
towards the limit on processes. It becomes the snippet or the session that it receives, or launches a program (see `launch`) and waits
again. While a snippet runs there is none; during a call in a session one keeps waiting. The first bytes of its standard input describe
its work; the rest is the program's own.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import struct

from agentrl.sandbox.inside.child import rehearse, run_argv, run_snippet
from agentrl.sandbox.inside.launch import Launcher, can_launch
from agentrl.sandbox.inside.session import CONTROL, run_session
from agentrl.sandbox.inside.users import HOME, OOM_SCORE, SERVER_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from agentrl.sandbox.inside.users import Users

_NOT_STARTED, _FAULT = 126, 1
"""Exit codes of a child that fails before it belongs to the agent, which the server distinguishes from a program's end, and after."""
_WORK_SIZE = struct.Struct("=Q")
_RUNNERS: dict[str, Callable[[Any], int]] = {"exec": run_argv, "python": run_snippet, "session": run_session}


class Pipes:
    """Standard input, output and error of a program: the server's ends, which never block, and the program's, in `theirs`."""

    def __init__(self) -> None:
        (stdin, self.stdin), (self.stdout, stdout), (self.stderr, stderr) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        self.theirs = [stdin, stdout, stderr]
        self.ours = [self.stdin, self.stdout, self.stderr]
        for fd in self.ours:
            os.set_blocking(fd, False)

    def close_theirs(self) -> None:
        """Closes the program's ends, after it has them."""
        for fd in self.theirs:
            os.close(fd)

    def close(self) -> None:
        """Closes the server's ends, for a program that never ran."""
        for fd in self.ours:
            os.close(fd)


class WaitingChild:
    """A child that waits for its work, probably of the kind `likely`. Raises `OSError` if it cannot be forked."""

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
        """Sends the pipes of the next program to a child that has launched one. False if it does not accept them."""
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
    """The description of a waiting child's work, which precedes the program's standard input."""
    text = marshal.dumps((kind, argument, has_stdin))
    return _WORK_SIZE.pack(len(text)) + text


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
    (size,) = _WORK_SIZE.unpack(_read_stdin(_WORK_SIZE.size))
    kind, argument, has_stdin = marshal.loads(_read_stdin(size))
    return kind, argument, has_stdin


def _read_stdin(size: int) -> bytes:
    """The next `size` bytes of standard input. Exits if the server has ended."""
    pieces = []
    while size:
        data = os.read(0, size)
        if not data:
            os._exit(0)
        pieces.append(data)
        size -= len(data)
    return b"".join(pieces)
