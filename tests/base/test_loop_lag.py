"""The lag of the driver's event loop is measured, reported once, and never blamed on an episode."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

import pytest

from agentrl.agent.invoke import call_tool
from agentrl.agent.outage_blame import Caller, CallRecord
from agentrl.agent.tools import ToolFault, ToolOutcome
from agentrl.base import loop_lag, user_code
from agentrl.base.loop_lag import DRIVER_LAG, STALL_S, TICK_S, LoopLag, StallCount
from agentrl.base.outages import Outage
from agentrl.errors import InfrastructureError
from agentrl.records import Limits
from agentrl.testing.clock import VirtualLoop, run_virtually

HOLD_S = STALL_S + 0.3


@pytest.fixture
def alerts() -> list[str]:
    return []


def virtually(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs the test on a virtual clock, which only waiting and `hold_now` advance, with lag measurement of the driver's loop."""

    async def watched(alerts: list[str], options: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", loop.time)
            patch.setattr(DRIVER_LAG, "_clock", loop.time)
            async with DRIVER_LAG.watched(alerts.append):
                await asyncio.sleep(2 * TICK_S)
                DRIVER_LAG.metrics()
                await test(alerts=alerts, **options)

    @functools.wraps(test)
    def run(alerts: list[str], **options: Any) -> None:
        run_virtually(watched(alerts, options))

    return run


def hold_now() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.hold(HOLD_S)


async def hold() -> None:
    """Blocks the loop, as code of the driver would."""
    await asyncio.sleep(0.1)
    hold_now()


@virtually
async def test_a_stall_is_measured_and_reported_once(alerts: list[str]) -> None:
    stalls = StallCount()

    async def episode() -> None:
        holding = asyncio.create_task(hold(), context=Context())  # code of the driver
        await holding
        await asyncio.sleep(3 * TICK_S)

    for _ in range(2):
        await user_code.call_user_code(episode, what="the agent", timeout_s=30.0)
    assert stalls.seconds > 2 * (HOLD_S - 2 * TICK_S)
    (alert,) = alerts
    assert (
        "the driver's event loop was blocked for" in alert and "the process got no CPU time" in alert and "not the policy's fault" in alert
    )
    figures = DRIVER_LAG.metrics()
    assert figures["loop_lag_ms_max"] >= 1000 * STALL_S and figures["loop_lag_ms_p99"] <= figures["loop_lag_ms_max"]
    await asyncio.sleep(3 * TICK_S)
    assert DRIVER_LAG.metrics()["loop_lag_ms_max"] < 1.0, "figures cover the time since the last call"


@virtually
async def test_many_short_steps_of_one_episode_count_as_its_own_stall(alerts: list[str]) -> None:
    """Many requests arrive at once, and each takes a moment to read."""
    others = StallCount()

    async def step(ready: asyncio.Event) -> None:
        await ready.wait()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.hold(HOLD_S / 10)

    async def agent() -> float:
        ready, own = asyncio.Event(), loop_lag.current_stalls()
        steps = [asyncio.create_task(step(ready)) for _ in range(10)]
        await asyncio.sleep(TICK_S)
        ready.set()
        await asyncio.gather(*steps)
        await asyncio.sleep(2 * TICK_S)
        assert own is not None
        return own.seconds

    assert await user_code.call_user_code(agent, what="the agent", timeout_s=30.0) == 0.0 and others.seconds > STALL_S


@pytest.mark.slow
async def test_a_stall_of_a_real_loop_is_measured() -> None:
    async with DRIVER_LAG.watched(lambda alert: None):
        await asyncio.sleep(2 * TICK_S)
        stalls = StallCount()
        time.sleep(HOLD_S)
        await asyncio.sleep(2 * TICK_S)
        assert stalls.seconds > HOLD_S - 2 * TICK_S


@virtually
async def test_nothing_is_reported_while_no_episode_waits(alerts: list[str]) -> None:
    await hold()
    await asyncio.sleep(3 * TICK_S)
    assert alerts == [] and DRIVER_LAG.metrics()["loop_lag_ms_max"] > 1000 * STALL_S


def test_a_call_that_ended_before_the_first_measurement_does_not_wait() -> None:
    async def reported() -> list[str]:
        loop_lag, lines = LoopLag(asyncio.get_running_loop().time), list[str]()
        with loop_lag.waiting():
            pass
        async with loop_lag.watched(lines.append):
            await asyncio.sleep(0)
            hold_now()
            await asyncio.sleep(2 * TICK_S)
        assert loop_lag.stalled_s > STALL_S
        return lines

    assert run_virtually(reported()) == []


@virtually
async def test_the_alert_names_the_code_that_blocked_the_loop(alerts: list[str]) -> None:
    episode = StallCount()
    await user_code.call_user_code(hold, what="tool search", timeout_s=30.0)
    await asyncio.sleep(3 * TICK_S)
    assert len(alerts) == 1 and "tool search blocked it" in alerts[0] and "asyncio.to_thread" in alerts[0]
    assert episode.seconds > STALL_S, "another episode waited"


@virtually
async def test_a_stall_counts_before_it_is_measured(alerts: list[str]) -> None:
    """A deadline and the measurement after a stall are due in the same round of the loop."""
    stalls = StallCount()
    await asyncio.sleep(0)
    hold_now()
    assert stalls.seconds > STALL_S and stalls.excuse(5.0) and not stalls.excuse(50.0)


def test_time_after_a_watch_is_no_stall_even_if_its_exit_is_cancelled() -> None:
    async def watched() -> float:
        loop_lag = LoopLag(asyncio.get_running_loop().time)
        watch = loop_lag.watched(lambda alert: None)
        await watch.__aenter__()
        await asyncio.sleep(2 * TICK_S)
        ending = asyncio.create_task(watch.__aexit__(None, None, None))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait({ending})
        assert ending.cancelled()
        hold_now()
        return loop_lag.stalled_s

    assert run_virtually(watched()) == 0.0


def test_short_lags_are_measured_but_are_no_stalls() -> None:
    now = [0.0]
    loop_lag = LoopLag(lambda: now[0])
    loop_lag._due = 1.0
    now[0] = 1.0 + STALL_S - 0.01
    assert loop_lag.stalled_s == 0.0 and loop_lag.metrics() == {}
    now[0] = 1.0 + STALL_S
    assert loop_lag.stalled_s == STALL_S
    loop_lag._late.extend([0.0] * 199 + [2.0])
    assert loop_lag.metrics() == {"loop_lag_ms_p99": 0.0, "loop_lag_ms_max": 2000.0} and loop_lag.metrics() == {}


class Waits:
    """A tool that waits, or reports that an external server did not answer in time."""

    name, needs_sandbox = "waits", False

    def __init__(self, *, holds: bool = False, late: bool = False) -> None:
        self.holds, self.late = holds, late
        self.schema = {"type": "function", "function": {"name": "waits", "parameters": {"type": "object", "properties": {}}}}

    async def __call__(self, arguments: Any, sandbox: Any, limits: Limits) -> ToolOutcome:
        if self.holds:
            hold_now()
        await asyncio.sleep(0.9 * limits.tool_timeout_s if self.late else 60.0)
        raise ToolFault("mcp_timeout", "it gave no answer", outage=Outage(text="no answer in time", late=True))


def trusted() -> CallRecord:
    """A record in which the tool has answered all other callers, so that only the caller can be at fault."""
    record = CallRecord()
    for number in range(8):
        record.answered("waits", Caller(attempt=f"g{number}-e0-a0", task="t"))
    return record


async def call(tool: Waits, *, limit_s: float, record: CallRecord | None) -> str:
    """Returns the kind of the failure that is attributed to the policy."""
    limits = Limits(tool_timeout_s=limit_s)
    answering = record and asyncio.get_running_loop().call_later(0.5, record.answered, "waits", Caller(attempt="g9-e0-a0", task="t"))
    try:
        called = await call_tool(tool, {}, None, limits, turn=0, caller=Caller(attempt="g8-e0-a0", task="t"), record=record)
    finally:
        if answering:
            answering.cancel()
    assert called.failure is not None
    return called.failure.kind


@pytest.mark.parametrize("late", [False, True], ids=["overdue", "late server"])
@pytest.mark.parametrize("recorded", [False, True])
@virtually
async def test_a_deadline_missed_while_the_loop_was_blocked_is_a_machine_fault(late: bool, recorded: bool, alerts: list[str]) -> None:
    holding = asyncio.create_task(hold())
    with pytest.raises(InfrastructureError, match=r"the driver's event loop was blocked for \d\.\d s of that time"):
        await call(Waits(late=late), limit_s=1.5, record=trusted() if recorded else None)
    await holding


@pytest.mark.parametrize("holds", [False, True])
@virtually
async def test_code_that_blocks_the_loop_itself_is_to_blame(holds: bool, alerts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert await call(Waits(holds=holds), limit_s=1.5, record=trusted()) == "tool_timeout"


@virtually
async def test_stalls_of_a_call_do_not_count_for_its_episode(alerts: list[str]) -> None:
    episode = StallCount()

    async def hold_in_task() -> None:
        await asyncio.create_task(hold())

    async def agent() -> None:
        await user_code.call_user_code(hold, what="tool", timeout_s=30.0)
        await user_code.call_user_code(hold_in_task, what="tool", timeout_s=30.0)

    await user_code.call_user_code(agent, what="the agent", timeout_s=30.0, within=episode)
    others = loop_lag.count_stalls()[0]
    await hold()
    assert others.seconds > STALL_S and episode.seconds == pytest.approx(others.seconds, abs=3 * TICK_S), "only stalls of other code count"
