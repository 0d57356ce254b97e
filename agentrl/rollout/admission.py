"""Limits how many episodes run at once, by number and by the use of the servers' key/value caches.

A server with a full cache evicts running requests and later recomputes their contexts, so too many episodes at once slow down all of them.
The cache use of a new episode is unknown; it is estimated by the average of the episodes in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

from agentrl.protocols import CacheUse

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two checks of the cache use."""


class Admission:
    """An asynchronous context manager around each episode. Entering waits until the episode may start.

    Between two readings of the cache use u, with n episodes in flight, at most n (full - u) / u more may start: as many as would fill the
    cache up to `full` at the average use. With several caches, both the u's and the free shares add up; a cache beyond `full` has no free
    share. One episode may always run. Without readings, only `most` limits the episodes. Episodes start in the order in which they arrive.

    Args:
        most: maximum episodes in flight.
        use: returns the newest reading, or None before the first.
        full: share of each cache that may be in use; 1 disables this limit.
    """

    def __init__(self, most: int, *, use: Callable[[], CacheUse | None] = lambda: None, full: float = 1.0) -> None:
        self.in_flight = 0
        self.held = 0  # episodes that had to wait for the cache
        self._most = most
        self._slots = asyncio.Semaphore(most)
        self._next = asyncio.Lock()
        self._use, self._full = use, full
        self._reading, self._room = -1, 0

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        try:
            if self._full < 1:
                async with self._next:
                    await self._wait()
        except BaseException:
            self._slots.release()
            raise
        self.in_flight += 1

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.in_flight -= 1
        self._slots.release()

    async def _wait(self) -> None:
        if self._fits():
            return
        self.held += 1
        if self.held == 1:
            log.info("the server's key/value cache is %.0f%% in use: new episodes wait until others end", 100 * self._full)
        while not self._fits():
            await asyncio.sleep(POLL_S)

    def _fits(self) -> bool:
        """Returns whether one more episode may start now, and counts it if so."""
        use = self._use()
        taken = 0.0 if use is None else sum(use.shares)
        if use is None or taken <= 0 or self.in_flight == 0:
            return True
        if use.reading != self._reading:
            room = self.in_flight * sum(max(0.0, self._full - share) for share in use.shares) / taken
            self._reading, self._room = use.reading, int(min(room, self._most))  # `room` is huge if hardly anything is in use
        self._room -= 1
        return self._room >= 0
