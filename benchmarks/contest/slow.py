"""A sandbox backend whose programs take a given time, as builds and test suites do. Programs of the toy tasks take milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

from agentrl.errors import UserError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.protocols.sandbox import ForwardingSandbox
from agentrl.records import ExecResult, SandboxSpec
from agentrl.sandbox.select import select_backend

_MARGIN_S = 30.0  # seconds that a sandbox may take in addition to the sleep of its programs


def seconds_of(program: str, low: float, high: float) -> float:
    """Returns the seconds that a program sleeps: uniform over [low, high], and a function of the program's text."""
    return Random(program).uniform(low, high)


class SlowBackend:
    """Wraps any backend; every program in its sandboxes first sleeps.

    A recipe selects it with `sandbox.backend=benchmarks.contest.slow:SlowBackend sandbox.backend.options={"low":0.2,"high":2.0}`. Raises
    `UserError` for an interval that is none.
    """

    def __init__(self, *, root: Path, run_label: str, low: float, high: float, backend: str = "auto") -> None:
        if not 0.0 <= low <= high or high == 0.0:
            raise UserError(f"a wait of {low:g} to {high:g} seconds is invalid", fix="use 0 <= low <= high, and high above 0")
        self._inner: SandboxBackend = select_backend(backend, run_label=run_label, root=root)
        self._range = (low, high)
        self.name = self._inner.name

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._inner.prepare(spec)

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> Sandbox:
        return SlowSandbox(await self._inner.open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s), *self._range)

    async def close(self) -> None:
        await self._inner.close()


class SlowSandbox(ForwardingSandbox):
    """A sandbox whose programs first sleep. File operations do not. The sleep does not count towards the program's time limit."""

    def __init__(self, sandbox: Sandbox, low: float, high: float) -> None:
        super().__init__(sandbox)
        self._range = (low, high)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        await self._sleep("\0".join(argv))
        return await self._sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes, env=env)

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        await self._sleep(code)
        return await self._sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=session)

    async def _sleep(self, program: str) -> None:
        seconds = seconds_of(program, *self._range)
        await self._sandbox.exec(["sleep", f"{seconds:.3f}"], timeout_s=seconds + _MARGIN_S)

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """For the warm pool; a sandbox of ours takes several files at once."""
        await cast(Any, self._sandbox).write_all(files)
