"""A running program as the server sees it: its process, its pipes, its deadline, and what it printed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

from agentrl.sandbox.inside.bounds import LOOK_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.spawn import Pipes
    from agentrl.sandbox.inside.wire import Answer, Request

CHUNK = 65536
OOM_COUNTERS = ("/agentrl/memory", "/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")


class Output:
    """What one stream of a program printed: its first and last `limit / 2` bytes."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = 0

    def add(self, data: bytes) -> None:
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.tail_limit + 4 * CHUNK:
            self._trim()

    def _trim(self) -> None:
        extra = len(self.tail) - self.tail_limit
        if extra > 0:
            self.cut += extra
            del self.tail[:extra]

    def text(self) -> bytes:
        self._trim()
        mark = b"\n[... %d bytes cut ...]\n" % self.cut if self.cut else b""
        return bytes(self.head) + mark + bytes(self.tail)


class Program:
    """A running program: its process, its pipes, its deadline."""

    def __init__(self, pid: int, pipes: Pipes, request: Request, *data: bytes) -> None:
        """`data` is what the process is to read."""
        self.pid = pid
        self.stdin: int | None = pipes.stdin
        self.data = [memoryview(part) for part in data if part]
        self.order = (Output(request["output_bytes"]), Output(request["output_bytes"]))
        self.outputs = {pipes.stdout: self.order[0], pipes.stderr: self.order[1]}
        self.started = time.monotonic()
        self.deadline: float = self.started + request["timeout_s"]
        self.oom_kills = oom_kills()
        self.status: int | None = None
        self.ended = 0.0
        self.timed_out = False
        self.never_began = False
        self.look_at = self.started + LOOK_S
        self.overdrawn = False  # ended for what is charged to nobody, which counts as memory

    def feed(self) -> None:
        """Writes what the program's standard input takes now, and closes it behind the last byte."""
        assert self.stdin is not None
        try:
            for _ in range(len(self.data)):
                left = self.data[0][os.write(self.stdin, self.data[0]) :]
                self.data[:1] = [left] if left else []
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.data.clear()
        if not self.data:
            os.close(self.stdin)
            self.stdin = None

    def take(self, fd: int) -> bool:
        """Reads what is there; True when the stream has ended."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.outputs[fd]
            return True
        self.outputs[fd].add(data)
        return False

    def end(self, status: int, as_server: bool = False) -> None:
        """`status` is of the form that the kernel gives. `as_server`: of a process that was still the server's user.

        One that ended so of its own accord has not come as far as to the program, whose status this is not.
        """
        if self.status is None:
            self.status, self.ended = status, time.monotonic()
            if self.ended >= self.deadline and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.timed_out = True  # killed from outside, where this process got no CPU time to do it
            self.never_began = as_server and os.WIFEXITED(status)

    def close(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
        for fd in self.outputs:
            os.close(fd)

    def reply(self) -> Answer:
        """Header fields and body for the host."""
        stdout, stderr = (output.text() for output in self.order)
        code: int | None = None
        reason = "timeout" if self.timed_out else ""
        if not reason:
            assert self.status is not None
            if os.WIFEXITED(self.status):
                code = os.WEXITSTATUS(self.status)
            elif os.WTERMSIG(self.status) == signal.SIGKILL:
                reason = "memory" if self.overdrawn or oom_kills() > self.oom_kills else "killed"
            else:
                code = 128 + os.WTERMSIG(self.status)
        fields = {
            "exit": code,
            "reason": reason,
            "wall_s": self.ended - self.started,
            "truncated": any(output.cut for output in self.order),
            "stdout": len(stdout),
        }
        return fields, stdout + stderr


def cannot_start(error: OSError) -> Answer:
    """Processes or descriptors are used up by programs still running: theirs to answer for, as in a shell."""
    text = (f"agentrl: cannot start: {error.strerror}\n").encode()
    return {"exit": 126, "reason": "", "wall_s": 0.0, "truncated": False, "stdout": 0}, text


def kernel_status(ended: os.waitid_result) -> int:
    """How a process ended, in the form of `waitpid`."""
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status << 8
    return ended.si_status | (0x80 if ended.si_code == os.CLD_DUMPED else 0)


def kill_everything(number: int) -> None:
    """Signals every process of the sandbox but this one, however it detached itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


@functools.cache
def oom_counter() -> int:
    """Descriptor of the sandbox's own count of kills for memory; -1 where it shows none."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if b"oom_kill " in os.pread(fd, 4096, 0):
                return fd
            os.close(fd)
    return -1


def oom_kills() -> int:
    """How often the kernel has killed for memory here, as far as it is shown."""
    if oom_counter() < 0:
        return 0
    text = os.pread(oom_counter(), 4096, 0)
    return int(text[text.index(b"oom_kill ") + 9 :].split(b"\n", 1)[0])
