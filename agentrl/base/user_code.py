"""The boundary to user-supplied code (agents, tools, verifiers, judges, families, trackers), and descriptions of exceptions.

An exception that the code raises is a result, never control flow. `call_user_code` runs the code in a separate task until its deadline, and
`fault_boundary` catches the exceptions that it raises. Descriptions of exceptions are bounded and printable, and computing them never
raises, because the text may come from an agent.

In an event loop, ctrl-C is a cancellation. `asyncio.run` and `agentrl.session.ending.handle_interrupts` cancel the main task before
KeyboardInterrupt is raised in code that blocks the loop. A KeyboardInterrupt that reaches a boundary is therefore a result like any other
exception. A CancelledError, or the exception that the code converted it to, is a cancellation only if the count of the current task has
increased since the boundary was entered. Python's own handler, which is active outside of event loops, raises KeyboardInterrupt without a
cancellation; while it is installed, every KeyboardInterrupt in the main thread passes through the boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentrl.base import loop_lag
from agentrl.base.error_text import disk_full_error, group_members, raise_location, raw_text
from agentrl.base.secrets import redact
from agentrl.errors import InfrastructureError, SandboxUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

GRACE_S = 2.0
"""Seconds that a cancelled call may take to finish before it is abandoned."""
_MAX_TEXT = 1 << 20  # examined characters of the text of an exception
HOLD_S = loop_lag.STALL_S
"""A call that computes for longer than this without awaiting anything is logged, because it blocks every other episode."""
MAX_THREADS = 1024
"""Maximum number of threads that `run_in_thread` starts, including abandoned threads."""
MAX_TRACEBACK = 8000
_FRAMES = 40  # innermost frames of a traceback
_KINDS = 512  # kinds of faults that the log distinguishes

_seen: dict[tuple[str, ...], int] = {}
_threads = threading.BoundedSemaphore(MAX_THREADS)
_theirs: ContextVar[bool] = ContextVar("_theirs", default=False)  # whether user-supplied code runs or started the current task


class CallTimeout(Exception):
    """Error: a call returned no result before its deadline. Not a subclass of `TimeoutError`, because the called code may raise
    `TimeoutError`."""


class DriverStalled(InfrastructureError):
    """A call returned no result before its deadline, and the event loop was blocked for a large part of that time."""


class CodeExited(Exception):
    """A task started by user-supplied code raised SystemExit or KeyboardInterrupt, which would have stopped the event loop and the run."""


async def call_user_code(
    code: Callable[[], Awaitable[T]], *, what: str, timeout_s: float, grace_s: float = GRACE_S, within: loop_lag.StallCount | None = None
) -> T:
    """Runs `code()` in a separate task and returns its result.

    A call that ignores its cancellation for `grace_s` seconds is abandoned at its next await, and this is logged. Code that neither awaits
    nor returns cannot be interrupted, but the time for which it blocked the event loop is logged.

    Args:
        what: name of the code in the log, such as "tool search".
        within: a stall count that excludes stalls caused by the code itself.

    Raises:
        CallTimeout: no result after `timeout_s`.
        DriverStalled: no result after `timeout_s`, because other code blocked the event loop.
        RuntimeError: `code` raised GeneratorExit or KeyboardInterrupt, which would otherwise look like a closed coroutine or ctrl-C.
        BaseException: any other exception that `code` raised, including SystemExit and a CancelledError without a cancellation.
    """
    _contain(asyncio.get_running_loop())
    steps = _Steps(code, what)
    stalls, context = loop_lag.count_stalls(within)
    context.run(_theirs.set, False)  # `_caught` contains this task, and `_Steps` measures it
    task: asyncio.Task[tuple[T | None, BaseException | None]] = asyncio.create_task(_caught(steps), name=what, context=context)
    try:
        with loop_lag.DRIVER_LAG.waiting():
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            late = f"{what} gave no result within {timeout_s:g} s"
            raise DriverStalled(f"{late}: {stalls.text}") if stalls.excuse(timeout_s) else CallTimeout(late)
    except BaseException:
        await _end(task, steps, what, grace_s)
        raise
    finally:
        if steps.longest_s > HOLD_S:
            _warn_blocked(what, steps.longest_s)
    value, error = (None, asyncio.CancelledError()) if task.cancelled() else task.result()  # the code may cancel its own task
    if isinstance(error, GeneratorExit | KeyboardInterrupt):
        place = raise_location(error)
        raise RuntimeError(f"{what} raised {type(error).__name__}{f' ({place})' if place else ''}") from error
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if T allows it


async def _caught(steps: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """Returns the result or the exception as a value, because a task that ends with SystemExit would stop the event loop.

    Only `_end` and the code itself cancel this task, so a CancelledError is also returned as a value.
    """
    _theirs.set(True)
    try:
        return await steps, None
    except BaseException as error:
        if is_interrupt(error):
            raise
        return None, error


@dataclass(slots=True)
class Fault:
    """The exception that the code in a `fault_boundary` raised."""

    error: BaseException | None = None


@contextlib.contextmanager
def fault_boundary() -> Iterator[Fault]:
    """Context for code that may raise anything. An exception that the code raises becomes `Fault.error`, which the caller must handle.

    A generator must not yield in the context, because closing the generator would look like an error in the code.

    Raises only exceptions that must stop more than this code:
        CancelledError: the current task was cancelled, even if the code converted the cancellation to another exception.
        KeyboardInterrupt: ctrl-C; see `is_interrupt`.
        GeneratorExit: the coroutine is being closed, by another task or after a cancellation.
        SandboxUnavailable: this machine cannot open any sandbox.
    """
    fault, task, since = Fault(), _current_task(), cancellation_count()
    try:
        yield fault
    except BaseException as error:
        cancelled = cancellation_count() > since
        closed = isinstance(error, GeneratorExit) and (cancelled or _current_task() is not task)
        if closed or isinstance(error, SandboxUnavailable) or is_interrupt(error):
            raise
        if cancelled:
            raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError from error
        fault.error = error


@contextlib.contextmanager
def raising_as(make: Callable[[BaseException], Exception], *, but: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """A `fault_boundary` that raises `make(error)` in place of an error, but re-raises errors of the types `but` unchanged."""
    with fault_boundary() as fault:
        yield
    if fault.error is not None:
        if isinstance(fault.error, but):
            raise fault.error
        raise make(fault.error) from fault.error


@contextlib.contextmanager
def logging_faults(what: str) -> Iterator[None]:
    """A `fault_boundary` that logs an error (see `log_unexpected`). Use it for code on which no result depends."""
    with fault_boundary() as fault:
        yield
    if fault.error is not None:
        log_unexpected(what, fault.error)


def is_interrupt(error: BaseException) -> bool:
    """Whether ctrl-C caused an exception: it is a KeyboardInterrupt, or a group of them, in the main thread under Python's own handler.

    Python's own handler raises KeyboardInterrupt without a cancellation. Any other handler must cancel the main task before it raises, or
    end the process.
    """
    return (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
        and all(isinstance(member, KeyboardInterrupt) for member in group_members(error))
    )


def cancellation_count() -> int:
    """Returns how many cancellations the current task has received. A CancelledError without a new cancellation is a bug in the code that
    raised it.

    Compare with an earlier count: in Python 3.11, a TaskGroup with a failed task may leave the count of its parent at 1. A cancellation
    counts from the await that raises it.
    """
    task = _current_task()
    return 0 if task is None else task.cancelling() - getattr(task, "_must_cancel", False)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def _contain(loop: asyncio.AbstractEventLoop) -> None:
    """Makes tasks that user-supplied code starts on this loop raise `CodeExited` instead of an exception that would stop the loop."""
    before = loop.get_task_factory()
    if isinstance(before, _Factory):
        return
    loop.set_task_factory(_Factory(before))


class _Factory:
    """A task factory that wraps the factory `before`, or asyncio's default if `before` is None."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None, **options: Any) -> Any:
        theirs = _theirs.get() if context is None else context.get(_theirs, False)
        if context is not None:
            options["context"] = context
        work = _Contained(coro) if theirs and asyncio.iscoroutine(coro) else coro
        if self._before is None:
            return asyncio.Task(work, loop=loop, **options)
        return self._before(loop, work, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises `CodeExited` instead of SystemExit, and instead of a KeyboardInterrupt that ctrl-C did not cause."""

    def __init__(self, code: Coroutine[Any, Any, Any]) -> None:
        self._code = code
        self.__qualname__ = getattr(code, "__qualname__", type(code).__name__)  # shown when the task is printed

    def send(self, value: Any) -> Any:
        began = time.monotonic()
        try:
            return self._code.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exited(error) from error
        finally:
            loop_lag.record_computation(self.__qualname__, time.monotonic() - began)

    def throw(self, *error: Any) -> Any:
        try:
            return self._code.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exit_:
            raise _exited(exit_) from exit_

    def close(self) -> None:
        self._code.close()

    @property
    def cr_await(self) -> Any:
        """The awaitable that the coroutine is waiting for."""
        return getattr(self._code, "cr_await", None)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._code.__await__()


def _exited(error: BaseException) -> BaseException:
    return error if is_interrupt(error) else CodeExited(describe_error(error))


async def _end(task: asyncio.Task[Any], steps: _Steps[Any], what: str, grace_s: float) -> None:
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_s)
    finally:
        if not task.done():
            log.warning("%s ignored its cancellation and was abandoned", what)
            steps.dropped = True
            task.cancel()
    await asyncio.wait({task})


def _warn_blocked(what: str, seconds: float) -> None:
    if _again((what, "held")):
        fix = "await slow operations, and run computations in asyncio.to_thread"
        log.warning("%s blocked the event loop and all episodes for %.1f s: %s", what, seconds, fix)


class _Steps(Generic[T]):
    """Awaits `code()` and measures the longest time for which it computed without awaiting.

    After `dropped` is set, a cancellation closes `code()` and is raised, even if the code ignores cancellations.
    """

    def __init__(self, code: Callable[[], Awaitable[T]], what: str) -> None:
        self.longest_s = 0.0
        self.dropped = False
        self._code, self._what = code, what

    def __await__(self) -> Generator[Any, Any, T]:
        running = self._run()
        steps = running.__await__()
        error: BaseException | None = None
        while True:
            began = time.monotonic()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                seconds = time.monotonic() - began
                self.longest_s = max(self.longest_s, seconds)
                loop_lag.record_computation(self._what, seconds)
            error = None
            try:
                yield waits_for
            except BaseException as thrown:  # a cancellation
                if self.dropped:
                    with contextlib.suppress(BaseException):  # additional exceptions of the code
                        steps.close()
                    raise
                error = thrown

    async def _run(self) -> T:
        return await self._code()


async def run_in_thread(code: Callable[[], T], *, what: str) -> T:
    """Runs blocking `code()` in a new thread and returns its result.

    A thread cannot be stopped. If this call is cancelled, the thread continues as a daemon.

    Raises:
        InfrastructureError: `MAX_THREADS` threads are running.
        BaseException: any exception that `code` raised.
    """
    if not _threads.acquire(blocking=False):
        raise InfrastructureError(f"{MAX_THREADS} tool threads are still running\n  fix: add timeouts to blocking operations of the tools")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = code()
        except BaseException as raised:
            error = raised
        _threads.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    try:
        threading.Thread(target=copy_context().run, args=(work,), name=what, daemon=True).start()
    except BaseException:
        _threads.release()
        raise
    value, error = await done
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if T allows it


def first_cause(error: BaseException, *kinds: type[E]) -> E | None:
    """Returns the first exception that has one of the types `kinds`: `error` or, for an exception group, a member of it; None if none
    has."""
    return next((member for member in group_members(error) if isinstance(member, kinds)), None)


def describe_error(error: BaseException, limit: int = 300) -> str:
    """Returns an exception as one printable line of at most `limit` characters: "ZeroDivisionError: division by zero"."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    kind, text = type(error).__name__[:64], " ".join(error_text(error, limit).split())
    return printable(f"{kind}: {text}" if text else kind, limit)


def error_text(error: BaseException, limit: int = 2000) -> str:
    """Returns at most `limit` characters of the text of an exception, printable and without secrets, with its line breaks."""
    return printable(redact(raw_text(error)[:_MAX_TEXT]), limit)


def printable(text: str, limit: int) -> str:
    """Returns at most `limit` characters of `text`; unprintable ones other than newlines become replacement characters."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text[:limit])


def one_line(text: str, limit: int = 1000) -> str:
    """Returns at most `limit` printable characters of `text`, as one line."""
    return " ".join(printable(text, limit).split())


def clip(text: str, limit: int) -> str:
    """Returns about `limit` characters of a string: its head and tail, with a mark at the cut."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


def clean(words: Any, limit: int) -> str:
    """Returns about `limit` characters of a string, from its head and tail, without control characters; empty if `words` is not a
    string."""
    if not isinstance(words, str):
        return ""
    text = clip(words, limit).replace("\r\n", "\n").replace("\t", "    ")
    return printable(text, len(text))


def log_unexpected(what: str, error: BaseException, *, trace: bool = True) -> None:
    """Logs an unexpected exception: the first of a kind (`what`, type and location) with its traceback, the 10th, 100th, ... in one line
    each.

    Args:
        trace: whether to log the traceback, which is useless for some errors. The traceback of a full disk is always omitted.
    """
    trace = trace and disk_full_error(error) is None
    frame = next(iter(traceback.extract_tb(error.__traceback__, limit=-1)), None)
    location = "" if frame is None else f"{frame.filename}:{frame.lineno}"
    key = (what, type(error).__name__, location)
    if not _again(key):
        return
    if (times := _seen.get(key, 1)) > 1:
        log.warning("%s: %s (the %dth time)", what, describe_error(error), times)
        return
    log.warning("%s: %s%s", what, describe_error(error), f"\n{_traceback(error)}" if trace else "")


def _again(key: tuple[str, ...]) -> bool:
    """Counts an error of a kind. Returns whether to log it: the first, 10th, 100th, ..."""
    if key not in _seen and len(_seen) >= _KINDS:
        key = ("others",)
    times = _seen[key] = _seen.get(key, 0) + 1
    return times in (1, 10, 100, 1_000, 10_000, 100_000)


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error, limit=-_FRAMES))
    except Exception as second:  # formatting a traceback must not raise another
        text = f"(no traceback: {type(second).__name__})"
    if len(text) > MAX_TRACEBACK:
        text = f"{text[: MAX_TRACEBACK // 2]}\n...\n{text[-MAX_TRACEBACK // 2 :]}"
    return printable(text, len(text)).rstrip("\n")
