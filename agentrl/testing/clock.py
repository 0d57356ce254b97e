"""A clock that nobody waits for: sleeping moves it."""

from __future__ import annotations

import asyncio


class JumpingClock:
    """Seconds that pass only while somebody sleeps; `slept` tells how long, each time."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)
