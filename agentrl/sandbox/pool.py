"""A pool in front of any backend: sandboxes kept ready ahead of need, and a bound on how many are in use.

A sandbox from the pool is handed out once, never taken back: `close` destroys it. While callers work, the pool opens
replacements in the background, a few at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from agentrl.errors import InfrastructureError, SandboxError, SandboxTimeout, UserError
from agentrl.protocols import SandboxBackend
from agentrl.records import ExecResult, SandboxSpec
from agentrl.sandbox.place import ChannelSandbox

log = logging.getLogger(__name__)

MAX_FILLING = 2
MAX_SPECS = 4
HANDOUT_TRIES = 3
REFILL_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""After so many failed refills in a row, ever further apart, a spec is no longer kept ready; its sandboxes open on demand."""


class PooledSandbox:
    """A sandbox in use: gives its place in the pool back when it is closed."""

    def __init__(self, inner: ChannelSandbox, places: asyncio.Semaphore) -> None:
        self.id = inner.id
        self._inner = inner
        self._places = places
        self._held = True

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        return await self._inner.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes, env=env)

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536) -> ExecResult:
        return await self._inner.python(code, timeout_s=timeout_s, output_bytes=output_bytes)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        return await self._inner.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._inner.write(path, data)

    async def snapshot(self) -> bytes:
        return await self._inner.snapshot()

    async def pause(self) -> None:
        await self._inner.pause()

    async def resume(self) -> None:
        await self._inner.resume()

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            if self._held:
                self._held = False
                self._places.release()
