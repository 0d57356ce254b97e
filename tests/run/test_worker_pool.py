"""The pool starts real worker processes. A host that cannot run them ends the run quickly."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.cluster.process_host import LocalLauncher
from agentrl.cluster.run_service import RunService
from agentrl.errors import InfrastructureError
from agentrl.experience import FolderCheckpoints
from agentrl.run.worker_pool import WorkerPool
from tests.driving import make_recipe
from tests.run.test_workers import Served

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.bubblewrap
async def test_a_host_without_the_sandbox_backend_ends_the_run_within_30_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has the backend; only the worker's host does not."""
    recipe = make_recipe(workers=1).but({"sandbox.backend": "bubblewrap", "tasks.family": "sandboxes.tables:Tables"})
    alerts: list[Any] = []
    launcher = LocalLauncher(tmp_path, root=ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = WorkerPool(
        recipe,
        tmp_path,
        root=ROOT,
        store=cast(Any, None),
        served=cast(Any, Served(tmp_path / "journal.jsonl")),
        memory=None,
        checkpoints=FolderCheckpoints(tmp_path / "running"),
        launcher=launcher,
        service=RunService(host="127.0.0.1"),
        on_attempt=lambda failure: None,
        alert=alerts.append,
        record_event=lambda event: None,
    )
    start = time.monotonic()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(BaseExceptionGroup) as raised:
                await pool.watch()
    finally:
        await launcher.close()
    (error,) = raised.value.exceptions
    assert isinstance(error, InfrastructureError)
    assert "rollout worker 0 failed 2 times in a row" in str(error) and "bwrap is not installed" in str(error), str(error)
    assert len(alerts) == 1 and "bwrap is not installed" in str(alerts[0])
    assert time.monotonic() - start < 30 * max(1.0, os.getloadavg()[0] / 4)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pool.pids)
