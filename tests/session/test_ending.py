"""An error is printed with one cause in a few lines; the traceback is in the log."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.base.user_code import call_user_code
from agentrl.errors import LearnerError, SandboxError, StoreError, UserError
from agentrl.learner.driver_reports import ExitReason, best_reason, send_exit_reason
from agentrl.session import ending
from agentrl.session.ending import (
    close_after,
    closing_stack,
    ended_by_user,
    handle_interrupts,
    is_disk_full,
    pause_until_room,
    report_error,
    warn_on_error,
)

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_bug_in_a_run_is_one_line_with_its_location_and_the_log_has_the_traceback(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = ExceptionGroup("unhandled errors in a TaskGroup", [raised(KeyError("lost"))])
    assert report_error(error, folder=run, go_on="agentrl train r.py --resume") == 1
    printed = capsys.readouterr().err
    assert printed.splitlines()[0].startswith("failed: KeyError: 'lost' (") and "test_ending.py:" in printed
    assert "continue with: agentrl train r.py --resume" in printed and str(run / "logs" / "driver.log") in printed
    assert "Traceback" not in printed and len(printed.splitlines()) == 3
    assert "KeyError: 'lost'" in (run / "logs" / "driver.log").read_text() and "Traceback" in (run / "logs" / "driver.log").read_text()


def test_without_a_run_folder_only_a_bug_shows_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(raised(KeyError("lost"))) == 1
    assert "Traceback" in capsys.readouterr().err
    assert report_error(raised(KeyError("lost")), folder=tmp_path) == 1, "without logs/ the run has not started"
    assert "Traceback" in capsys.readouterr().err
    for error, code in ((UserError("wrong", fix="right"), 2), (StoreError("damaged"), 1), (FULL, 1)):
        assert report_error(raised(error)) == code
        assert "Traceback" not in capsys.readouterr().err


def test_an_os_error_is_one_line_and_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(raised(OSError(errno.ENAMETOOLONG, "File name too long", "runs/a"))) == 1
    assert report_error(raised(UserError("no run folder a\x1b[31m\tb\u202e", fix="give\r one"))) == 2
    output = capsys.readouterr().err
    assert "Traceback" not in output and "failed: File name too long: 'runs/a'" in output
    assert "\n  fix: use a different path" in output and "Error" not in output
    assert "a\ufffd[31m" in output and output.count("\n") == 4 and all(character.isprintable() or character == "\n" for character in output)


def test_a_full_disk_is_reported_whatever_failed_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise FULL
        except OSError as error:
            raise StoreError(f"experience store {run}/x: the disk is full\n  fix: free space") from error
    except StoreError as error:
        assert report_error(ExceptionGroup("g", [LearnerError("gone too"), error]), folder=run, go_on="again") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"failed: the disk of {run} is full (") and "experience store" in lines[0]
    assert lines[1] == "  fix: free space there; finished work is kept" and lines[2] == "  continue with: again"
    assert len(lines) == 4


@pytest.mark.parametrize(
    "error",
    [
        LearnerError("the learner exited with code -7: it gave no reason\n  fix: see there\n  full output: logs/learner.log"),
        sqlite3.OperationalError("disk I/O error"),
        LearnerError(""),
    ],
)
def test_failures_next_to_a_full_disk_are_attributed_to_it(
    error: Exception, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report_error(error, folder=run, go_on="again")
    first = capsys.readouterr().err.splitlines()
    assert "full" not in first[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=(16 << 20) - 1))
    report_error(error, folder=run, go_on="again")
    lines = capsys.readouterr().err.splitlines()
    cause = first[0].removeprefix("failed: ")
    assert lines[0] == f"failed: the disk of {run} is full (15 MiB free), which is the likely cause: {cause or 'LearnerError'}"
    assert lines[1:3] == ["  fix: free space there; finished work is kept", "  continue with: again"] and len(lines) == 4


async def test_errors_on_closing_never_replace_the_first(run: Path) -> None:
    async def closed_badly() -> None:
        raise FULL

    with pytest.raises(KeyError, match="the first"):
        async with closing_stack(run) as stack:
            stack.push_async_callback(closed_badly)
            try:
                raise KeyError("the first")
            except KeyError:
                with warn_on_error(run, "the summary and the report"):
                    raise StoreError("the second")  # noqa: B904
                raise
    log = (run / "logs" / "driver.log").read_text()
    assert "an additional error in the summary and the report" in log and "StoreError: the second" in log
    assert "an additional error while closing" in log and "No space left" in log


async def test_an_error_only_in_closing_is_a_warning_and_the_rest_is_closed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    async def closed_badly() -> None:
        raise SandboxError("Docker daemon: connection refused")

    async with closing_stack(run) as stack:
        stack.callback(closed.append, "the first to be opened")
        stack.push_async_callback(closed_badly)
        stack.callback(closed.append, "the last")
    assert closed == ["the last", "the first to be opened"]
    assert (
        "sandboxes may be left behind (agentrl sandbox prune removes them): SandboxError: Docker daemon: connection refused" in caplog.text
    )
    log = (run / "logs" / "driver.log").read_text()
    assert "while closing" in log and "Traceback" in log

    async with close_after(closed_badly):
        closed.append("body")
    assert closed[-1] == "body" and caplog.text.count("connection refused") == 2
    with pytest.raises(KeyError, match="the first"):
        async with close_after(closed_badly):
            raise KeyError("the first")


async def test_an_interrupt_during_closing_is_raised(run: Path) -> None:
    async def never() -> None:
        await asyncio.sleep(3600)

    async def closing() -> None:
        async with closing_stack(run) as stack:
            stack.push_async_callback(never)

    task = asyncio.create_task(closing())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_step_that_no_result_depends_on_is_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warn_on_error(run, "the report"):
        raise KeyError("a template")
    assert "the report: KeyError: 'a template'" in caplog.text and "Traceback" in (run / "logs" / "driver.log").read_text()


def test_a_user_interrupt_is_not_an_error() -> None:
    assert ended_by_user(KeyboardInterrupt()) and ended_by_user(BaseExceptionGroup("g", [asyncio.CancelledError(), KeyboardInterrupt()]))
    assert not ended_by_user(BaseExceptionGroup("g", [asyncio.CancelledError(), KeyError()]))


def test_a_learners_error_reaches_the_driver_with_its_type(tmp_path: Path) -> None:
    """Two ranks: the failing one reports the reason; the other reports first, but only that it lost its peer."""
    box = tmp_path / "reasons"
    box.touch()
    assert best_reason(box.read_bytes()) is None
    refusal = ExitReason(kind="user", message="no model", fix="take another")
    for sent in (ExitReason(kind="other", message="RuntimeError: peer is gone"), refusal):
        rank = multiprocessing.get_context("fork").Process(target=send_exit_reason, args=(str(box), sent))
        rank.start()
        rank.join()
    reason = best_reason(box.read_bytes())
    assert reason is not None
    assert reason == refusal
    error = reason.to_error(tmp_path / "learner.log")
    assert isinstance(error, UserError) and error.fix == "take another"


def test_long_reasons_are_cut_and_invalid_ones_ignored(tmp_path: Path) -> None:
    box = tmp_path / "reasons"
    box.write_bytes(b'{"kind": "other"\n[]\n' + b"[" * 100_000 + b"\n")
    send_exit_reason(str(box), ExitReason.from_error(ValueError("x" * 10**6)))
    reason = best_reason(box.read_bytes())
    assert reason is not None and len(reason.message) < 5000
    send_exit_reason(str(tmp_path / "gone" / "fd"), ExitReason(kind="other", message="no process reads it"))
    send_exit_reason(None, ExitReason(kind="other", message="no process reads it"))


def test_a_run_on_a_full_disk_pauses_until_there_is_room(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free, waited = [0, 0, 1 << 20, 2 << 30], list[float]()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop(0) if len(free) > 1 else free[0]))
    monkeypatch.setattr(ending.time, "sleep", waited.append)
    error = raised(ExceptionGroup("parts", [StoreError("the store failed"), raised(FULL)]))
    pause_until_room(error, run)
    output = capsys.readouterr().err
    assert output.startswith(f"paused: the disk of {run} is full (0 MiB free)") and "Traceback" not in output
    assert output.endswith("the disk has free space again; the run continues\n") and len(waited) == 2
    assert "the run pauses" in (run / "logs" / "driver.log").read_text()

    monkeypatch.setattr(ending, "_ROOM_S", -1.0)
    free[:] = [0]
    with pytest.raises(ExceptionGroup):
        pause_until_room(error, run)


def test_only_a_full_disk_pauses_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 << 30))
    assert is_disk_full(raised(FULL), run) and not is_disk_full(raised(LearnerError("lost")), run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert is_disk_full(raised(LearnerError("a broken file")), run), "the disk is nearly full"
    assert not is_disk_full(raised(UserError("wrong")), run) and not is_disk_full(raised(KeyboardInterrupt()), run)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Handles ctrl-C as in a terminal's foreground, and checks that the handlers are restored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminated = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler and signal.getsignal(signal.SIGTERM) is terminated


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_finishes_the_step_and_the_second_stops_it(handlers: None, number: int) -> None:
    firsts: list[bool] = []

    async def run(presses: int) -> str:
        runs_handler = signal.getsignal(signal.SIGINT)
        with handle_interrupts(lambda: firsts.append(True)):
            for _ in range(presses):
                signal.raise_signal(number)
                await asyncio.sleep(0.01)
        assert signal.getsignal(signal.SIGINT) is runs_handler
        return "finished"

    assert asyncio.run(run(1)) == "finished" and firsts == [True]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run(2))
    assert firsts == [True, True]


def test_two_interrupts_stop_a_run_whose_event_loop_is_blocked(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "HOLD_S", 0.05)
    pressing, ended = threading.Event(), list[BaseException]()

    def press() -> None:
        pressing.wait()
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    async def blocks() -> None:
        pressing.set()
        try:
            time.sleep(60)
        except BaseException as error:
            ended.append(error)
            raise

    async def run() -> None:
        with handle_interrupts(lambda: None):
            try:
                await call_user_code(blocks, what="a tool", timeout_s=60.0)
            except RuntimeError:
                await asyncio.sleep(60)

    threading.Thread(target=press, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert time.monotonic() - started < 30 and [type(error) for error in ended] == [KeyboardInterrupt]
