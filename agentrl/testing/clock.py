"""Clocks for tests that need not wait: sleeping advances the clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingClock:
    """A clock that advances only when code sleeps. `slept` contains the duration of each sleep."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """Returns the current time in seconds."""
        return self.now

    def time(self) -> float:
        """Returns the current time in seconds."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances only while nothing can run, so that waits take no real time. Use it only for code without
    threads."""

    def __init__(self) -> None:
        self._selected = _Skipping()
        super().__init__(self._selected)

    def time(self) -> float:
        """Returns the virtual time in seconds."""
        return self._selected.now

    def hold(self, seconds: float) -> None:
        """Advances the time at once, as if code computed for that long without awaiting."""
        self._selected.now += seconds


class _Skipping(selectors.DefaultSelector):
    """Returns at once from every wait with a deadline. If nothing is ready, advances the time to the deadline."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.now += timeout
        return ready


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on a `VirtualLoop` and returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
