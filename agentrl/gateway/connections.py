"""Connections that ask for nothing are closed: one that holds them open by the hundred keeps every other session's programs out."""

from __future__ import annotations

import asyncio
from typing import Any

IDLE_S = 30.0
"""For so long a connection may be without a request whose head has arrived whole, at first and after an answer; at most half as much
again, since it is looked at now and then."""


def impatient() -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with that limit. Its own begins after the first answer, and ends with the first byte of what may come."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._looks = 0  # in a row that found no request, or the same one, answered
            self._last: Any = None
            self._later()

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(exc)

        def _later(self) -> None:
            self._look = self.loop.call_later(IDLE_S / 2, self._looked)

        def _looked(self) -> None:
            asked, self._last = self._last is not self.cycle, self.cycle
            at_work = self.cycle is not None and not self.cycle.response_complete
            self._looks = 0 if asked or at_work else self._looks + 1
            if self._looks > 1:
                self.transport.abort()
            else:
                self._later()

    return Impatient
