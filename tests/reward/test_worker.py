"""A worker answers each request with its reply, kills processes that hang, and attributes failures to the answer or to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from acting import act, dies, prepare

from agentrl.errors import InfrastructureError, TaskError
from agentrl.reward.worker import AnswerFault, CallFailed, CallTimeout, ControlFailed, SubprocessWorker, _Child


@pytest.fixture(scope="module")
def worker() -> Iterator[SubprocessWorker]:
    subprocess_worker = SubprocessWorker(act, prepare=prepare, deadline_s=1.0, processes=2)
    yield subprocess_worker
    subprocess_worker.close()


async def test_each_request_gets_its_own_reply(worker: SubprocessWorker) -> None:
    assert await asyncio.gather(*(worker.call(number) for number in range(1, 60))) == [1 / number for number in range(1, 60)]
    assert await worker.call("prepared") is True
    assert await worker.call("print") == "printed", "printed output is not a reply"
    assert await worker.call("size " + "x" * 3_000_000) == 3_000_005


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ("hang", CallTimeout, "within 1 s"),
        ("crash", CallFailed, "exit code -11"),
        ("memory", CallFailed, "MemoryError"),
        ("huge reply", CallFailed, "a reply of"),
        (0, CallFailed, "ZeroDivisionError"),
        ("task", TaskError, "the task is broken"),
    ],
)
async def test_failures_are_typed_and_the_next_request_succeeds(
    request_: Any, error: type[Exception], message: str, worker: SubprocessWorker
) -> None:
    with pytest.raises(error, match=message):
        await worker.call(request_)
    assert await worker.call("next") == "next"


async def test_answer_fault_is_distinguished_from_a_broken_function(worker: SubprocessWorker) -> None:
    assert await worker.evaluate(2, control=1) == 0.5
    with pytest.raises(AnswerFault, match="ZeroDivisionError"):
        await worker.evaluate(0, control=1)
    with pytest.raises(ControlFailed, match="control request also fails"):
        await worker.evaluate(0, control=0)


@pytest.mark.slow
async def test_process_that_cannot_start_is_an_infrastructure_fault() -> None:
    with pytest.raises(InfrastructureError, match="did not start"):
        await SubprocessWorker(act, prepare=dies).call(1)


@pytest.mark.slow
async def test_reply_to_another_request_is_rejected(worker: SubprocessWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Child, "_read", lambda self, process, within_s: b'{"number": 99999, "reply": 1.0}\n')
    with pytest.raises(InfrastructureError, match="answered request 99999"):
        await worker.call(1)


@pytest.mark.slow
async def test_cancelled_request_is_never_sent() -> None:
    subprocess_worker = SubprocessWorker(act, deadline_s=60.0)
    assert await subprocess_worker.call(1) == 1.0
    child = subprocess_worker._free.get()  # until it is returned, the first request waits for it, and the others wait for the first
    waiting = [asyncio.create_task(subprocess_worker.call("x" * 10)) for _ in range(2000)]
    await asyncio.sleep(0)
    for job in waiting:
        job.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    subprocess_worker._free.put(child)
    assert await subprocess_worker.call("requests") <= 3, "the process got at most the first request"
    subprocess_worker.close()


@pytest.mark.slow
def test_only_module_level_functions_are_accepted() -> None:
    with pytest.raises(ValueError, match="module-level function"):
        SubprocessWorker(lambda request: request)


@pytest.mark.slow
async def test_process_with_full_memory_is_replaced() -> None:
    """Memory used by one answer must not fail the next ones, or the control request."""
    subprocess_worker = SubprocessWorker(act, deadline_s=60.0, memory=1 << 30)
    with pytest.raises(CallFailed, match="MemoryError"):
        await subprocess_worker.call("hoard")
    assert await subprocess_worker.call("modest") == 512 << 20
    assert await subprocess_worker.call("keep") == "kept"
    assert await subprocess_worker.call("modest") == 512 << 20
    subprocess_worker.close()
