"""Which episodes may begin: a bound on those in flight, and none more than the servers' key/value caches have room for.

A server whose cache is full throws running requests out and computes their contexts again later, so that more episodes at once make
all of them slower. What an episode will take is not known when it begins; what those in flight take on average is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

from agentrl.protocols import CacheUse

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How often whoever is next looks for a new reading."""


class Admission:
    """An asynchronous context manager around each episode: entered when it may begin.

    Between two readings of the cache's use u, with n episodes in flight, at most n (full - u) / u more begin: as many as would fill it up
    to `full` if each took what the others take. With several caches the u's add up, and so does their room: what one is beyond `full`
    takes none from another, where new episodes are sent then. One may always run. Without readings the bound on those in flight is all
    there is. Episodes begin in the order in which they came.

    Args:
        most: episodes in flight at once.
        use: the newest reading; None while there is none, as while the server starts.
        full: share of each cache that is to be in use; with 1 nothing is held back.
    """

    def __init__(self, most: int, *, use: Callable[[], CacheUse | None] = lambda: None, full: float = 1.0) -> None:
        self.in_flight = 0
        self.held = 0  # episodes that waited for the cache
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
            log.info("the server's key/value cache is %.0f%% in use: new episodes wait for those in flight", 100 * self._full)
        while not self._fits():
            await asyncio.sleep(POLL_S)

    def _fits(self) -> bool:
        """Whether one more may begin now; if so, it is counted."""
        use = self._use()
        taken = 0.0 if use is None else sum(use.shares)
        if use is None or taken <= 0 or self.in_flight == 0:
            return True
        if use.reading != self._reading:
            room = self.in_flight * sum(max(0.0, self._full - share) for share in use.shares) / taken
            self._reading, self._room = use.reading, int(min(room, self._most))  # next to nothing in use is room for everybody
        self._room -= 1
        return self._room >= 0
