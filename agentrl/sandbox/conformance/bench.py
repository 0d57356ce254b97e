"""Types and helper functions for conformance checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import ExecResult, SandboxSpec

MEBIBYTE = 1 << 20
OTHER_PROCESSES = "import os\nprint([pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())])"
"""A snippet that prints the pids of a sandbox's processes except the exec server's and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceResult:
    """The result of one check, such as `ConformanceResult(name="no_network", ok=True, detail="", wall_s=0.2)`."""

    name: str
    ok: bool
    detail: str  # what happened instead; empty if ok
    wall_s: float


class ConformanceError(Exception):
    """The backend does not meet a requirement. The message says what happened instead."""


@dataclass(frozen=True, slots=True)
class BackendUnderTest:
    """The backend and the spec that a check tests."""

    backend: SandboxBackend
    spec: SandboxSpec

    @asynccontextmanager
    async def sandbox(self, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None) -> AsyncIterator[Sandbox]:
        """Yields a new sandbox, which is closed after the block."""
        sandbox = await self.backend.open(self.spec, files=files, snapshot=snapshot)
        try:
            yield sandbox
        finally:
            await sandbox.close()


def expect(condition: bool, actual: object) -> None:
    """Raises `ConformanceError` with the text of `actual` if the condition is false."""
    if not condition:
        raise ConformanceError(str(actual)[:1000])


async def run_python(sandbox: Sandbox, code: str, *, timeout_s: float = 20.0, output_bytes: int = 65536) -> ExecResult:
    """Runs a snippet."""
    return await sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes)


async def expect_output(sandbox: Sandbox, code: str, expected: str) -> None:
    """Raises `ConformanceError` unless `code` succeeds and prints `expected`, apart from surrounding white space."""
    result = await run_python(sandbox, code)
    expect(result.exit_code == 0 and result.stdout.strip() == expected, result)


async def expect_everywhere(sandbox: Sandbox, code: str, expected: str) -> None:
    """Raises `ConformanceError` unless `code` succeeds and prints `expected`, both as a snippet and in a new interpreter."""
    await expect_output(sandbox, code, expected)
    result = await sandbox.exec(["python3", "-I", "-c", code], timeout_s=20)
    expect(result.exit_code == 0 and result.stdout.strip() == expected, result)


async def expect_error(kinds: type[Exception] | tuple[type[Exception], ...], work: Awaitable[object]) -> None:
    """Raises `ConformanceError` unless `work` raises an exception of one of the types `kinds`."""
    try:
        result = await work
    except kinds:
        return
    raise ConformanceError(f"expected {kinds}, got {result!r}")
