"""Reports of rollout workers to the driver."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.driving import make_task
from tests.run.test_workers import driving, working


async def test_a_worker_with_the_same_name_counts_after_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock starts at 0 with the machine; a worker in a container keeps its host name and process id."""
    uptime_ns, started_ns = 10**15, time.perf_counter_ns()
    monkeypatch.setattr("agentrl.run.worker.time.monotonic_ns", lambda: uptime_ns + time.perf_counter_ns() - started_ns)
    async with driving(tmp_path) as drive, asyncio.timeout(120):
        for index in range(2):
            async with working(drive, "a"):
                await drive.leases.run_group(index, make_task(index))
                while len(drive.attempts) < 3 * (index + 1):
                    await asyncio.sleep(0.05)
            uptime_ns = 10**9
    assert drive.attempts == [None] * 6
