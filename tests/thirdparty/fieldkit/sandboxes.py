"""Bubblewrap sandboxes behind a third-party backend, which counts them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.protocols import Sandbox
from agentrl.records import ExecResult, SandboxSpec
from agentrl.sandbox import BubblewrapBackend


class CountedBackend:
    """Implements only `SandboxBackend`. Closing it writes the counts to the file `account`."""

    name = "counted"

    def __init__(self, *, root: Path, run_label: str, account: str) -> None:
        self._inner = BubblewrapBackend(run_label=run_label, root=root)
        self._account, self.counts = Path(account), Counter[str]()

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._inner.prepare(spec)

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> Sandbox:
        sandbox = await self._inner.open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)
        self.counts["opened"] += 1
        return CountedSandbox(sandbox, self.counts)

    async def close(self) -> None:
        await self._inner.close()
        self._account.write_text(json.dumps(self.counts))


class CountedSandbox:
    """A `Sandbox` that wraps another one."""

    def __init__(self, inner: Sandbox, counts: Counter[str]) -> None:
        self.id, self._inner, self._counts, self._open = inner.id, inner, counts, True

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self._counts["programs"] += 1
        return await self._inner.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes, env=env)

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        self._counts["programs"] += 1
        return await self._inner.python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=session)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        return await self._inner.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        self._counts["files"] += 1
        await self._inner.write(path, data)

    async def snapshot(self) -> bytes:
        return await self._inner.snapshot()

    async def pause(self) -> None:
        await self._inner.pause()

    async def resume(self) -> None:
        await self._inner.resume()

    async def close(self) -> None:
        self._counts["closed"] += self._open
        self._open = False
        await self._inner.close()
