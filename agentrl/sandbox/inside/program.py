"""A running program as the server sees it, and signals to all programs."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

from agentrl.sandbox.inside.users import CHECK_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.spawn import Pipes
    from agentrl.sandbox.inside.wire import Answer, Request

CHUNK = 65536
_OOM_COUNTERS = ("/agentrl/memory", "/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
_MOST_MOVES = 3  # in one pause; a process that waits for a CPU receives the signal late


class Output:
    """What a program printed to one stream: its first and last `limit / 2` bytes."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = 0

    def add(self, data: bytes) -> None:
        """Appends bytes."""
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
        """Returns the kept bytes, with a mark where bytes were removed."""
        self._trim()
        mark = b"\n[... %d bytes cut ...]\n" % self.cut if self.cut else b""
        return bytes(self.head) + mark + bytes(self.tail)


class Program:
    """A running program: its process, its pipes and its deadline."""

    def __init__(self, pid: int, pipes: Pipes, request: Request, *data: bytes) -> None:
        """`data` is written to the program's standard input."""
        self.pid = pid
        self.stdin: int | None = pipes.stdin
        self.data = [memoryview(piece) for piece in data if piece]
        self.order = (Output(request["output_bytes"]), Output(request["output_bytes"]))
        self.outputs = {pipes.stdout: self.order[0], pipes.stderr: self.order[1]}
        self.started = time.monotonic()
        self.deadline: float = self.started + request["timeout_s"]
        self.oom_kills = _oom_kills()
        self.status: int | None = None
        self.ended = 0.0
        self.timed_out = False
        self.never_started = False
        self.check_at = self.started + CHECK_S
        self.over_limit = False  # killed for uncharged resources, which count as memory

    def feed(self) -> None:
        """Writes as much of the data as the program's standard input accepts now, and closes the pipe after the last byte."""
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
        """Reads up to `CHUNK` bytes of the output in the pipe `fd`, without waiting. Returns whether the stream has ended."""
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
        """Records that the process has ended. `status` has the form of waitpid(2).

        `as_server`: whether the process still belonged to the server's user. If this is true and the process was not killed, the program
        never started.
        """
        if self.status is None:
            self.status, self.ended = status, time.monotonic()
            if self.ended >= self.deadline and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.timed_out = True  # killed by the host, because this process got no CPU time
            self.never_started = as_server and os.WIFEXITED(status)

    def close(self) -> None:
        """Closes the pipes."""
        if self.stdin is not None:
            os.close(self.stdin)
        for fd in self.outputs:
            os.close(fd)

    def reply(self) -> Answer:
        """Returns the header fields and body of the reply to the host."""
        stdout, stderr = (output.text() for output in self.order)
        code: int | None = None
        reason = "timeout" if self.timed_out else ""
        if not reason:
            assert self.status is not None
            if os.WIFEXITED(self.status):
                code = os.WEXITSTATUS(self.status)
            elif os.WTERMSIG(self.status) == signal.SIGKILL:
                reason = "memory" if self.over_limit or _oom_kills() > self.oom_kills else "killed"
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
    """Returns the reply for a program that cannot start because other programs use all processes or descriptors: exit code 126, as from a
    shell."""
    text = (f"agentrl: cannot start: {error.strerror}\n").encode()
    return {"exit": 126, "reason": "", "wall_s": 0.0, "truncated": False, "stdout": 0}, text


def kernel_status(ended: os.waitid_result) -> int:
    """Returns how a process ended, in the form of waitpid(2)."""
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status << 8
    return ended.si_status | (0x80 if ended.si_code == os.CLD_DUMPED else 0)


@functools.cache
def _oom_counter() -> int:
    """Returns a descriptor for the sandbox's counter of out-of-memory kills; -1 if there is no such counter."""
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if b"oom_kill " in os.pread(fd, 4096, 0):
                return fd
            os.close(fd)
    return -1


def _oom_kills() -> int:
    """Returns the number of out-of-memory kills so far, or 0 if the counter cannot be read."""
    if _oom_counter() < 0:
        return 0
    text = os.pread(_oom_counter(), 4096, 0)
    return int(text[text.index(b"oom_kill ") + 9 :].split(b"\n", 1)[0])


def kill_everything(number: int) -> None:
    """Sends a signal to every process in the sandbox except this one, including detached processes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


class Pause:
    """A pause of the sandbox, during which all programs are stopped.

    A program cannot refuse SIGSTOP, but a timer of the program may send it SIGCONT. So the states of all processes are checked during a
    pause. A process that is running again is stopped the first two times and killed the third time.
    """

    def __init__(self) -> None:
        self.moves: dict[str, int] = {}
        kill_everything(signal.SIGSTOP)

    def look(self) -> None:
        """Stops or kills the processes that are running again."""
        for pid in os.listdir("/proc"):
            if pid.isdigit() and int(pid) != os.getpid() and _moves(pid):
                self.moves[pid] = self.moves.get(pid, 0) + 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGSTOP if self.moves[pid] < _MOST_MOVES else signal.SIGKILL)


def _moves(pid: str) -> bool:
    """Whether any thread of a process is running or sleeping instead of stopped. All threads are checked, because the first thread may have
    exited."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b") ")[2][:1] in (b"R", b"S"):
                    return True
    return False
