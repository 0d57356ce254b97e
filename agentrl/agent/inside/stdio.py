"""A program that is spoken to in lines of JSON over its standard input and output, as MCP servers are.

It runs in a sandbox, sent there as source, and on the host, imported. What the program says is bounded in bytes and time; one that is
late, floods or ends is killed with all of its process group, and says so.
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
LOOK_S = 0.5  # how soon a question hears that it is to end
STDERR_BYTES = 2000  # of its last words
REFUSED = {"code": -32601, "message": "not supported"}


def reply_to(message: bytes) -> bytes | None:
    """The answer to a request from the program: an empty result for `ping`, an error for any other. None if the message is no request."""
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):
        return None
    number = value.get("id") if isinstance(value, dict) and "method" in value else None
    if not isinstance(number, (int, str)):
        return None
    answer = {"result": {}} if value["method"] == "ping" else {"error": REFUSED}
    return json.dumps({"jsonrpc": "2.0", "id": number, **answer}).encode()


class Line:
    """One running program. Raises `OSError` when it cannot be started."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            list(argv), stdin=pipe, stdout=pipe, stderr=pipe, env=None if env is None else dict(env), cwd=cwd, start_new_session=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        self.stdin, self.stdout, self.stderr = (one.fileno() for one in (self.process.stdin, self.process.stdout, self.process.stderr))
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self.open = [self.stdout, self.stderr]  # and not at their end
        self.said = bytearray()  # and not yet looked at
        self.complained = b""
        self.to_write = b""
        self.closing = False
        self.busy = _thread.allocate_lock()  # held while the descriptors are in use

    def ask(self, messages: Sequence[str], until: int | None, seconds: float, max_bytes: int) -> tuple[str, bytes]:
        """Sends lines, and waits for the answer to request `until` (None: only until they are sent).

        Gives `answer` and its line, or why there is none: `ended`, `late` or `flood`; the program is gone then. Whatever else it says
        counts towards the flood; its requests are refused, but for `ping`.
        """
        with self.busy:
            return self.asked(messages, until, time.monotonic() + seconds, max_bytes)

    def asked(self, messages: Sequence[str], until: int | None, deadline: float, max_bytes: int) -> tuple[str, bytes]:
        self.to_write += b"".join(message.encode() + b"\n" for message in messages)
        taken, fresh = 0, True
        while True:
            if fresh and (answer := self.next_answer(until)) is not None:
                return "answer", answer
            if until is None and not self.to_write:
                return "answer", b""
            if len(self.said) > max_bytes or taken > 4 * max_bytes or len(self.to_write) > 4 * max_bytes:
                return self.failed("flood")
            if self.closing or self.stdout not in self.open:
                return self.failed("ended")
            left = deadline - time.monotonic()
            if left <= 0:
                return self.failed("late")
            read = self.exchange(min(left, LOOK_S))
            taken, fresh = taken + len(read), b"\n" in read

    def next_answer(self, until: int | None) -> bytes | None:
        """Takes the whole lines that are there, up to the one that answers."""
        end = self.said.rfind(b"\n") + 1
        lines, self.said = bytes(self.said[:end]).split(b"\n"), self.said[end:]
        for number, line in enumerate(lines):
            if line and self.heard(line, until):
                self.said = bytearray(b"\n".join(lines[number + 1 :])) + self.said
                return line
        return None

    def exchange(self, seconds: float) -> bytes:
        """Writes and reads what can be at once; waits so long for anything. Gives what was read of its output."""
        poll = select.poll()
        for fd in self.open:
            poll.register(fd, select.POLLIN)
        if self.to_write:
            poll.register(self.stdin, select.POLLOUT)
        data = b""
        for fd, _ in poll.poll(1000 * seconds):
            try:
                if fd == self.stdin:
                    self.to_write = self.to_write[os.write(fd, self.to_write) :]
                    continue
                read = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            except OSError:  # it reads no more
                self.to_write = b""
                continue
            if not read:
                self.open.remove(fd)
            elif fd == self.stdout:
                data = read
                self.said += read
            else:
                self.complained = (self.complained + read)[-STDERR_BYTES:]
        return data

    def heard(self, line: bytes, until: int | None) -> bool:
        """Whether this line is the awaited answer. Answers a request from the program."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        number = value.get("id")
        if "method" not in value:
            return until is not None and number == until and not isinstance(number, bool)
        if (reply := reply_to(line)) is not None:
            self.to_write += reply + b"\n"
        return False

    def failed(self, why: str) -> tuple[str, bytes]:
        self.end()
        return why, b""

    def close(self) -> None:
        """Kills it and its process group. Idempotent; a question that another thread waits for ends first."""
        self.closing = True
        self.kill()
        with self.busy:
            self.end()

    def kill(self) -> None:
        """While the program has not been waited for, its number is nobody else's."""
        if self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)

    def end(self) -> None:
        self.kill()
        with contextlib.suppress(OSError, ValueError):
            self.complained = (self.complained + os.read(self.stderr, CHUNK))[-STDERR_BYTES:]
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


lines: dict[str, Line] = {}


def talk(name: str, argv: list[str], begin: bool, messages: list[str], until: Any, seconds: float, size: int) -> None:
    """In a sandbox: asks the program `name`, which is started anew where `begin` says so; prints a header in JSON, and the line."""
    outcome, line, exit_code, complained = "gone", b"", None, b""
    try:
        if begin:
            if name in lines:
                lines.pop(name).close()
            lines[name] = Line(argv)
        if name in lines:
            outcome, line = lines[name].ask(messages, until, seconds, size)
            exit_code, complained = lines[name].process.returncode, lines[name].complained
            if outcome != "answer":
                del lines[name]
    except OSError as error:
        outcome, complained = "unstartable", f"{argv[0]}: {error.strerror}".encode()
    header = {"outcome": outcome, "exit": exit_code, "stderr": complained.decode("utf-8", "replace")}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + line + b"\n")
    sys.stdout.flush()
