"""A session: an interpreter of the agent's that lives on between calls and keeps its names.

The server hands it each call's pipes through a socket, and through the same socket it says that it is through, and how. That is
all the server ever takes from it: it concerns this one call, whose code could as well have ended with any status it likes. What
does not belong there ends the session. How a session ended the server knows from the kernel, like a program's end.
"""

from __future__ import annotations

import _ast
import contextlib
import os
import signal
import socket
import struct
import sys

from agentrl.sandbox.inside.child import exit_status, finish, heed_signals, report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agentrl.sandbox.inside.spawn import Pipes, Waiting

MAX_SESSIONS = 4
"""Names of sessions in the life of a sandbox."""
CONTROL = 3
"""Descriptor of the socket in the session's process."""
THROUGH = struct.Struct("=IB")


class Session:
    """What the server knows of a session: `THROUGH` packets come from it, and go with their call's number."""

    def __init__(self, child: Waiting) -> None:
        self.pid, self.control = child.pid, child.control
        self.calls = 1
        self.alive = True

    def begin(self, pipes: Pipes) -> bool:
        """Hands over the pipes of the next call, whose code is read from their standard input; False when it does not take them."""
        self.calls += 1
        try:
            socket.send_fds(self.control, [THROUGH.pack(self.calls, 0)], pipes.theirs)
        except OSError:
            self.end()
            return False
        return True

    def through(self) -> int | None:
        """Reads a packet: a status in the kernel's form when the session says that the call is over, 0 or 1; None for all else."""
        try:
            packet = self.control.recv(THROUGH.size + 1)
        except OSError:
            packet = b""
        if len(packet) == THROUGH.size:
            number, status = THROUGH.unpack(packet)
            if number == self.calls and status in (0, 1):
                return int(status) << 8
        self.end()
        return None

    def end(self) -> None:
        """Kills it; `alive` turns False when the kernel has said that it is gone."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)


# In the session's process ---------------------------------------------------------------------------------------------


def run_session(code: bytes) -> int:
    """Runs call after call until one of them ends the interpreter; gives its exit status."""
    heed_signals()
    control = socket.socket(fileno=CONTROL)
    os.register_at_fork(after_in_child=control.close)
    process, number = os.getpid(), 1
    while True:
        try:
            status = run_input(code, f"<call {number}>", sys.modules["__main__"].__dict__)
        except SystemExit as stop:
            return finish(exit_status(stop))
        if os.getpid() != process:  # a child that the code has forked and left to go on here
            return finish(status)
        fall_silent()
        control.send(THROUGH.pack(number, status))
        number, code = taken_call(control)


def run_input(code: bytes, name: str, names: dict[str, Any]) -> int:
    """Runs `code`, and shows the value of an expression at its end as an interactive interpreter does. Gives 1 for an exception."""
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


def fall_silent() -> None:
    """Ends the output of a call: what threads print until the next one goes nowhere."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # whatever the code has put there
            stream.flush()  # type: ignore[union-attr]
    nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def taken_call(control: socket.socket) -> tuple[int, bytes]:
    """Number and code of the next call, whose output this process then writes to; ends the process when the server has gone."""
    packet, pipes, _, _ = socket.recv_fds(control, THROUGH.size, 3, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        os._exit(0)
    code, stdout, stderr = pipes
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    with open(code, "rb") as file:
        return int(THROUGH.unpack(packet)[0]), file.read()
