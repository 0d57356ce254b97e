"""What a forked child runs as the agent: a program, Python code in its own interpreter, or a session.

A session is an interpreter that persists between calls and keeps its names. The server sends the session the pipes of each call through a
socket, and the session replies with the call's status. The server accepts nothing else from a session. A forged status affects only its
call, whose code can choose the exit status anyway. If a session sends any other packet, the server kills it. The kernel reports to the
server how a session ended, as it does for a program.
"""

from __future__ import annotations

import _ast
import atexit
import collections
import contextlib
import csv
import datetime
import errno
import os
import re
import signal
import socket
import struct
import sys
import types

from agentrl.sandbox.inside.users import ENVIRONMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agentrl.sandbox.inside.spawn import Pipes, WaitingChild

# Imported so that these modules are already loaded in snippets, which are forked from this process.
_PRELOADED = (collections, csv, datetime, re)
_NOWHERE = "/dev/null/nowhere"
MAX_SESSIONS = 4
"""Maximum number of session names over the life of a sandbox."""
CONTROL = 3
"""Descriptor of the socket in the session's process."""
_PACKET = struct.Struct("=IB")  # number of the call, and its status


def run_argv(argument: tuple[list[str], dict[str, str] | None]) -> int:
    """Replaces this process with a program. If the program cannot start, returns the exit status that a shell would return."""
    argv, changes = argument
    environment = {**ENVIRONMENT, **(changes or {})}
    refused: int | None = errno.ENOENT
    for path in candidates(argv[0], environment):
        try:
            os.execve(path, argv, environment)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = error.errno
    os.write(2, (f"agentrl: {argv[0]}: {os.strerror(refused or 0)}\n").encode("utf-8", "replace"))
    return 126 if refused == errno.EACCES else 127


def candidates(name: str, environment: dict[str, str]) -> list[str]:
    """Returns the paths where a program of this name may be. Used instead of `os.execvpe`, which needs a millisecond to import
    `warnings`."""
    if "/" in name:
        return [name]
    return [f"{folder}/{name}" for folder in environment.get("PATH", os.defpath).split(":")]


def reset_interpreter() -> None:
    """Resets this interpreter to the state in which `python3 -I -c` starts. Called before the interpreter runs any code of the agent."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main


def rehearse(kind: str) -> None:
    """Performs work of the kind `kind` without effect, so that the memory pages that such work writes to, which are shared with the server,
    are copied in advance."""
    if kind == "exec":
        with contextlib.suppress(OSError):
            os.execve(_NOWHERE, [_NOWHERE], ENVIRONMENT)
    else:
        exec(compile("len(())", "<string>", "exec", dont_inherit=True), {})
        sys.stdout.flush()


def set_signal_handlers() -> None:
    """Sets the signal handlers that an interpreter sets when it starts."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_snippet(code: bytes) -> int:
    """Runs `code` in this forked interpreter as `python3 -I -c` does. Returns the exit status."""
    set_signal_handlers()
    status = 0
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    except SystemExit as stop:
        status = exit_status(stop)
    except BaseException as error:
        status = 1
        report(error)
    return finish(status)


def report(error: BaseException) -> None:
    """Prints an uncaught exception as the interpreter does, without this file's frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def exit_status(stop: SystemExit) -> int:
    """Returns the exit status of an interpreter that exits with `stop`. Prints the message of `stop`, if any."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def finish(status: int) -> int:
    """Shuts this interpreter down: waits for threads, runs exit handlers, flushes the output. Returns `status`, or 120 if it is 0 and the
    output cannot be flushed."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # the program may have replaced the stream
            status = status or 120
    return status


# Sessions -------------------------------------------------------------------------------------------------------------


class Session:
    """The server's end of a session."""

    def __init__(self, child: WaitingChild) -> None:
        self.pid, self.control = child.pid, child.control
        self.calls = 1
        self.alive = True

    def begin(self, pipes: Pipes) -> bool:
        """Sends the pipes of the next call; the session reads the code from the first pipe. Returns False if the session cannot receive
        them."""
        self.calls += 1
        try:
            socket.send_fds(self.control, [_PACKET.pack(self.calls, 0)], pipes.theirs)
        except OSError:
            self.end()
            return False
        return True

    def read_status(self) -> int | None:
        """Reads a packet and returns the call's status in the form of waitpid(2).

        If the packet is invalid or the connection is closed, kills the session and returns None.
        """
        try:
            packet = self.control.recv(_PACKET.size + 1)
        except OSError:
            packet = b""
        if len(packet) == _PACKET.size:
            number, status = _PACKET.unpack(packet)
            if number == self.calls and status in (0, 1):
                return int(status) << 8
        self.end()
        return None

    def end(self) -> None:
        """Kills the session. `alive` becomes False when the kernel reports that the session has exited."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)


def run_session(code: bytes) -> int:
    """Runs calls one after the other until a call exits the interpreter. Returns the interpreter's exit status."""
    set_signal_handlers()
    control = socket.socket(fileno=CONTROL)
    os.register_at_fork(after_in_child=control.close)
    process, number = os.getpid(), 1
    while True:
        try:
            status = _run_input(code, f"<call {number}>", sys.modules["__main__"].__dict__)
        except SystemExit as stop:
            return finish(exit_status(stop))
        if os.getpid() != process:  # a child that the code forked, and that reached the end of the code
            return finish(status)
        _silence_output()
        control.send(_PACKET.pack(number, status))
        packet, pipes, _, _ = socket.recv_fds(control, _PACKET.size, 3, socket.MSG_CMSG_CLOEXEC)
        if not packet:  # the server has ended
            os._exit(0)
        source, stdout, stderr = pipes
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        number = int(_PACKET.unpack(packet)[0])
        with open(source, "rb") as file:
            code = file.read()


def _run_input(code: bytes, name: str, names: dict[str, Any]) -> int:
    """Runs `code`, and prints the value of a final expression like an interactive interpreter. Returns 1 after an
    exception and 0 otherwise. Raises `SystemExit` if the code does."""
    try:
        tree = compile(code, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, _ast.Module)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], _ast.Expr) else []
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        exec(compile(_ast.Interactive(last), name, "single", dont_inherit=True), names)
    except SystemExit:
        raise
    except BaseException as error:
        report(error)
        return 1
    return 0


def _silence_output() -> None:
    """Ends the output of a call. What threads of the session print until the next call is discarded."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # the code may have replaced the stream
            stream.flush()  # type: ignore[union-attr]
    nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
