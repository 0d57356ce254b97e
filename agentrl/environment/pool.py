"""Local environments in separate processes: many episodes per process, and many actions per message.

Actions that arrive in the same iteration of the event loop are sent to a process together. A process in which one operation exceeds its
deadline is killed, with the processes that it started. If the processes together exceed the memory limit, the largest process is
killed. The episode whose operation was running is at fault (`EnvironmentCrash`). The other episodes in the process also fail
(`NeighborCrash`) and are repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from agentrl.base.processes import available_memory, memory_by_group
from agentrl.base.secrets import child_environment, resolve_options
from agentrl.environment.base import text_of
from agentrl.environment.games import PooledGame
from agentrl.environment.worker import MAX_FRAME, PROGRESS, SIZE
from agentrl.errors import EnvironmentCrash, EnvironmentFault, NeighborCrash, PolicyFault, TaskError
from agentrl.records import EnvironmentSpec, Observation, Step, ToolCall

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Deadline for one operation of an environment, in seconds. A pool checks deadlines at this interval, so an operation may take twice as
long."""
STARTING_S = 60.0
"""Seconds within which a process must import its modules, even on a busy machine."""
_MAX_IDLE = 4  # checks that may find no progress between two operations, because the driver or the process gets no CPU time
_POLL_S, _UNREAD_S, _END_S = 0.5, 0.5, 5.0  # seconds between checks, for reading the last results, and for exiting
_MOST_ERRORS = 1 << 16
EPISODES_PER_PROCESS = 64
MEMORY_SHARE = 0.5
"""Fraction of the machine's memory that all processes together may use."""
_ALONE_PER_CORE = 4
"""Maximum number of processes that run a single episode, as a multiple of the maximum number of processes that episodes share."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ProcessPool:
    """An `agentrl.protocols.EnvironmentOpener` for local environments. The number of processes grows with the number of open episodes.

    Args:
        processes: maximum number of processes that episodes share; None means the number of this machine's cores.
        timeout_s: deadline for one operation, in seconds; see `TIMEOUT_S`.
        memory: maximum memory of all processes and the processes that they start, in bytes; None means `MEMORY_SHARE` of this machine's
            memory.
    """

    def __init__(self, *, processes: int | None = None, timeout_s: float = TIMEOUT_S, memory: int | None = None) -> None:
        self._most = processes or os.cpu_count() or 1
        self._timeout_s, self._memory = timeout_s, memory or int(MEMORY_SHARE * available_memory())
        self._processes: list[_Process] = []
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def open(self, spec: EnvironmentSpec, *, alone: bool = False) -> PooledEnvironment | PooledGame:
        """Opens an environment and resets it. Raises `EnvironmentFault` if the environment fails, `TaskError` if the task cannot be played,
        and `UserError` if a secret in the options cannot be read.

        Args:
            alone: whether to start a process only for this episode, because the process of an earlier attempt was killed or exited. Ignored
                if there are too many such processes (`_ALONE_PER_CORE`).
        """
        process = await self._process(alone)
        number, environment = process.add(), cast(PooledEnvironment | PooledGame | None, None)
        try:
            opened = await process.run(number, "open", spec.ref, resolve_options(spec.options), spec.seed)
            if isinstance(opened, dict):
                environment = PooledGame(partial(process.run, number), partial(process.remove, number), opened, spec.ref)
            else:
                environment = PooledEnvironment(process, number, spec.ref, opened)
            return environment
        finally:
            if environment is None:
                await process.remove(number)

    async def close(self) -> None:
        """Kills the processes. Environments that are still open fail at their next call."""
        if self._watch is not None:
            self._watch.cancel()
        for process in self._processes:
            await process.kill("the run has ended")

    async def _watch_memory(self) -> None:
        """Kills the largest process whenever the processes together exceed the memory limit."""
        while True:
            await asyncio.sleep(_POLL_S)
            used = await asyncio.to_thread(memory_by_group)
            sizes = {process: used[process.pid] for process in self._processes if process.alive}
            if (total := sum(sizes.values())) > self._memory:
                largest = max(sizes, key=lambda process: sizes[process])
                largest.fail(
                    f"the environments use {total >> 20:,} MiB of memory; at most {self._memory >> 20:,} are allowed. The largest process,"
                    f" with {sizes[largest] >> 20:,} MiB, was killed; lower rollout.concurrency, or use environments that need less memory"
                )

    async def _process(self, alone: bool) -> _Process:
        """Returns the process with the fewest episodes. Starts a new process if all processes have `EPISODES_PER_PROCESS` episodes and
        their maximum number is not reached, or if the episode must run alone."""
        async with self._starting:
            self._watch = self._watch or asyncio.create_task(self._watch_memory())
            alive = self._processes = [process for process in self._processes if process.alive]
            if alone and sum(process.alone for process in alive) < _ALONE_PER_CORE * self._most:
                self._processes.append(process := await _Process.start(self._timeout_s))
                process.alone = True
                return process
            alive = [process for process in alive if not process.alone]
            free = min(alive, key=lambda process: len(process.episodes), default=None)
            if free is None or (len(free.episodes) >= EPISODES_PER_PROCESS and len(alive) < self._most):
                free = await _Process.start(self._timeout_s)
                self._processes.append(free)
            return free


class PooledEnvironment:
    """An `agentrl.protocols.ResumableEnvironment` in a process of a pool."""

    def __init__(self, process: _Process, number: int, ref: str, opened: Sequence[Any]) -> None:
        instructions, actions, first, self.resumable = opened
        self.instructions: str = instructions
        self.actions: Sequence[str] | Sequence[dict[str, Any]] | None = None if actions is None else tuple(actions)
        self._process, self._number, self._ref = process, number, ref
        self._first = Observation(text=text_of(first, ref))

    async def reset(self) -> Observation:
        """Returns the first observation."""
        return self._first

    async def step(self, action: str | ToolCall) -> Step:
        """Applies an action. Raises `PolicyFault` if the rules forbid the action, `TaskError` if the task cannot be played, and
        `EnvironmentFault` if the environment fails."""
        sent = action if isinstance(action, str) else {"name": action.name, "arguments": action.arguments}
        text, reward, terminated, truncated, parts, note = await self._process.run(self._number, "step", sent)
        try:
            shown = Observation(text=text)
            return Step(observation=shown, reward=reward, terminated=terminated, truncated=truncated, parts=parts, note=note)
        except ValueError as error:
            raise EnvironmentFault(f"{self._ref}.step() returned an invalid step: {error}") from None

    async def snapshot(self) -> bytes:
        """Returns the state, as base64."""
        return str(await self._process.run(self._number, "snapshot")).encode()

    async def restore(self, state: bytes) -> Observation:
        """Restores a state and returns the environment's observation."""
        return Observation(text=text_of(await self._process.run(self._number, "restore", state.decode()), self._ref))

    async def close(self) -> None:
        """Closes the environment."""
        await self._process.remove(self._number)


class _Process:
    """One process and its episodes."""

    def __init__(self, process: asyncio.subprocess.Process, progress: mmap.mmap, timeout_s: float) -> None:
        self.episodes: set[int] = set()
        self.alive, self.alone, self.pid = True, False, process.pid  # `alone`: only for one episode
        self._process, self._progress, self._timeout_s = process, progress, timeout_s
        self._numbers = self._seen = self._idle = self._answered = 0
        self._pending: list[list[Any]] = []  # operations in the next frame
        self._waiting: deque[tuple[int, asyncio.Future[Any]]] = deque()  # sent or pending operations, in order: episode, result
        self._watch: asyncio.TimerHandle | None = None
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._helpers = asyncio.create_task(self._wait()), asyncio.create_task(self._pass_errors())

    @classmethod
    async def start(cls, timeout_s: float) -> _Process:
        """Starts a process. Raises `EnvironmentFault` if the process does not start."""
        with tempfile.TemporaryFile() as file:
            file.write(bytes(PROGRESS.size))
            file.flush()
            progress = mmap.mmap(file.fileno(), PROGRESS.size)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-W", "ignore", "-m", "agentrl.environment.worker", str(file.fileno())),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=[file.fileno()],
                    start_new_session=True,  # ctrl-C must reach only the driver, which still finishes the episodes
                    env=child_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | _ONE_THREAD,
                )
            except OSError as error:
                raise EnvironmentFault(f"the process for environments cannot be started: {error}") from error
        started = cls(process, progress, timeout_s)
        try:
            async with asyncio.timeout(STARTING_S):
                await started._ready.wait()
        except TimeoutError:
            started.fail("its process did not start")
        if not started.alive:
            raise EnvironmentFault("the process for environments did not start; see its messages on standard error")
        return started

    def add(self) -> int:
        """Registers a new episode and returns its number."""
        self._numbers += 1
        self.episodes.add(self._numbers)
        return self._numbers

    async def remove(self, number: int) -> None:
        """Closes the environment of an episode. Logs errors."""
        if number in self.episodes:
            self.episodes.discard(number)
            if self.alive:
                try:
                    await self.run(number, "close")
                except (EnvironmentFault, PolicyFault, TaskError) as error:
                    log.warning("an environment could not be closed: %s", error)
            if self.alone:
                await self.kill("its episode has ended")

    def run(self, number: int, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Queues an operation and returns a future for its result."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if not self.alive:
            future.set_exception(NeighborCrash("the process of this environment has ended"))
            return future
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append([number, name, *arguments])
        self._waiting.append((number, future))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._check_progress)
        return future

    def _flush(self) -> None:
        frame, self._pending = json.dumps(self._pending).encode(), []
        stream = self._process.stdin
        if self.alive and stream is not None and not stream.is_closing():
            stream.write(SIZE.pack(len(frame)) + frame)

    async def _wait(self) -> None:
        """Detects that the process has exited, even if processes that it started hold its pipes open."""
        while self._process.returncode is None:
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_UNREAD_S)
        self.fail("its process ended")

    async def _pass_errors(self) -> None:
        """Copies the first `_MOST_ERRORS` bytes of the process's standard error to the driver's standard error."""
        stream, left = self._process.stderr, _MOST_ERRORS
        assert stream is not None, "it is a pipe"
        while chunk := await stream.read(_MOST_ERRORS):
            if left and (shown := chunk[:left]):
                left -= len(shown)
                sys.stderr.write(shown.decode(errors="replace"))
                if not left:
                    log.warning("an environment wrote more than %d bytes to standard error; the rest is discarded", _MOST_ERRORS)

    async def _read(self) -> None:
        """Passes results to their callers until the process exits."""
        stream = self._process.stdout
        assert stream is not None, "it is a pipe"
        reason = "its process ended"
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                while True:
                    size = SIZE.unpack(await stream.readexactly(SIZE.size))[0]
                    if size > MAX_FRAME:
                        raise ValueError(f"a frame of {size} bytes")
                    for result in json.loads(await stream.readexactly(size)):
                        self._answer(*result)
                    self._ready.set()
            except (ValueError, TypeError, IndexError) as error:
                reason = f"its process sent an invalid message: {str(error)[:200]}"
        self.fail(reason)

    def _answer(self, number: int, how: str, value: Any) -> None:
        expected, future = self._waiting.popleft()
        self._answered += 1
        if expected != number:
            raise ValueError(f"a result of episode {number} instead of {expected}")
        if future.done():  # cancelled
            return
        if how == "ok":
            future.set_result(value)
        else:
            kinds: dict[str, type[Exception]] = {"policy": PolicyFault, "task": TaskError}
            future.set_exception(kinds.get(how, EnvironmentFault)(str(value)))

    def _check_progress(self) -> None:
        """Kills the process if the same operation has been running since the last check, or after more than `_MAX_IDLE` consecutive checks
        without progress."""
        self._watch = None
        if not self._waiting:
            return
        count = PROGRESS.unpack(self._progress[:])[0]
        self._idle = self._idle + 1 if count == self._seen else 0
        if self._idle and (count % 2 or self._idle > _MAX_IDLE):
            self.fail(f"an environment returned no result within {self._timeout_s:g} s")
            return
        self._seen = count
        self._watch = self._loop.call_later(self._timeout_s, self._check_progress)

    def fail(self, reason: str) -> None:
        """Kills the process. The episode whose operation was running is at fault."""
        if not self.alive:
            return
        self.alive = False
        self._ready.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # the process leads a session
        count = PROGRESS.unpack(self._progress[:])[0]
        culprit = count // 2 - self._answered if count % 2 else -1
        for index, (number, future) in enumerate(self._waiting):
            if not future.done():
                own = index == culprit or (culprit < 0 and self.episodes == {number})
                other = "the environment of another episode failed: "
                future.set_exception(EnvironmentCrash(reason) if own else NeighborCrash(f"{other}{reason}"))
                future.exception()  # its caller may have been cancelled
        self._waiting.clear()
        if self._watch is not None:
            self._watch.cancel()

    async def kill(self, reason: str) -> None:
        """Kills the process and waits at most `_END_S` seconds for it to exit."""
        self.fail(reason)
        with contextlib.suppress(TimeoutError):  # a process that left the session may hold the pipes open
            async with asyncio.timeout(_END_S):
                await self._process.wait()
                await self._reader
        for task in (self._reader, *self._helpers):
            task.cancel()
        await asyncio.gather(self._reader, *self._helpers, return_exceptions=True)
