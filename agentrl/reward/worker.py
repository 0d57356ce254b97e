"""Runs scoring code in a subprocess, because the code may never return: `SubprocessWorker(function)`.

Python cannot stop a thread, and a library's time limit based on SIGALRM works only in the main thread. Therefore, the function runs in a
child process, one request at a time. The kernel kills the process at its deadline, and the memory of the process is limited. The next
request starts a new process. Requests and replies are numbered lines of JSON, so each reply is matched with its request. A child exits when
its parent closes the child's input.

    python -m agentrl.reward.worker REFERENCE PREPARE SECONDS BYTES
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from queue import SimpleQueue
from typing import Any

from agentrl.base.secrets import child_environment
from agentrl.errors import InfrastructureError, TaskError
from agentrl.plugins.references import resolve

DEADLINE_S = 5.0
MEMORY = 2 << 30  # bytes of address space
STARTING_S = 60.0  # time for a child to import its modules on a busy machine
QUEUE_TIMEOUT_S = 3600.0
"""`timeout_s` for a verifier that uses a worker. Each request has its own deadline, but it may first wait for minutes in a queue of
requests that reach their deadlines.
"""
MAX_REPLY = 1 << 20
_SPARE_S = 30.0  # time after the deadline before the parent kills the child, if the kernel has not killed it at the deadline
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class CallFailed(Exception):
    """The function raised an exception, or its process crashed."""


class CallTimeout(Exception):
    """The process was killed at its deadline."""


class AnswerFault(Exception):
    """The function failed twice on the agent's answer, but not on a control request."""


class ControlFailed(Exception):
    """The function also fails on the control request, so the answer cannot be scored."""


class SubprocessWorker:
    """Runs a module-level function in child processes. Requests and results are JSON values.

    A child starts at the first request. Threads and event loops may share a worker. Requests are queued, and a request whose caller was
    cancelled is never sent. Raises `ValueError` if `function` or `prepare` is not defined at module level.

    Args:
        function: called in the child with one request. It may call `set_deadline` to change its deadline, and raise `TaskError`.
        prepare: called in a child when it starts, to import large modules, for example. The deadline of requests does not apply to this
            call.
        deadline_s: deadline of a request in seconds.
        memory: limit on a child's address space, in bytes. If a child exceeds the limit, a MemoryError is raised in the child.
        processes: maximum number of children; each handles one request at a time.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        prepare: Callable[[], object] | None = None,
        deadline_s: float = DEADLINE_S,
        memory: int = MEMORY,
        processes: int = 1,
    ) -> None:
        names = [_reference(function), _reference(prepare) if prepare is not None else ""]
        command = [sys.executable, "-W", "ignore", "-m", "agentrl.reward.worker", *names, str(deadline_s), str(memory)]
        self._children = [_Child(command, deadline_s) for _ in range(processes)]
        self._free: SimpleQueue[_Child] = SimpleQueue()
        for child in self._children:
            self._free.put(child)
        self._threads: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def call_blocking(self, request: Any) -> Any:
        """Returns the function's result for `request`. Blocks until the result is available.

        Raises:
            CallFailed, CallTimeout: the function failed on this request.
            TaskError: the function raised it.
            InfrastructureError: no process can be started, or a process replied to a different request.
        """
        child = self._free.get()
        try:
            return child.ask(request)
        finally:
            self._free.put(child)

    async def call(self, request: Any) -> Any:
        """Returns the function's result for `request`, without blocking the event loop. Raises the same errors as `call_blocking`."""
        with self._starting:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._children), thread_name_prefix="judging")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.call_blocking, request)

    async def evaluate(self, request: Any, *, control: Any) -> Any:
        """Returns the function's result for a request that contains an agent's text.

        Without further checks, an agent that can make the function fail could choose which of its answers count. Therefore, a failure is
        attributed to the answer if the control request `control` succeeds and the function then fails on the request again. The request is
        repeated because the machine may have been slow.

        Args:
            control: a request that must succeed, such as a request with the truth as the answer.

        Raises:
            AnswerFault: the agent's answer caused the failure. The score is usually 0.
            ControlFailed: the function fails on `control` too. The episode has no score.
            TaskError, InfrastructureError: see `call_blocking`.
        """
        with contextlib.suppress(CallFailed, CallTimeout):
            return await self.call(request)
        try:
            await self.call(control)
        except (CallFailed, CallTimeout) as error:
            raise ControlFailed(f"the control request also fails: it {error}") from None
        try:
            return await self.call(request)
        except (CallFailed, CallTimeout) as error:
            raise AnswerFault(str(error)) from None

    def close(self) -> None:
        """Kills the child processes. A later request starts a new child process."""
        for child in self._children:
            child.close()


class _Child:
    """One child process, which starts at its first request."""

    def __init__(self, command: list[str], deadline_s: float) -> None:
        self._command, self._deadline_s = command, deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count()

    def ask(self, request: Any) -> Any:
        """Sends one request and returns the reply. Raises the same errors as `SubprocessWorker.call_blocking`."""
        number = next(self._numbers)
        process = self._running()
        rest = memoryview(json.dumps({"number": number, "request": request}).encode() + b"\n")
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):  # the process died, which the read below reports
            while rest:
                rest = rest[os.write(process.stdin.fileno(), rest) :]
        reply = self._read(process, self._deadline_s + _SPARE_S)
        if reply is None:
            raise self._ended(process)
        answered: dict[str, Any] = json.loads(reply)
        if answered.get("number") != number:
            self.close()
            raise InfrastructureError(f"the scoring process answered request {answered.get('number')} instead of {number}")
        if "task" in answered:
            raise TaskError(answered["task"])
        if answered.get("full"):  # caches of earlier requests may fill its memory
            self.close()
        if "raised" in answered:
            raise CallFailed(f"raised {answered['raised']}")
        return answered["reply"]

    def close(self) -> None:
        """Kills the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        path = os.pathsep.join(filter(None, sys.path))  # the child can import the same modules
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # ctrl-C must reach only the parent, which still scores the episodes that it finishes
                env=child_environment(os.environ) | {"PYTHONPATH": path} | _ONE_THREAD,
            )
        except OSError as error:
            raise InfrastructureError(f"the scoring process cannot be started: {error}") from error
        process = self._process
        if self._read(process, STARTING_S) is None:
            self.close()
            raise InfrastructureError("the scoring process did not start; see its messages on standard error")
        return process

    def _read(self, process: subprocess.Popen[bytes], within_s: float) -> bytes | None:
        """Returns the next line from the child, or None if the child exited or sent no line in time."""
        assert process.stdout is not None, "it is a pipe"
        until, pieces = time.monotonic() + within_s, bytearray()
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0 and len(pieces) <= 2 * MAX_REPLY:
                if not waiting.select(left):
                    continue
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    return None
                pieces += piece
                if pieces.endswith(b"\n"):
                    return bytes(pieces)
        return None

    def _ended(self, process: subprocess.Popen[bytes]) -> Exception:
        """Returns the exception for a process that exited without a reply."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.poll()
        self.close()
        if code is None or code == -signal.SIGALRM:
            return CallTimeout(f"returned nothing within {self._deadline_s:g} s")
        return CallFailed(f"ended its process with exit code {code}")


def _reference(function: Callable[..., Any]) -> str:
    """Returns the reference by which a child finds the function: its module, or its file if it comes from a file (`agentrl.plugins`)."""
    name, module = function.__qualname__, function.__module__
    if "." in name or name.startswith("<"):
        raise ValueError(f"{name} is not a module-level function")
    by_file = module == "__main__" or module.startswith("agentrl_file_")
    return f"{os.path.abspath(inspect.getfile(function)) if by_file else module}:{name}"


def set_deadline(seconds: float) -> None:
    """Sets the deadline of this child process: the kernel kills it after `seconds`. 0 cancels the deadline."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Replies to the requests on standard input until standard input is closed.

    Only replies are written to standard output; the function's output is discarded.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    function, deadline_s, memory = resolve(sys.argv[1]), float(sys.argv[3]), int(sys.argv[4])
    if sys.argv[2]:
        resolve(sys.argv[2])()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies.write("ready\n")
    replies.flush()
    full = (_size() + memory) // 2
    for line in sys.stdin:
        message = json.loads(line)
        replies.write(_answer(function, message["request"], message["number"], deadline_s, full) + "\n")
        replies.flush()


def _size() -> int:
    """Returns the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _answer(function: Callable[[Any], Any], request: Any, number: int, deadline_s: float, full: int) -> str:
    """Returns the reply. The reply contains a flag if the process still uses more than `full` bytes after the call."""
    try:
        set_deadline(deadline_s)
        reply = json.dumps({"number": number, "reply": function(request), "full": _size() > full})
        if len(reply) > MAX_REPLY:
            raise ValueError(f"a reply of {len(reply)} characters is too long")
        return reply
    except TaskError as error:
        return json.dumps({"number": number, "task": str(error)[:2000]})
    except MemoryError as error:
        return json.dumps({"number": number, "raised": f"MemoryError: {error}"[:500], "full": True})
    except Exception as error:  # libraries may raise any error on an agent's text
        return json.dumps({"number": number, "raised": f"{type(error).__name__}: {error}"[:500]})
    finally:
        set_deadline(0)


if __name__ == "__main__":
    main()
