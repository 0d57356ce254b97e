"""The bench that checks work on, and the list of all checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.errors import AgentRLError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import ExecResult, SandboxSpec

CHECK_S = 120.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceResult:
    """The result of one check: `ConformanceResult(name="no_network", ok=True, detail="", wall_s=0.2)`."""

    name: str
    ok: bool
    detail: str  # what was seen instead, empty when ok
    wall_s: float


class ConformanceError(Exception):
    """A backend breaks a requirement; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class BackendUnderTest:
    """The backend and spec that a check works on."""

    backend: SandboxBackend
    spec: SandboxSpec

    @asynccontextmanager
    async def sandbox(self, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None) -> AsyncIterator[Sandbox]:
        sandbox = await self.backend.open(self.spec, files=files, snapshot=snapshot)
        try:
            yield sandbox
        finally:
            await sandbox.close()


Check = Callable[[BackendUnderTest], Awaitable[None]]
CHECKS: dict[str, Check] = {}


async def check_conformance(backend: SandboxBackend, spec: SandboxSpec, *, only: str = "") -> list[ConformanceResult]:
    """Runs the checks (those whose name contains `only`) one after the other; a check that raises or takes too long has failed."""
    await backend.prepare(spec)
    return [await _run(name, work, BackendUnderTest(backend, spec)) for name, work in CHECKS.items() if only in name]


async def _run(name: str, work: Check, bench: BackendUnderTest) -> ConformanceResult:
    start = time.monotonic()
    detail = ""
    try:
        async with asyncio.timeout(CHECK_S):
            await work(bench)
    except (ConformanceError, AgentRLError, ValueError, OSError) as error:
        detail = f"{type(error).__name__}: {error}"
    return ConformanceResult(name=name, ok=not detail, detail=detail, wall_s=time.monotonic() - start)


def conformance_check(work: Check) -> Check:
    CHECKS[work.__name__.removeprefix("_")] = work
    return work


def expect(condition: bool, seen: object) -> None:
    if not condition:
        raise ConformanceError(str(seen)[:1000])


async def run_python(sandbox: Sandbox, code: str, *, timeout_s: float = 20.0, output_bytes: int = 65536) -> ExecResult:
    return await sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes)


async def expect_output(sandbox: Sandbox, code: str, *wanted: str) -> None:
    """Checks that `code` succeeds and prints exactly one of `wanted`."""
    result = await run_python(sandbox, code)
    expect(result.exit_code == 0 and result.stdout.strip() in wanted, result)


async def expect_error(kinds: type[Exception] | tuple[type[Exception], ...], work: Awaitable[object]) -> None:
    try:
        result = await work
    except kinds:
        return
    raise ConformanceError(f"expected {kinds}, got {result!r}")
