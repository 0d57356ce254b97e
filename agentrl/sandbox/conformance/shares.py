"""A sandbox's share of the machine's CPUs."""

from __future__ import annotations

import math
import os

from agentrl.sandbox.conformance.bench import BackendUnderTest, conformance_check, expect, expect_output, run_python

SPIN_S = 1.0
SPINNERS = 4
LENIENCE = 1.35
"""Accepted excess of CPU time, which is assigned in slices of a tenth of a second."""


@conformance_check
async def _cores(bench: BackendUnderTest) -> None:
    """Every way to count cores gives the number that the CPU time fills."""
    count = min(math.ceil(bench.spec.cpus), len(os.sched_getaffinity(0)))
    code = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)), os.sysconf('SC_NPROCESSORS_ONLN'))"
    async with bench.sandbox() as sandbox:
        await expect_output(sandbox, code, f"{count} {count} {count}")
        result = await sandbox.exec(["nproc"], timeout_s=10)
        expect(result.stdout == f"{count}\n", result)
        result = await sandbox.exec(["python3", "-I", "-c", code], timeout_s=20)
        expect(result.stdout == f"{count} {count} {count}\n", result)


@conformance_check
async def _cpu_time(bench: BackendUnderTest) -> None:
    """All programs together get the CPU time of the spec."""
    code = (
        "import os, time\n"
        f"for _ in range({SPINNERS}):\n"
        "    if os.fork() == 0:\n"
        f"        end = time.monotonic() + {SPIN_S}\n"
        "        while time.monotonic() < end: pass\n"
        "        os._exit(0)\n"
        "start = time.monotonic()\n"
        f"for _ in range({SPINNERS}): os.wait()\n"
        "spent = os.times()\n"
        "print(spent.children_user + spent.children_system, time.monotonic() - start)\n"
    )
    async with bench.sandbox() as sandbox:
        result = await run_python(sandbox, code)
        expect(result.exit_code == 0, result)
        spent, wall = map(float, result.stdout.split())
        expect(0 < spent <= LENIENCE * bench.spec.cpus * wall, f"{spent:.2f} s of CPU time in {wall:.2f} s with cpus={bench.spec.cpus}")
