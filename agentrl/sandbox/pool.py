"""A pool in front of any backend: sandboxes kept ready ahead of need, and a bound on how many are in use.

A sandbox from the pool is handed out once and never returned to it: `close` destroys it. While callers work, the pool opens
replacements in the background, a few at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol

from agentrl.errors import AgentRLError, SandboxError, SandboxTimeout
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec

log = logging.getLogger(__name__)

MAX_FILLING = 2
MAX_SPECS = 4
"""Specs kept ready at once; the one unused for longest gives way."""
MAX_REFILL_FAILURES = 3
"""Failed refills in a row after which a spec is not refilled until the next one is asked for."""


class PoolableSandbox(Sandbox, Protocol):
    """What the pool needs besides the protocol."""

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Writes several files in one round trip; with none, shows that the sandbox answers."""
        ...

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, after the sandbox is destroyed."""
        ...


class PoolableBackend(Protocol):
    """A `SandboxBackend` whose sandboxes can be pooled."""

    name: str

    async def prepare(self, spec: SandboxSpec) -> None: ...

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> PoolableSandbox: ...

    async def close(self) -> None: ...


class WarmPool:
    """Keeps `warm` sandboxes of each spec ready and lets callers have `max_open` in use; the next caller waits its turn.

    At most `max_open + MAX_SPECS * warm` sandboxes exist. It is itself a `SandboxBackend`.
    """

    def __init__(self, backend: PoolableBackend, *, warm: int = 8, max_open: int = 64, fill_timeout_s: float = 60.0) -> None:
        self.name = backend.name
        self._backend = backend
        self._warm = warm
        self._fill_timeout_s = fill_timeout_s
        self._slots = asyncio.Semaphore(max_open)
        self._filling = asyncio.Semaphore(MAX_FILLING)
        self._ready: OrderedDict[SandboxSpec, deque[PoolableSandbox]] = OrderedDict()
        self._coming: dict[SandboxSpec, int] = {}
        self._failures: dict[SandboxSpec, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def prepare(self, spec: SandboxSpec) -> None:
        """Prepares the image and begins to fill the pool with `spec`."""
        await self._backend.prepare(spec)
        self._refill(spec)

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> Sandbox:
        """A ready sandbox when there is one, else a new one. `SandboxTimeout` when none is to be had in `timeout_s`, waiting included."""
        if self._closing is not None:
            raise SandboxError("the sandbox pool is closed")
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise SandboxTimeout(f"all sandboxes were in use for {timeout_s:.1f} s") from None
        try:
            sandbox = await self._take(spec, files or {}, deadline) if snapshot is None else None
            if sandbox is None:
                left = max(0.1, deadline - asyncio.get_running_loop().time())
                sandbox = await self._backend.open(spec, files=files, snapshot=snapshot, timeout_s=left)
        except BaseException:
            self._slots.release()
            raise
        sandbox.when_closed(self._slots.release)
        self._failures.pop(spec, None)
        self._refill(spec)
        return sandbox

    async def close(self) -> None:
        """Closes every sandbox, ready or in use, and the backend. Idempotent; carried through even when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.name} pool")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ready.clear()
        await self._backend.close()

    async def _take(self, spec: SandboxSpec, files: Mapping[str, bytes], deadline: float) -> PoolableSandbox | None:
        """A ready sandbox that has taken the files, so that it is known to answer; ones that died waiting, or stand still, are put away.

        Each gets half of the time that is left, so that there is some for a new one in the end.
        """
        ready = self._ready.get(spec)
        while ready:
            sandbox = ready.popleft()
            try:
                async with asyncio.timeout((deadline - asyncio.get_running_loop().time()) / 2):
                    await sandbox.write_all(files)
            except (SandboxError, TimeoutError) as error:
                log.warning("a ready sandbox no longer answers: %s", error)
                self._spawn(sandbox.close())
            except BaseException:
                await sandbox.close()
                raise
            else:
                return sandbox
        return None

    def _refill(self, spec: SandboxSpec) -> None:
        """Starts as many openings as `spec` lacks."""
        if self._closing is not None or self._warm == 0:
            return
        ready = self._ready.setdefault(spec, deque())
        self._ready.move_to_end(spec)
        while len(self._ready) > MAX_SPECS:
            _, surplus = self._ready.popitem(last=False)
            for sandbox in surplus:
                self._spawn(sandbox.close())
        for _ in range(self._warm - len(ready) - self._coming.get(spec, 0)):
            self._coming[spec] = self._coming.get(spec, 0) + 1
            self._spawn(self._fill(spec))

    async def _fill(self, spec: SandboxSpec) -> None:
        try:
            async with self._filling:
                if self._failures.get(spec, 0) >= MAX_REFILL_FAILURES:
                    return
                sandbox = await self._backend.open(spec, timeout_s=self._fill_timeout_s)
        except AgentRLError as error:  # callers open their own, and see the error there if it lasts
            self._failures[spec] = self._failures.get(spec, 0) + 1
            log.warning("a sandbox could not be opened ahead of need: %s", error)
            return
        finally:
            self._coming[spec] -= 1
        ready = self._ready.get(spec)
        if self._closing is not None or ready is None:
            await sandbox.close()
        else:
            ready.append(sandbox)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
