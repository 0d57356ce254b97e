"""A pool in front of any backend, which keeps sandboxes ready and limits the number of sandboxes in use.

A sandbox leaves the pool once and never returns, because `close` destroys it. Replacements open in the background, a few at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from agentrl.errors import AgentRLError, SandboxError, SandboxTimeout
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.protocols.sandbox import OPEN_TIMEOUT_S, ForwardingSandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox.waiting import ClosesOnce, spawn

log = logging.getLogger(__name__)

WARM = 8
"""Number of sandboxes opened in advance for each spec, so that episodes that start together do not wait."""

MAX_SPECS = 4
"""Maximum number of specs for which sandboxes are kept ready. A new spec replaces the least recently used one."""
_MAX_FILLING = 2
_MAX_REFILL_FAILURES = 3  # since a caller last opened a sandbox of the spec, which is then not refilled until a caller opens one
_ANSWER_S = 60.0
_MIN_CHECK_S = 1.0


class WarmPool(ClosesOnce):
    """A `SandboxBackend` that keeps `warm` sandboxes ready for each of the `MAX_SPECS` most recently used specs.

    At most `max_open` sandboxes are in use at a time; additional callers wait. At most `max_open + MAX_SPECS * warm` sandboxes exist at a
    time, in addition to those that are about to be closed.
    """

    def __init__(self, backend: SandboxBackend, *, warm: int = WARM, max_open: int = 64) -> None:
        self.name = backend.name
        self._backend = backend
        self._warm = warm
        self._slots = asyncio.Semaphore(max_open)
        self._filling = asyncio.Semaphore(_MAX_FILLING)
        self._ready: OrderedDict[SandboxSpec, deque[Sandbox]] = OrderedDict()
        self._coming: dict[SandboxSpec, int] = {}
        self._failures: dict[SandboxSpec, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self, spec: SandboxSpec) -> None:
        """Prepares the image and starts to fill the pool with sandboxes of `spec`."""
        await self._backend.prepare(spec)
        self._refill(spec)

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: bytes | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Sandbox:
        """Returns a ready sandbox, or a new one if none is ready or `snapshot` is set.

        Raises `SandboxTimeout` after `timeout_s`, which includes the wait for a slot, `SandboxError` if the pool is closed, and the errors
        of the backend's `open`.
        """
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
        self._failures.pop(spec, None)
        self._refill(spec)
        return _PooledSandbox(sandbox, self._slots.release)

    async def _close(self) -> None:
        """Closes the backend and every sandbox, ready or in use."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ready.clear()
        await self._backend.close()

    async def _take(self, spec: SandboxSpec, files: Mapping[str, bytes], deadline: float) -> Sandbox | None:
        """Returns a ready sandbox after writing `files` to it, which shows that the sandbox responds. Returns None if no ready sandbox
        responds.

        Closes sandboxes that do not respond. Each attempt may take half of the remaining time, so that time is left to open a new sandbox,
        or `_MIN_CHECK_S` if that is longer: a sandbox is not closed because its caller has little time. The last attempt may therefore end
        up to `_MIN_CHECK_S` after the deadline.
        """
        ready, loop = self._ready.get(spec), asyncio.get_running_loop()
        while ready and (left := deadline - loop.time()) > 0:
            sandbox = ready.popleft()
            try:
                async with asyncio.timeout(max(left / 2, _MIN_CHECK_S)):
                    await _write(sandbox, files)
            except (SandboxError, TimeoutError) as error:
                log.warning("a ready sandbox no longer answers: %s", error)
                spawn(sandbox.close(), self._tasks)
            except BaseException:
                await sandbox.close()
                raise
            else:
                return sandbox
        return None

    def _refill(self, spec: SandboxSpec) -> None:
        """Opens sandboxes of `spec` in the background until enough are ready."""
        if self._closing is not None or self._warm == 0:
            return
        ready = self._ready.setdefault(spec, deque())
        self._ready.move_to_end(spec)
        while len(self._ready) > MAX_SPECS:
            _, surplus = self._ready.popitem(last=False)
            for sandbox in surplus:
                spawn(sandbox.close(), self._tasks)
        for _ in range(self._warm - len(ready) - self._coming.get(spec, 0)):
            self._coming[spec] = self._coming.get(spec, 0) + 1
            spawn(self._fill(spec), self._tasks)

    async def _fill(self, spec: SandboxSpec) -> None:
        try:
            async with self._filling:
                if self._failures.get(spec, 0) >= _MAX_REFILL_FAILURES:
                    return
                sandbox = await self._backend.open(spec)
        except AgentRLError as error:  # callers open their own sandboxes, and see the error there if it persists
            self._failures[spec] = self._failures.get(spec, 0) + 1
            log.warning("cannot open a sandbox in advance: %s", error)
            return
        finally:
            self._coming[spec] -= 1
        ready = self._ready.get(spec)
        if self._closing is not None or ready is None:
            await sandbox.close()
        else:
            ready.append(sandbox)


class _PooledSandbox(ClosesOnce, ForwardingSandbox):
    """A sandbox that a caller uses. Closing the sandbox releases its slot in the pool."""

    def __init__(self, sandbox: Sandbox, release: Callable[[], None]) -> None:
        super().__init__(sandbox)
        self._release = release

    async def _close(self) -> None:
        try:
            await self._sandbox.close()
        finally:
            self._release()


async def _write(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Writes files, in one round trip if the sandbox has `write_all`. Raises `SandboxError` if the sandbox does not respond."""
    if (write_all := getattr(sandbox, "write_all", None)) is not None:
        await write_all(files)
        return
    for path, data in files.items():
        await sandbox.write(path, data)
    if not files and not (await sandbox.python("pass", timeout_s=_ANSWER_S)).ok:
        raise SandboxError(f"sandbox {sandbox.id} no longer runs programs")
