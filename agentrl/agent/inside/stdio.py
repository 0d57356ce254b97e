"""A program that exchanges lines of JSON-RPC over its standard input and output, such as an MCP server.

The module is imported on the host, and its source is also sent to a sandbox and runs there. The program's output is bounded in bytes and
time. A program that exceeds a bound is killed with its process group.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

CHUNK = 65536
POLL_S = 0.5  # how often a waiting request checks whether the program was closed
STDERR_BYTES = 2000  # kept from the end of stderr


def parse_object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object in a line; empty if the line is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def reply_to(message: bytes) -> bytes | None:
    """Returns the response to a request from the program: an empty result for `ping`, an error for any other request. Returns None if the
    message is not a request."""
    value = parse_object(message)
    number = value.get("id") if "method" in value else None
    if not isinstance(number, (int, str)):
        return None
    answer = {"result": {}} if value["method"] == "ping" else {"error": {"code": -32601, "message": "not supported"}}
    return json.dumps({"jsonrpc": "2.0", "id": number, **answer}).encode()


def is_answer(line: bytes, number: int | None) -> bool:
    """Returns whether a line is the response to request `number`."""
    value = parse_object(line)
    answered = value.get("id")
    return bool(value) and "method" not in value and number is not None and answered == number and not isinstance(answered, bool)


class StdioProgram:
    """One running program. The constructor raises `OSError` if the program cannot be started."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            list(argv), stdin=pipe, stdout=pipe, stderr=pipe, env=None if env is None else dict(env), cwd=cwd, start_new_session=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        self.stdin, self.stdout, self.stderr = (file.fileno() for file in (self.process.stdin, self.process.stdout, self.process.stderr))
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self.open = [self.stdout, self.stderr]  # descriptors that have not reached their end
        self.received = bytearray()  # output that has not been examined yet
        self.stderr_tail = b""
        self.to_write = b""
        self.closing = False
        self.lock = _thread.allocate_lock()  # held while the descriptors are in use

    def request(self, messages: Sequence[str], number: int | None, seconds: float, max_bytes: int) -> tuple[str, bytes]:
        """Sends lines and waits for the response to request `number`. If `number` is None, waits only until the lines have been sent.

        Returns `("answer", line)`, with an empty line if `number` is None. On failure, stops the program and returns `ended` (it exited or
        was closed), `late` (no response within `seconds`) or `flood` (more output or unread input than `max_bytes` allows), paired with
        b"". Any request from the program except `ping` receives an error.
        """
        with self.lock:
            deadline, taken, new_line = time.monotonic() + seconds, 0, True
            self.to_write += b"".join(message.encode() + b"\n" for message in messages)
            while True:
                if new_line and (answer := self.next_answer(number)) is not None:
                    return "answer", answer
                if number is None and not self.to_write:
                    return "answer", b""
                left = deadline - time.monotonic()
                if len(self.received) > max_bytes or taken > 4 * max_bytes or len(self.to_write) > 4 * max_bytes:
                    ending = "flood"
                elif self.closing or self.stdout not in self.open:
                    ending = "ended"
                elif left <= 0:
                    ending = "late"
                else:
                    data = self.exchange(min(left, POLL_S))
                    taken, new_line = taken + len(data), b"\n" in data
                    continue
                self.end()
                return ending, b""

    def next_answer(self, number: int | None) -> bytes | None:
        """Consumes complete lines up to the response to request `number`, and answers requests from the program. Returns the response, or
        None if it has not arrived."""
        end = self.received.rfind(b"\n") + 1
        lines, self.received = bytes(self.received[:end]).split(b"\n"), self.received[end:]
        for index, line in enumerate(lines):
            if is_answer(line, number):
                self.received = bytearray(b"\n".join(lines[index + 1 :])) + self.received
                return line
            if (reply := reply_to(line)) is not None:
                self.to_write += reply + b"\n"
        return None

    def exchange(self, seconds: float) -> bytes:
        """Waits at most `seconds`, then writes and reads each pipe once, without blocking. Returns the new output on stdout."""
        poll = select.poll()
        for fd in self.open:
            poll.register(fd, select.POLLIN)
        if self.to_write:
            poll.register(self.stdin, select.POLLOUT)
        output = b""
        for fd, _ in poll.poll(1000 * seconds):
            try:
                if fd == self.stdin:
                    self.to_write = self.to_write[os.write(fd, self.to_write) :]
                    continue
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            except OSError:  # the program closed its input
                self.to_write = b""
                continue
            if not data:
                self.open.remove(fd)
            elif fd == self.stdout:
                output = data
                self.received += data
            else:
                self.stderr_tail = (self.stderr_tail + data)[-STDERR_BYTES:]
        return output

    def close(self) -> None:
        """Kills the program and its process group, so that a pending request in another thread returns. Idempotent."""
        self.closing = True
        self.kill()
        with self.lock:
            self.end()

    def kill(self) -> None:
        """Kills the process group. The process id cannot be reused before the program has been waited for."""
        if self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)

    def end(self) -> None:
        """Kills the program, reads the rest of stderr, and closes the pipes."""
        self.kill()
        with contextlib.suppress(OSError, ValueError):
            self.stderr_tail = (self.stderr_tail + os.read(self.stderr, CHUNK))[-STDERR_BYTES:]
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


programs: dict[str, StdioProgram] = {}


def request_program(name: str, argv: list[str], start: bool, messages: list[str], number: Any, seconds: float, size: int) -> None:
    """Sends a request to the program `name` in a sandbox. If `start` is set, starts or restarts the program first. Prints a JSON header,
    then the line with the response. The outcome in the header is that of `request`, `gone` (not running) or `unstartable`."""
    outcome, line, exit_code, stderr = "gone", b"", None, b""
    try:
        if start:
            if name in programs:
                programs.pop(name).close()
            programs[name] = StdioProgram(argv)
        if name in programs:
            outcome, line = programs[name].request(messages, number, seconds, size)
            exit_code, stderr = programs[name].process.returncode, programs[name].stderr_tail
            if outcome != "answer":
                del programs[name]
    except OSError as error:
        outcome, stderr = "unstartable", f"{argv[0]}: {error.strerror}".encode()
    header = {"outcome": outcome, "exit": exit_code, "stderr": stderr.decode("utf-8", "replace")}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + line + b"\n")
    sys.stdout.flush()
