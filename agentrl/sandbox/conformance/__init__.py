"""Conformance checks for sandbox backends. The checks are shipped with the product, so that they can run on any machine and with any
user-supplied backend.

Each check opens sandboxes through the public protocol, and acts like a hostile program. `check_conformance` runs all checks.
"""

from __future__ import annotations

import asyncio
import time

from agentrl.protocols import SandboxBackend
from agentrl.records import SandboxSpec
from agentrl.sandbox.conformance import basics, sessions
from agentrl.sandbox.conformance.bench import BackendUnderTest, ConformanceError, ConformanceResult

__all__ = ["CHECKS", "BackendUnderTest", "ConformanceError", "ConformanceResult", "check_conformance"]

CHECKS = {
    name.removeprefix("check_"): function
    for module in (basics, sessions)
    for name, function in vars(module).items()
    if name.startswith("check_")
}
"""Name -> function of every check. A check receives the backend under test and a new sandbox."""
_CHECK_S = 120.0


async def check_conformance(backend: SandboxBackend, spec: SandboxSpec, *, only: str = "") -> list[ConformanceResult]:
    """Runs the checks whose name contains `only`, one after the other. A check fails if it raises an exception or takes more
    than two minutes. Raises the errors of `backend.prepare`."""
    await backend.prepare(spec)
    bench = BackendUnderTest(backend, spec)
    results = []
    for name in (name for name in CHECKS if only in name):
        start, detail = time.monotonic(), ""
        try:
            async with asyncio.timeout(_CHECK_S), bench.sandbox() as sandbox:
                await CHECKS[name](bench, sandbox)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        results.append(ConformanceResult(name=name, ok=not detail, detail=detail, wall_s=time.monotonic() - start))
    return results
