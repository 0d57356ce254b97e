"""The driver's view of a server's weights, shared by the token client and the weight channel."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable

from agentrl.errors import ServingError


class WeightState:
    """The serving version, the one on probation after a swap, and the salt that separates their cached prefixes.

    New weights are on probation from their first answer until their probe agrees: tokens they sample are withheld until then
    (`settle`), so that nothing sampled by refused weights ever reaches an episode.

    Keys and values cached under older weights must not be used with newer ones. vLLM leaves that to its caller, and resetting its
    prefix cache would restart every request in flight; a fresh `cache_salt` per swap makes old entries unreachable instead, and
    they are evicted in time. A request in flight during the swap keeps its keys and values.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.cache_salt = _salt(number)
        self._probation: int | None = None
        self._refused: set[int] = set()
        self._verdict = asyncio.Event()  # read only during probation

    @property
    def on_probation(self) -> int | None:
        """The version that answers but is not yet proven."""
        return self._probation

    def begin_probation(self, number: int) -> None:
        """Called while the server is paused, with the weights of `number` loaded."""
        self._probation = number
        self._refused.discard(number)
        self.cache_salt = _salt(number)
        self._verdict.clear()

    def accept(self, number: int) -> None:
        """The probe agreed: `number` is the serving version."""
        self.number = number
        self._end_probation()

    def refuse(self) -> None:
        """Refuses the version on probation, if any: everything it sampled is void."""
        if self._probation is not None:
            self._refused.add(self._probation)
        self.cache_salt = _salt(self.number)
        self._end_probation()

    async def wait_verified(self, versions: Iterable[int]) -> None:
        """Waits until none of `versions` is on probation; the caller sets the deadline. Raises `ServingError` when one was refused."""
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
