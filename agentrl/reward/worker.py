"""A process for judging what an agent wrote with code that may never return: `SubprocessWorker(function)`.

Python cannot stop a thread, and a library's own time limit by SIGALRM works in a main thread alone. So the function runs in a child
process, a request at a time: the kernel ends it at its deadline, with the process, and what it allocates is bounded. The next request
starts another process. Requests and replies are JSON, one a line, numbered, so that no reply is taken for another's. A child ends with
its driver, which closes its input.

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
STARTING_S = 60.0  # for a child to import what it needs, on a machine that is busy
QUEUE_TIMEOUT_S = 3600.0
"""`timeout_s` of a verifier that asks a worker. Each answer has a deadline of its own; behind many that get to theirs an honest one waits
for minutes, and must not lose its score to them."""
MAX_REPLY = 1 << 20
_SPARE_S = 30.0  # beyond the deadline, at which the kernel ends a child, before its driver does
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class CallFailed(Exception):
    """The function raised something at a request, or its process died of it."""


class CallTimeout(Exception):
    """The function was ended at its deadline."""


class AnswerFault(Exception):
    """The function fails at what the agent wrote, twice, and not at a request that is known to be sound."""


class ControlFailed(Exception):
    """The function fails at a sound request too, so that nothing is known of the answer."""


class SubprocessWorker:
    """Runs a module's top-level function in processes of its own: a JSON value in, a JSON value out.

    A child is started at the first request. Threads and event loops may share a worker; requests wait for one another, and one that
    nobody waits for any more is never asked.

    Args:
        function: called in the child with one request. It may call `set_deadline` to have another deadline from then on, and raise
        `TaskError`. prepare: called in a child when it starts, such as to import what takes long; no deadline of a request runs then.
        deadline_s: seconds for a request. memory: bytes of address space of a child; a request for more gets a MemoryError there.
        processes: children at most, each for one request at a time.
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
        self._command = [sys.executable, "-W", "ignore", "-m", "agentrl.reward.worker", *names, str(deadline_s), str(memory)]
        self._deadline_s = deadline_s
        self._children = [_Child(self._command, deadline_s) for _ in range(processes)]
        self._free: SimpleQueue[_Child] = SimpleQueue()
        for child in self._children:
            self._free.put(child)
        self._threads: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def call_blocking(self, request: Any) -> Any:
        """What the function gives for `request`; blocks.

        Raises:
            Raised, Stopped: it failed at this request.
            TaskError: it says that the task is broken.
            InfrastructureError: there is no process.
        """
        child = self._free.get()
        try:
            return child.ask(request)
        finally:
            self._free.put(child)

    async def call(self, request: Any) -> Any:
        """`ask_now`, awaited."""
        with self._starting:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._children), thread_name_prefix="judging")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.call_blocking, request)

    async def evaluate(self, request: Any, *, sound: Any) -> Any:
        """`ask`, for a request that holds an agent's words.

        An agent that could make its judge fail would choose which of its answers count. So a failure at the answer, where `sound` gets
        a reply, is told from one of the judge: it is the answer's, once it happens again (the machine may have been slow).

        Args:
            sound: a request that must get a reply, such as one with the truth in the answer's place.

        Raises:
            AtAnswer: the answer is at fault; usually a score of 0.
            Unsound: the function fails at `sound` too. The episode has no score.
            TaskError, InfrastructureError: see `ask_now`.
        """
        with contextlib.suppress(CallFailed, CallTimeout):
            return await self.call(request)
        try:
            await self.call(sound)
        except (CallFailed, CallTimeout) as error:
            raise ControlFailed(f"it cannot be judged: what must be sound {error}") from None
        try:
            return await self.call(request)
        except (CallFailed, CallTimeout) as error:
            raise AnswerFault(str(error)) from None

    def close(self) -> None:
        """Ends the processes; a later request starts another."""
        for child in self._children:
            child.close()


class _Child:
    """One process, started when it is asked something."""

    def __init__(self, command: list[str], deadline_s: float) -> None:
        self._command, self._deadline_s = command, deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count()

    def ask(self, request: Any) -> Any:
        number = next(self._numbers)
        process = self._running()
        rest = memoryview(json.dumps({"number": number, "request": request}).encode() + b"\n")
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):  # it has died, which reading tells
            while rest:
                rest = rest[os.write(process.stdin.fileno(), rest) :]
        reply = self._read(process, self._deadline_s + _SPARE_S)
        if reply is None:
            raise self._ended(process)
        answered: dict[str, Any] = json.loads(reply)
        if answered.get("number") != number:
            self.close()
            raise InfrastructureError(f"the judging process answered request {answered.get('number')}, not {number}")
        if "task" in answered:
            raise TaskError(answered["task"])
        if answered.get("full"):  # what earlier answers left in its caches may be what fills it, so it serves nobody any more
            self.close()
        if "raised" in answered:
            raise CallFailed(f"raised {answered['raised']}")
        return answered["reply"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        path = os.pathsep.join(filter(None, sys.path))  # what can be imported here can be imported there
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # ctrl-C is for the driver, which goes on judging what it finishes
                env=child_environment(os.environ) | {"PYTHONPATH": path} | _ONE_THREAD,
            )
        except OSError as error:
            raise InfrastructureError(f"no process to judge in: {error}") from error
        process = self._process
        if self._read(process, STARTING_S) is None:
            self.close()
            raise InfrastructureError("the judging process did not start; what it said is on standard error")
        return process

    def _read(self, process: subprocess.Popen[bytes], within_s: float) -> bytes | None:
        """The next line of the child; None when it ended, or gave none in time."""
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
        """Why there is no reply, once the process is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.poll()
        self.close()
        if code is None or code == -signal.SIGALRM:
            return CallTimeout(f"gave no verdict within {self._deadline_s:g} s")
        return CallFailed(f"ended its process with exit code {code}")


def _reference(function: Callable[..., Any]) -> str:
    """Where a child finds the function: its module, or the file of one that was loaded from a file (`agentrl.plugins`)."""
    name, module = function.__qualname__, function.__module__
    if "." in name or name.startswith("<"):
        raise ValueError(f"{name} is no function at the top of a module")
    by_file = module == "__main__" or module.startswith("agentrl_file_")
    return f"{os.path.abspath(inspect.getfile(function)) if by_file else module}:{name}"


def set_deadline(seconds: float) -> None:
    """In a child: has the kernel end the process so long from now; 0: no more."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Answers requests until its input ends. Only replies reach standard output; what the function prints is thrown away."""
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
        asked = json.loads(line)
        replies.write(_answer(function, asked["request"], asked["number"], deadline_s, full) + "\n")
        replies.flush()


def _size() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _answer(function: Callable[[Any], Any], request: Any, number: int, deadline_s: float, full: int) -> str:
    """The reply, and whether more than `full` bytes are still taken after it: a library that has no memory may say anything."""
    try:
        set_deadline(deadline_s)
        reply = json.dumps({"number": number, "reply": function(request), "full": _size() > full})
        if len(reply) > MAX_REPLY:
            raise ValueError(f"a reply of {len(reply)} characters")
        return reply
    except TaskError as error:
        return json.dumps({"number": number, "task": str(error)[:2000]})
    except MemoryError as error:
        return json.dumps({"number": number, "raised": f"MemoryError: {error}"[:500], "full": True})
    except Exception as error:  # whatever the libraries raise at what an agent wrote
        return json.dumps({"number": number, "raised": f"{type(error).__name__}: {error}"[:500]})
    finally:
        set_deadline(0)


if __name__ == "__main__":
    main()
