"""A sandbox that forwards every operation to another one, through one method that subclasses can override."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from agentrl.protocols import Sandbox
from agentrl.records import ExecResult

T = TypeVar("T")


class ForwardingSandbox:
    """Forwards to `sandbox`. Every operation except `close` goes through `_through`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.id = sandbox.id
        self._sandbox = sandbox

    async def _through(self, operation: Awaitable[T]) -> T:
        return await operation

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        return await self._through(self._sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes, env=env))

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """See `Sandbox.python`."""
        return await self._through(self._sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=session))

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `Sandbox.read`."""
        return await self._through(self._sandbox.read(path, max_bytes=max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`."""
        await self._through(self._sandbox.write(path, data))

    async def snapshot(self) -> bytes:
        """See `Sandbox.snapshot`."""
        return await self._through(self._sandbox.snapshot())

    async def pause(self) -> None:
        """See `Sandbox.pause`."""
        await self._through(self._sandbox.pause())

    async def resume(self) -> None:
        """See `Sandbox.resume`."""
        await self._through(self._sandbox.resume())

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await self._sandbox.close()
