"""A backend that has no more than the protocol, made fit for the warm pool.

The pool wants two things besides: several files written in one call, and to hear when a sandbox is closed. A sandbox that has them
keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.protocols.forwarding import ForwardingSandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox.pool import PoolableSandbox

_ANSWER_S = 60.0


class PoolAdapter:
    """A `PoolableBackend` around any `SandboxBackend`."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.name = backend.name
        self._backend = backend

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._backend.prepare(spec)

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> PoolableSandbox:
        sandbox = await self._backend.open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)
        return sandbox if _is_poolable(sandbox) else _Plain(sandbox)  # type: ignore[return-value]  # told by its methods

    async def close(self) -> None:
        await self._backend.close()


def _is_poolable(sandbox: Sandbox) -> bool:
    return all(callable(getattr(sandbox, name, None)) for name in ("write_all", "when_closed"))


class _Plain(ForwardingSandbox):
    """A sandbox with what the pool needs laid over it; everything else is the sandbox's own."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._callbacks: list[Callable[[], None]] = []
        self._closed = False

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Writes the files one after the other; with none, shows that the sandbox answers."""
        for path, data in files.items():
            await self._sandbox.write(path, data)
        if not files and not (await self._sandbox.python("pass", timeout_s=_ANSWER_S)).ok:
            raise SandboxError(f"sandbox {self.id} no longer runs programs")

    def when_closed(self, callback: Callable[[], None]) -> None:
        if self._closed:
            callback()
        else:
            self._callbacks.append(callback)

    async def close(self) -> None:
        """Closes it, and tells whoever asked to hear of that once, also when closing fails."""
        try:
            await super().close()
        finally:
            self._closed = True
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
