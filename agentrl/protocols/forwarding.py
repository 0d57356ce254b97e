"""A sandbox around another one: every operation is the other's, and goes through one method that a subclass may lay over it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from agentrl.protocols import Sandbox
from agentrl.records import ExecResult

T = TypeVar("T")


class ForwardingSandbox:
    """A `Sandbox`; `close` does not go through `_through`."""

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
        return await self._through(self._sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes, env=env))

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        return await self._through(self._sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=session))

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        return await self._through(self._sandbox.read(path, max_bytes=max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        await self._through(self._sandbox.write(path, data))

    async def snapshot(self) -> bytes:
        return await self._through(self._sandbox.snapshot())

    async def pause(self) -> None:
        await self._through(self._sandbox.pause())

    async def resume(self) -> None:
        await self._through(self._sandbox.resume())

    async def close(self) -> None:
        await self._sandbox.close()
