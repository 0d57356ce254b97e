"""Measures how late the driver's event loop is, and for how long it was blocked.

While the loop is blocked, it handles no timers, responses or results, so deadlines pass unnoticed. The loop may be blocked by code that
computes without awaiting, by garbage collection, or because the process was stopped, but never by an episode that is waiting. So the cause
that is recorded for a missed deadline depends on how long the loop was blocked before it (`StallCount`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar, copy_context

TICK_S = 0.05
"""Seconds between two measurements."""
STALL_S = 1.0
"""A loop that is at least this late counts as blocked. Shorter lags only appear in the metrics."""
SHARE = 0.1
"""If the loop was blocked for more than this share of a deadline, a missed deadline is the machine's fault."""
_LEAST_S = 0.001  # minimum duration of a step of user code that is recorded
_KEPT = 1 << 16  # newest measurements that are kept for the metrics


class LoopLag:
    """Measures the lag of one event loop, only inside the context `watched`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.round = 0  # measurements so far
        self._calls = 0  # calls of user code in progress: episodes, tools and verifiers
        self._waited = False  # whether there was such a call since the last measurement
        self._stalled_s = 0.0
        self._due: float | None = None  # time of the next measurement
        self._late: deque[float] = deque(maxlen=_KEPT)
        self._holder = (0.0, "")  # the longest step of user code since the last measurement

    @property
    def stalled_s(self) -> float:
        """Seconds for which the loop has been blocked so far.

        Includes a stall that is not measured yet, because a deadline and the measurement after a stall are due in the same round of the
        loop.
        """
        late = 0.0 if self._due is None else self._clock() - self._due
        return self._stalled_s + (late if late >= STALL_S else 0.0)

    def metrics(self) -> dict[str, float]:
        """Returns the 99th percentile and the maximum of the lag since the last call of this method, in milliseconds; empty if nothing was
        measured."""
        late, self._late = sorted(self._late), deque(maxlen=_KEPT)
        if not late:
            return {}
        p99 = late[math.ceil(0.99 * len(late)) - 1]
        return {"loop_lag_ms_p99": 1000 * p99, "loop_lag_ms_max": 1000 * late[-1]}

    def held(self, what: str, seconds: float) -> None:
        """Records that the code described by `what` ran for `seconds` without awaiting."""
        self._holder = max(self._holder, (seconds, what))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as a call of user code in progress, which is delayed while the loop is blocked."""
        self._calls, self._waited = self._calls + 1, True
        try:
            yield
        finally:
            self._calls -= 1

    @asynccontextmanager
    async def watched(self, alert: Callable[[str], None]) -> AsyncIterator[None]:
        """Measures the lag of the running loop during the block. `alert` is called once, at the first stall that delays an episode."""
        task = asyncio.create_task(self._watch(alert), name="lag of the event loop")
        try:
            yield
        finally:
            task.cancel()
            self._due = None  # first, because a cancellation may end the wait, and the time after the watch is not a stall
            await asyncio.wait({task})

    async def _watch(self, alert: Callable[[str], None]) -> None:
        alerted = False
        while True:
            self._holder, self._waited = (0.0, ""), self._calls > 0
            computed_s = time.thread_time()
            self._due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.round += 1
            late = max(0.0, self._clock() - self._due)
            self._late.append(late)
            if late >= STALL_S:
                self._stalled_s += late
                if not alerted and self._waited:
                    alerted = True
                    alert(self._cause(late, time.thread_time() - computed_s))

    def _cause(self, late: float, computed_s: float) -> str:
        seconds, what = self._holder
        cause = "code of the driver, such as garbage collection, blocked it"
        fix = "lower rollout.concurrency, and report it if it persists"
        if 2 * seconds >= late:
            cause, fix = f"{what} blocked it", "await slow operations, and run computations in asyncio.to_thread"
        elif 2 * computed_s < late:
            cause = (
                "the process got no CPU time for most of that period: it was stopped, it waited for a disk, or the machine is overloaded"
            )
            fix = "find out which other programs use this machine"
        return (
            f"the driver's event loop was blocked for {late:.1f} s, and every episode waited: {cause}\n  fix: {fix}."
            " A deadline missed because of the stall is not the policy's fault."
            " Later stalls are recorded only in loop_lag_ms_max of metrics.jsonl"
        )


DRIVER_LAG = LoopLag()
"""The loop of this process."""


class StallCount:
    """Counts how long the driver's loop has been blocked since construction, excluding the time for which the code of the count's own task
    blocked it."""

    def __init__(self, parent: StallCount | None = None) -> None:
        self._parent = parent
        self._since, self._own_s = DRIVER_LAG.stalled_s, 0.0
        self._round, self._in_round_s = DRIVER_LAG.round, 0.0

    @property
    def seconds(self) -> float:
        """Total seconds of the counted stalls."""
        return max(0.0, DRIVER_LAG.stalled_s - self._since - self._own_s)

    @property
    def text(self) -> str:
        """The total time of the counted stalls as text, for an error message."""
        return f"the driver's event loop was blocked for {self.seconds:.1f} s of that time"

    def excuse(self, limit_s: float) -> bool:
        """Whether the loop was blocked for more than `SHARE` of a deadline of `limit_s` seconds, so missing it is the machine's fault."""
        return self.seconds > SHARE * limit_s

    def add(self, seconds: float) -> None:
        """Records, in this count and all enclosing counts, that the task's own code blocked the loop for `seconds`. Steps of code between
        two measurements are added up, and count if their sum is at least half of `STALL_S`."""
        counted: StallCount | None = self
        while counted is not None:
            before = counted._in_round_s if counted._round == DRIVER_LAG.round else 0.0
            counted._round, counted._in_round_s = DRIVER_LAG.round, before + seconds
            if before + seconds >= STALL_S / 2:
                counted._own_s += seconds if before >= STALL_S / 2 else before + seconds
            counted = counted._parent


_current: ContextVar[StallCount | None] = ContextVar("_current", default=None)


def count_stalls(within: StallCount | None = None) -> tuple[StallCount, Context]:
    """Returns a count of stalls, and a context for the task whose own code the count excludes.

    Args:
        within: the enclosing count; None means the count of the current task, if that task has a count.
    """
    stalls, context = StallCount(within or _current.get()), copy_context()
    context.run(_current.set, stalls)
    return stalls, context


def current_stalls() -> StallCount | None:
    """Returns the count of the current task, which excludes stalls caused by its own code; None outside user code."""
    return _current.get()


def count_as(stalls: StallCount | None) -> None:
    """From now on, counts the code of the current task as code of the task that owns `stalls`, because it runs on behalf of that
    task. None stops counting."""
    _current.set(stalls)


def record_computation(what: str, seconds: float) -> None:
    """Records that code of the current task ran for `seconds` without awaiting."""
    if seconds < _LEAST_S:
        return
    DRIVER_LAG.held(what, seconds)
    if (counted := _current.get()) is not None:
        counted.add(seconds)
