"""The driver's record of a server's weights, which its token client and its weight channel share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable

from agentrl.errors import ServingError


class WeightState:
    """The serving version, the version on probation after a swap, and the salt that separates their cached prefixes.

    New weights are on probation until their probe agrees; tokens sampled with them are withheld until then (`wait_verified`), so nothing
    sampled with rejected weights reaches an episode.

    Keys and values cached under older weights must not be used with newer ones. Resetting vLLM's prefix cache would restart every request
    in flight. Instead, a new `cache_salt` per swap makes old entries unreachable. A request in flight keeps its keys and values.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.cache_salt = _salt(number)
        self.on_probation: int | None = None  # the version that is in use but not yet verified
        self._rejected: set[int] = set()
        self._decided = asyncio.Event()  # read only during probation

    def begin_probation(self, number: int) -> None:
        """Starts the probation of `number`. Call this method after the version's weights are loaded, while the server is paused."""
        self.on_probation = number
        self._rejected.discard(number)
        self.cache_salt = _salt(number)
        self._decided.clear()

    def accept(self, number: int) -> None:
        """Makes `number` the serving version, because the probe agreed."""
        self.number = number
        self._end_probation()

    def refuse(self) -> None:
        """Rejects the version on probation, if there is one. All tokens sampled with that version are invalid."""
        if self.on_probation is not None:
            self._rejected.add(self.on_probation)
        self.cache_salt = _salt(self.number)
        self._end_probation()

    async def wait_verified(self, versions: Iterable[int]) -> None:
        """Waits until none of `versions` is on probation; the caller sets the deadline. Raises `ServingError` if any of these versions was
        rejected."""
        versions = frozenset(versions)
        while self.on_probation in versions:
            await self._decided.wait()
        if rejected := versions & self._rejected:
            raise ServingError(f"the tokens were sampled with weights that were rejected after the swap (version {min(rejected)})")

    def _end_probation(self) -> None:
        self.on_probation = None
        self._decided.set()


def _salt(number: int) -> str:
    return f"v{number}-{uuid.uuid4().hex}"
