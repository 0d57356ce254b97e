"""Calls of user code end in time whatever it does, and its errors become text that is safe to show."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base import user_code
from agentrl.base.error_text import disk_full_error, one_line_error
from agentrl.base.user_code import (
    CallTimeout,
    CodeExited,
    call_user_code,
    describe_error,
    fault_boundary,
    first_cause,
    log_unexpected,
    logging_faults,
    printable,
    raising_as,
    run_in_thread,
)
from agentrl.errors import SandboxError, SandboxUnavailable


async def test_the_caller_gets_the_result_or_error_of_the_code() -> None:
    async def give(value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def throw(error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    assert await call_user_code(lambda: give(3), what="w", timeout_s=5.0) == 3
    assert await call_user_code(lambda: give(None), what="w", timeout_s=5.0) is None
    for error in (KeyError("x"), SystemExit(3), RecursionError(), asyncio.CancelledError(), TimeoutError(), MemoryError()):
        with pytest.raises(type(error)):
            await call_user_code(lambda error=error: throw(error), what="w", timeout_s=5.0)  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="w raised GeneratorExit"):
        await call_user_code(lambda: throw(GeneratorExit()), what="w", timeout_s=5.0)
    assert user_code.cancellation_count() == 0
    with pytest.raises(TypeError, match="await"):
        await call_user_code(lambda: 3, what="w", timeout_s=5.0)  # type: ignore[arg-type,return-value]


def test_a_task_that_the_code_starts_cannot_leave_the_event_loop_with_systemexit() -> None:
    late: list[asyncio.Task[None]] = []

    async def leave() -> None:
        await asyncio.sleep(0)
        raise SystemExit(0)  # as argparse does for --help

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())

    async def gathered() -> None:
        await asyncio.gather(leave(), asyncio.sleep(0))

    async def forgotten() -> int:
        late.append(asyncio.create_task(leave()))
        late.append(asyncio.create_task(leave()))
        late[-1].cancel()  # before it has begun
        return 3

    async def run_all() -> None:
        for code, kind in ((grouped, ExceptionGroup), (gathered, CodeExited)):
            with pytest.raises(kind) as error:
                await call_user_code(code, what="w", timeout_s=5.0)
            assert first_cause(error.value, CodeExited) is not None and describe_error(error.value) == "CodeExited: SystemExit: 0"
        assert await call_user_code(forgotten, what="w", timeout_s=5.0) == 3
        assert "leave" in repr(late[0])
        results = await asyncio.gather(*late, return_exceptions=True)
        assert [type(result) for result in results] == [CodeExited, asyncio.CancelledError]

    asyncio.run(run_all())
    with pytest.raises(SystemExit):  # a task of our own may exit
        asyncio.run(run_own_task(leave))


@pytest.fixture
def foreground() -> Iterator[None]:
    """Handles ctrl-C as in a terminal's foreground. A shell's background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_keyboard_interrupt_is_no_ctrl_c_if_ctrl_c_is_ignored(foreground: None) -> None:
    async def own() -> None:
        raise KeyboardInterrupt

    assert user_code.is_interrupt(KeyboardInterrupt())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert not user_code.is_interrupt(KeyboardInterrupt())
    with pytest.raises(RuntimeError, match="w raised KeyboardInterrupt"):
        asyncio.run(call_user_code(own, what="w", timeout_s=60.0))


def test_ctrl_c_ends_the_run_and_a_keyboard_interrupt_raised_by_code_does_not(foreground: None) -> None:
    async def own() -> None:
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    async def own_task() -> None:
        await asyncio.gather(own(), asyncio.sleep(0))

    async def pressed_twice() -> None:
        signal.raise_signal(signal.SIGINT)  # requests the end, which this code does not wait for
        signal.raise_signal(signal.SIGINT)  # is raised here

    async def pressed_once() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    def run(code: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(call_user_code(code, what="w", timeout_s=60.0))

    with pytest.raises(RuntimeError, match=r"w raised KeyboardInterrupt \(.*test_user_code\.py:\d+\)"):
        run(own)
    with pytest.raises(CodeExited, match="KeyboardInterrupt"):
        run(own_task)
    for code in (pressed_once, pressed_twice):
        with pytest.raises(KeyboardInterrupt) as error:
            run(code)
        assert user_code.is_interrupt(error.value)
    assert user_code.is_interrupt(KeyboardInterrupt()) and not user_code.is_interrupt(SystemExit())


def test_a_keyboard_interrupt_outside_the_main_thread_is_never_ctrl_c(foreground: None) -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(user_code.is_interrupt(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert results == [False]


class Panic(BaseException):
    """Like the panic of a Rust library."""


FOREIGN = (
    KeyError("x"),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    GeneratorExit(),
    StopIteration(),
    Panic(),
    BaseExceptionGroup("g", [SystemExit()]),
)


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
def test_every_error_of_code_in_an_event_loop_is_a_result(foreground: None, error: BaseException) -> None:
    async def inside() -> None:
        with fault_boundary() as fault:
            raise error
        assert fault.error is error
        with pytest.raises(ZeroDivisionError) as raised, raising_as(lambda _: ZeroDivisionError()):
            raise error
        assert raised.value.__cause__ is error
        with logging_faults("a tracker"):
            raise error
        with pytest.raises(type(error)), raising_as(lambda _: ZeroDivisionError(), but=(type(error),)):
            raise error

    asyncio.run(inside())


def test_ctrl_c_without_an_event_loop_passes_every_boundary(foreground: None) -> None:
    for boundary in (fault_boundary(), raising_as(lambda _: ZeroDivisionError()), logging_faults("a tracker")):
        with pytest.raises(KeyboardInterrupt), boundary:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(SandboxUnavailable), fault_boundary():
        raise SandboxUnavailable("no daemon")
    with fault_boundary() as fault:
        raise SystemExit(3)
    assert isinstance(fault.error, SystemExit)


def test_ctrl_c_during_blocking_code_ends_the_run(foreground: None) -> None:
    """The second ctrl-C is raised in the code and ends only the code. The first one ends the run."""
    results: list[BaseException | None] = []

    async def blocked() -> None:
        with fault_boundary() as fault:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        results.append(fault.error)
        await asyncio.sleep(60)

    async def in_a_child() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(blocked())

    for code in (blocked, in_a_child):
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(code())
    assert [type(error) for error in results] == [KeyboardInterrupt, KeyboardInterrupt]


async def cancelled_midway(code: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Returns whether the cancellation of a task that runs `code` in a boundary ends that task."""
    after = False

    async def guarded() -> None:
        nonlocal after
        with fault_boundary():
            await code()
        after = True

    running = asyncio.create_task(guarded())
    for _ in range(3):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled() != after
    return running.cancelled()


async def test_a_cancellation_passes_however_the_code_handles_it() -> None:
    async def converts() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise KeyError("x") from None

    async def leaves_a_count() -> None:  # as a TaskGroup of Python 3.11 may
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(asyncio.CancelledError):
            task.cancel()
            await asyncio.sleep(0)
        with fault_boundary() as fault:
            raise asyncio.CancelledError
        assert isinstance(fault.error, asyncio.CancelledError)
        await asyncio.sleep(60)

    for code in (lambda: asyncio.sleep(60), converts, leaves_a_count):
        assert await cancelled_midway(code)


async def test_a_cancellation_before_the_first_await_is_not_lost() -> None:
    """A signal handler cancels the running task: the cancellation is raised at the next await, which may be inside a boundary."""

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with fault_boundary():
            await asyncio.sleep(60)

    running = asyncio.create_task(guarded())
    await asyncio.wait({running})
    assert running.cancelled()


async def test_code_that_cancels_its_own_task_cancels_nothing_else() -> None:
    async def ends(wait: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if wait:
            await asyncio.sleep(60)

    for wait in (True, False):
        with fault_boundary() as fault:
            await call_user_code(lambda wait=wait: ends(wait), what="w", timeout_s=5.0)  # type: ignore[misc]
        assert isinstance(fault.error, asyncio.CancelledError)
    assert user_code.cancellation_count() == 0


def test_an_exception_without_a_printable_text_is_described() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    assert describe_error(Mute()) == one_line_error(Mute()) == "Mute: (its text cannot be shown)"
    assert disk_full_error(Mute()) is None


def test_a_closed_coroutine_stays_closed() -> None:
    ended: list[BaseException] = []
    codes: list[Coroutine[Any, Any, None]] = []

    async def guarded() -> None:
        try:
            with fault_boundary():
                await asyncio.get_running_loop().create_future()
            raise AssertionError("it continued")
        except BaseException as error:
            ended.append(error)
            raise

    async def started() -> None:
        codes.append(guarded())
        codes[0].send(None)

    async def both() -> None:
        await asyncio.create_task(started())
        codes[0].close()

    asyncio.run(both())
    assert [type(error) for error in ended] == [GeneratorExit]


async def test_an_abandoned_call_does_not_continue_after_a_boundary() -> None:
    steps: list[str] = []

    async def deaf() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                with fault_boundary() as fault:
                    await asyncio.sleep(60)
                steps.append(type(fault.error).__name__)

    with pytest.raises(CallTimeout):
        await call_user_code(deaf, what="w", timeout_s=0.01, grace_s=0.01)
    assert steps == [] and asyncio.all_tasks() == {asyncio.current_task()}


async def run_own_task(leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await call_user_code(lambda: asyncio.sleep(0), what="w", timeout_s=5.0)
    await asyncio.create_task(leave())


async def test_an_endless_call_is_cancelled() -> None:
    ended = False

    async def hang() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            ended = True

    with pytest.raises(CallTimeout, match=r"tool slow gave no result within 0\.05 s"):
        await call_user_code(hang, what="tool slow", timeout_s=0.05)
    assert ended and len(asyncio.all_tasks()) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from the coroutine, when Python frees it
async def test_a_call_that_ignores_its_cancellation_is_dropped(caplog: Any) -> None:
    cancellations = 0

    async def stubborn() -> None:
        nonlocal cancellations
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException:
                cancellations += 1

    with pytest.raises(CallTimeout):
        await call_user_code(stubborn, what="tool stubborn", timeout_s=0.01, grace_s=0.01)
    assert cancellations >= 2 and "tool stubborn ignored its cancellation" in caplog.text
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_caller_cancels_its_call() -> None:
    running = asyncio.create_task(call_user_code(lambda: asyncio.sleep(60), what="w", timeout_s=60.0))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(asyncio.all_tasks()) == 1


async def test_code_that_blocks_the_event_loop_is_logged_by_name(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "HOLD_S", 0.05)

    async def busy(wait: float, block: float) -> None:
        await asyncio.sleep(wait)
        time.sleep(block)

    await call_user_code(lambda: busy(0.2, 0.0), what="tool patient", timeout_s=5.0)
    assert caplog.text == ""
    await call_user_code(lambda: busy(0.0, 0.06), what="tool busy", timeout_s=5.0)
    assert "tool busy blocked the event loop and all episodes for 0." in caplog.text and "asyncio.to_thread" in caplog.text


def test_a_fault_is_logged_in_full_once_and_then_counted(caplog: Any) -> None:
    for number in range(25):
        try:
            raise KeyError(f"a{number}\x1b[2J\ud800")
        except KeyError as error:
            log_unexpected("tool logged", error)
    assert caplog.text.count("Traceback") == 1 and "in test_a_fault_is_logged" in caplog.text
    assert len(caplog.records) == 2 and "(the 10th time)" in caplog.records[1].message
    assert "\x1b" not in caplog.text and "\ud800" not in caplog.text


def test_a_full_disk_is_logged_without_a_traceback(caplog: Any) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("the traces cannot be written") from error
    except RuntimeError as error:
        log_unexpected("capturing", error)
    assert "capturing: RuntimeError: the traces cannot be written" in caplog.text and "Traceback" not in caplog.text


class Textless(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


def test_the_text_of_an_exception_is_bounded_and_never_raises() -> None:
    assert describe_error(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(Textless()) == describe_error(Textless(10**5000)) == "Textless: (its text cannot be shown)"
    assert describe_error(KeyError(10**5000)).startswith("KeyError: (its text cannot")
    assert describe_error(ExceptionGroup("unhandled", [ExceptionGroup("more", [ValueError("one\nline")])])) == "ValueError: one line"
    assert len(describe_error(ValueError("x" * 1_000_000), 300)) == 300
    log_unexpected("tool textless", Textless())


@given(st.text(alphabet=st.characters(), max_size=400), st.integers(1, 300))
def test_descriptions_of_exceptions_are_printable_and_bounded(text: str, limit: int) -> None:
    description = describe_error(ValueError(text), limit)
    assert len(description) <= limit and description.isprintable()
    assert len(printable(text, limit).encode("utf-8").decode()) == min(len(text), limit)


def test_the_first_cause_is_found_in_groups() -> None:
    inner = SandboxError("gone")
    assert first_cause(inner, SandboxError) is inner
    assert first_cause(ExceptionGroup("a", [KeyError(), ExceptionGroup("b", [inner])]), SandboxError) is inner
    assert first_cause(ExceptionGroup("a", [KeyError()]), SandboxError) is None
    deep: Exception = inner
    for _ in range(5000):
        deep = ExceptionGroup("a", [deep])
    assert first_cause(deep, SandboxError) is inner and first_cause(deep, KeyError) is None
    log_unexpected("tool deep", deep)


async def test_a_thread_returns_the_result_or_raises_the_error_of_its_code() -> None:
    assert await run_in_thread(lambda: threading.current_thread().name, what="a tool") == "a tool"
    for error in (KeyError("x"), SystemExit(3), StopIteration(1)):

        def throw(error: BaseException = error) -> None:
            raise error

        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
            await run_in_thread(throw, what="w")


async def test_abandoned_threads_are_bounded_and_release_their_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_threads", threading.BoundedSemaphore(2))
    release = threading.Event()
    for _ in range(2):
        with pytest.raises(CallTimeout):
            await call_user_code(lambda: run_in_thread(release.wait, what="w"), what="w", timeout_s=0.01)
    with pytest.raises(RuntimeError, match="still running"):
        await run_in_thread(lambda: 1, what="w")
    release.set()
    async with asyncio.timeout(10):
        while True:
            try:
                assert await run_in_thread(lambda: 1, what="w") == 1
                break
            except RuntimeError:
                await asyncio.sleep(0.01)
