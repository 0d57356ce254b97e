"""Which weights a server answers with, as its driver knows it: shared by the token client and the weight channel."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable

from agentrl.errors import ServingError


class WeightsInService:
    """The version in service, the one on probation after a swap, and the salt that keeps their cached prefixes apart.

    Between the moment new weights answer and the moment their probe agrees, they are on probation: tokens they sample are
    withheld until the verdict (`settle`), so that nothing sampled by refused weights ever reaches an episode.

    Keys and values cached under older weights must not meet newer ones. vLLM leaves that to its caller, and resetting its
    prefix cache would need every request in flight to start over; a fresh `cache_salt` per swap makes old entries
    unreachable instead, and they age out. A request in flight during the swap goes on with the keys and values it has.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.cache_salt = _salt(number)
        self._probation: int | None = None
        self._refused: set[int] = set()
        self._verdict = asyncio.Event()
        self._verdict.set()

    @property
    def on_probation(self) -> int | None:
        """The version that answers but is not proven yet."""
        return self._probation

    def begin_probation(self, number: int) -> None:
        """Called while the server is paused, with the weights of `number` loaded."""
        self._probation = number
        self._refused.discard(number)
        self.cache_salt = _salt(number)
        self._verdict.clear()

    def accept(self, number: int) -> None:
        """The probe agreed: `number` is in service."""
        self.number = number
        self._end_probation()

    def refuse(self) -> None:
        """The version on probation, if any, is wrong: whatever it sampled is void."""
        if self._probation is not None:
            self._refused.add(self._probation)
        self.cache_salt = _salt(self.number)
        self._end_probation()

    async def settle(self, versions: Iterable[int]) -> None:
        """Waits until none of `versions` is on probation (the caller sets the deadline). Raises `ServingError` when one was refused."""
        versions = frozenset(versions)
        while self._probation in versions:
            await self._verdict.wait()
        if refused := versions & self._refused:
            raise ServingError(f"sampled with weights that were refused after the swap (version {min(refused)})")

    def _end_probation(self) -> None:
        self._probation = None
        self._verdict.set()


def _salt(number: int) -> str:
    return f"v{number}-{uuid.uuid4().hex}"
