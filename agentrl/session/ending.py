"""Handles interrupts of a run, and reports why a run failed: one error with one cause, in a few lines. The traceback is written to the
driver's log.

An error that is raised while an earlier error is being handled is logged and never replaces the earlier error.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from agentrl.base import user_code
from agentrl.base.error_text import disk_full_error, group_members, main_error, one_line_error, raise_location
from agentrl.base.secrets import redact
from agentrl.base.user_code import HOLD_S
from agentrl.errors import AgentRLError, UserError
from agentrl.session.folder import check_disk

log = logging.getLogger(__name__)

DRIVER_LOG = "logs/driver.log"
_MAX_CHARS = 100_000  # maximum number of characters in a message
_ROOM_S, _ROOM_LOOK_S = 86_400.0, 1.0
"""Maximum time that a run waits for space on its disk, and the time between two checks of the disk, in seconds."""
_CROWDED = 16 << 20
"""Number of free bytes on a run's disk below which a failure is attributed to the full disk. It is less than the size of the smallest
checkpoint."""


@contextmanager
def handle_interrupts(first: Callable[[], None], *, in_hand: str = "the step") -> Iterator[None]:
    """Calls `first` at the first ctrl-C or SIGTERM, and cancels the current task at the second. Restores the previous signal handlers when
    the block ends.

    If the event loop is blocked and has not handled a signal for `HOLD_S`, the next signal also raises KeyboardInterrupt in the code that
    blocks the loop.

    Args:
        in_hand: the work that is finished after the first signal, for the message.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "runs inside a task"
    handled, waiting_since = 0, math.inf

    def handle() -> None:
        nonlocal handled, waiting_since
        handled, waiting_since = handled + 1, math.inf
        if handled == 1:
            first()
            print(f"\nfinishing {in_hand} in progress; interrupt again to stop now", file=sys.stderr, flush=True)
        else:
            task.cancel()

    def on_signal(*_: object) -> None:  # `loop.add_signal_handler` is not used, because its handler waits for the loop
        nonlocal waiting_since
        now = time.monotonic()
        blocked, waiting_since = now - waiting_since > HOLD_S, min(now, waiting_since)
        loop.call_soon_threadsafe(handle)
        if blocked:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def warn_on_error(folder: Path, doing: str) -> Iterator[None]:
    """Runs a block on which no result depends. An error in the block is logged as a warning, and its traceback is written to the driver's
    log."""
    try:
        yield
    except Exception as second:
        append_driver_log(folder, f"an additional error in {doing}", second)
        log.warning("%s: %s", doing, one_line_error(second))


@asynccontextmanager
async def closing_stack(folder: Path) -> AsyncIterator[AsyncExitStack]:
    """Yields an exit stack. Errors that are raised while the stack is closed are written to the driver's log.

    If the block succeeded, such an error is also logged as a warning, because the results are complete and only open resources may be left
    behind. A cancellation while the stack is closed is raised, unless the block raised an error, which is then raised instead.
    """
    body: BaseException | None = None
    try:
        async with AsyncExitStack() as stack:
            try:
                yield stack
            except BaseException as error:
                body = error
                raise
    except BaseException as last:
        if last is body or (body is None and not isinstance(last, Exception)):
            raise
        append_driver_log(folder, "an additional error while closing", last)
        if body is None:
            _left(last)
    if body is not None:
        raise body


@asynccontextmanager
async def close_after(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Calls `close` after the block, whether or not it raises. An error in `close` is logged as a warning."""
    try:
        yield
    finally:
        try:
            await close()
        except Exception as error:
            _left(error)


def _left(error: BaseException) -> None:
    log.warning(
        "closing failed, and sandboxes may be left behind (agentrl sandbox prune removes them): %s", one_line_error(main_error(error))
    )


def append_driver_log(folder: Path, what: str, error: BaseException | None = None) -> Path | None:
    """Appends an event, or an error with its traceback, to `logs/driver.log` in a run folder. Returns the path of this log; None if it
    cannot be written."""
    path = folder / DRIVER_LOG
    trace = f"{redact(''.join(traceback.format_exception(error)))}\n" if error is not None else ""
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n{trace}"
    try:
        if not path.parent.is_dir():
            return None
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return path


def ended_by_user(error: BaseException) -> bool:
    """Whether a user stopped the command, and nothing else failed.

    A KeyboardInterrupt from user-supplied code does not reach this function.
    """
    return all(isinstance(leaf, asyncio.CancelledError | KeyboardInterrupt) for leaf in group_members(error))


def report_error(error: BaseException, *, folder: Path | None = None, go_on: str = "") -> int:
    """Prints to standard error why a command failed, with one cause. Returns the exit code: 2 for a `UserError`, otherwise 1.

    Args:
        folder: the run folder, to whose `logs/driver.log` the traceback is written. If `folder` is None or the log cannot be written, the
            traceback of a bug is printed.
        go_on: the command that continues the run, if there is one.
    """
    cause = main_error(error)
    plain = isinstance(cause, UserError) and cause is error
    written = append_driver_log(folder, "the run failed", error) if folder is not None and not plain else None
    lines = _words(cause, folder)
    if go_on:
        lines.append(f"  continue with: {go_on}")
    if written is not None and not isinstance(cause, UserError):
        lines.append(f"  traceback: {written}")
    elif written is None and not isinstance(cause, AgentRLError | OSError) and not disk_full_error(cause):  # a bug
        print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    message = user_code.printable(redact("\n".join(lines)).expandtabs(4), _MAX_CHARS)  # file names can contain any characters
    print(message, file=sys.stderr, flush=True)
    return 2 if isinstance(cause, UserError) else 1


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Whether a run failed because its disk is full or nearly full. False for a `UserError` and for a run that the user stopped."""
    cause = main_error(error)
    if isinstance(cause, UserError) or ended_by_user(error):
        return False
    return disk_full_error(cause) is not None or _crowded(folder)


def pause_until_room(error: BaseException, folder: Path) -> None:
    """Reports that a run is paused because its disk is full, and returns when 1 GiB is free.

    Blocks the thread. Raises `error` if the disk still has less space after a day.
    """
    until = time.monotonic() + _ROOM_S
    append_driver_log(folder, "the run pauses, because its disk is full", error)
    reason = _words(main_error(error), folder)[0].removeprefix("failed: ")
    _print(f"paused: {reason}\n  fix: free space there; the run continues when 1 GiB is free. Ctrl-C ends it; finished work is kept")
    while not _has_room(folder):
        if time.monotonic() > until:
            raise error
        time.sleep(_ROOM_LOOK_S)
    _print("the disk has free space again; the run continues")


def _has_room(folder: Path) -> bool:
    try:
        check_disk(folder)
    except UserError:
        return False
    return True


def _print(text: str) -> None:
    print(user_code.printable(redact(text), _MAX_CHARS), file=sys.stderr, flush=True)


def _words(cause: BaseException, folder: Path | None) -> list[str]:
    if isinstance(cause, UserError):
        return [f"error: {cause}"]
    if (full := disk_full_error(cause)) is not None:
        detail = str(cause).splitlines()[0] if isinstance(cause, AgentRLError) else one_line_error(full)
        return [f"failed: {_disk(folder)}: {detail}", "  fix: free space there; finished work is kept"]
    at = raise_location(cause)
    text = str(cause) if isinstance(cause, AgentRLError) else one_line_error(cause) + (f" ({at})" if at else "")
    lines = text.splitlines() or [one_line_error(cause)]
    if isinstance(cause, OSError) and cause.filename is not None:
        lines[0] = lines[0].removeprefix(f"{type(cause).__name__}: [Errno {cause.errno}] ")
        lines.append("  fix: use a different path, or change its permissions")
    if not _crowded(folder):
        return [f"failed: {lines[0]}", *lines[1:]]
    # A full disk may appear as a different error: a library reports a broken file, or the kernel kills a writer to mapped memory.
    return [f"failed: {_disk(folder)}, which is the likely cause: {lines[0]}", "  fix: free space there; finished work is kept"]


def _crowded(folder: Path | None) -> bool:
    return folder is not None and folder.is_dir() and shutil.disk_usage(folder).free < _CROWDED


def _disk(folder: Path | None) -> str:
    if folder is None or not folder.is_dir():
        return "the disk is full"
    return f"the disk of {folder} is full ({shutil.disk_usage(folder).free >> 20} MiB free)"
