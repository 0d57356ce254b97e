"""A session: an interpreter of the agent that persists between calls and keeps its names.

The server sends it the pipes of each call through a socket, and the session answers with the call's status. The server accepts nothing
else from it, and the status concerns only that call, whose code could have ended with any status anyway. Any other packet ends the
session. The kernel reports to the server how a session ended, as for a program.
"""

from __future__ import annotations

import _ast
import contextlib
import os
import signal
import socket
import struct
import sys

from agentrl.sandbox.inside.child import exit_status, finish, report, set_signal_handlers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agentrl.sandbox.inside.spawn import Pipes, WaitingChild

MAX_SESSIONS = 4
"""Number of session names in the life of a sandbox."""
CONTROL = 3
"""Descriptor of the socket in the session's process."""
_PACKET = struct.Struct("=IB")  # number of the call, and its status


class Session:
    """The server's end of a session."""

    def __init__(self, child: WaitingChild) -> None:
        self.pid, self.control = child.pid, child.control
        self.calls = 1
        self.alive = True

    def begin(self, pipes: Pipes) -> bool:
        """Sends the pipes of the next call, whose code the session reads from the first one. False if it does not accept them."""
        self.calls += 1
        try:
            socket.send_fds(self.control, [_PACKET.pack(self.calls, 0)], pipes.theirs)
        except OSError:
            self.end()
            return False
        return True

    def read_status(self) -> int | None:
        """Reads a packet: the call's status, in the form of waitpid(2). None, and the end of the session, for anything else."""
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
        """Kills the session. `alive` becomes False once the kernel reports its end."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)


def run_session(code: bytes) -> int:
    """Runs one call after the other until one ends the interpreter. Returns its exit status."""
    set_signal_handlers()
    control = socket.socket(fileno=CONTROL)
    os.register_at_fork(after_in_child=control.close)
    process, number = os.getpid(), 1
    while True:
        try:
            status = _run_input(code, f"<call {number}>", sys.modules["__main__"].__dict__)
        except SystemExit as stop:
            return finish(exit_status(stop))
        if os.getpid() != process:  # a child that the code has forked, and that reached its end
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
    """Runs `code`, and prints the value of a final expression like an interactive interpreter. Returns 1 after an exception."""
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
    """Ends the output of a call. What threads print until the next one is discarded."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # the code may have replaced the stream
            stream.flush()  # type: ignore[union-attr]
    nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
