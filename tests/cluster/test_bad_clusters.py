"""Clusters and nodes that a run cannot use: each is a clear error within 30 s, and nothing is left running."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.cluster.process_host import LocalLauncher
from agentrl.cluster.ray_nodes import list_nodes
from agentrl.cluster.run_service import RunService
from agentrl.errors import InfrastructureError, UserError
from agentrl.experience import DriverStore, FolderCheckpoints, SqliteStore
from agentrl.run.worker_pool import WorkerPool
from tests.cluster.ray_nodes import RayNodes
from tests.driving import make_recipe

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
OTHER_VERSION = """#!/bin/sh
exec {python} -c '
import sys
import ray
{change}
from agentrl.cluster import ray_nodes
sys.argv = ["ray_nodes", sys.argv[-1]]
sys.exit(ray_nodes.main())
' "$@"
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    start, before = time.monotonic(), {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert time.monotonic() - start < LIMIT_S
    remaining = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not psutil.wait_procs(remaining, timeout=5)[1]


def test_an_address_that_accepts_connections_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"no Ray cluster responds at {address}: .*\n  fix: start a cluster"):
            list_nodes(address, wait_s=10.0)
        with pytest.raises(UserError, match=rf"no Ray cluster responds at ray://{address}: "):
            list_nodes(f"ray://{address}", wait_s=10.0)


@pytest.mark.parametrize("change", ['ray.__version__ = "2.1.0"', "sys.version_info = (3, 9, 1)"])
def test_a_cluster_of_another_ray_or_python_version(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    python = tmp_path / "python"
    python.write_text(OTHER_VERSION.format(python=sys.executable, change=change))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(UserError, match=r"the Ray cluster at .* uses a different version of Ray or Python: .*(2\.1\.0|3\.9\.1)"):
        list_nodes(ray_nodes.address)


async def test_a_node_without_the_sandbox_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends at the second worker whose host is unfit, instead of the sixth failed start."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    recipe = make_recipe().but({"rollout.workers": 1, "sandbox.backend": "bubblewrap", "tasks.family": "sandboxes.tables:Tables"})
    store = await DriverStore.open(lambda: SqliteStore(tmp_path / "experience.sqlite"))
    launcher = LocalLauncher(tmp_path, root=ROOT)
    served: Any = type("Served", (), {"token_s": 0.0, "cache_use": None, "version": 0})()
    do_nothing: Any = lambda *_, **__: None  # noqa: E731
    pool = WorkerPool(
        recipe,
        tmp_path,
        root=ROOT,
        store=store,
        served=served,
        memory=None,
        checkpoints=FolderCheckpoints(tmp_path / "running"),
        launcher=launcher,
        service=RunService(),
        on_attempt=do_nothing,
        alert=do_nothing,
        record_event=do_nothing,
    )
    try:
        with pytest.RaisesGroup(pytest.RaisesExc(InfrastructureError, match=r"rollout worker 0 failed 2 times in a row: .*bubblewrap")):
            await pool.watch()
    finally:
        await launcher.close()
        await store.close()
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or [])]
    assert os.path.exists(tmp_path / "logs" / "worker-0.log")


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err",
        "ConnectionAbortedError: Initialization failure from server: Traceback psutil.NoSuchProcess: process no longer exists",
    ],
)
def test_a_connection_whose_server_process_dies_is_retried(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    died = subprocess.CompletedProcess((), 1, b"", message.encode())
    answers = [died, died, subprocess.CompletedProcess((), 0, b"agentrl-nodes:[]\n", b"")]
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answers.pop(0))
    assert list_nodes("ray://127.0.0.1:1", wait_s=30.0) == [] and not answers
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: died)
    with pytest.raises(UserError, match=re.escape(message)):
        list_nodes("ray://127.0.0.1:1", wait_s=0.5)
