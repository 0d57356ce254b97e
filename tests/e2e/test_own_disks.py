"""A run whose servers, learner and workers have no access to the driver's disk, with the real parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.base.files import folder_manifest
from agentrl.experience import SqliteStore
from agentrl.experience.audit import verify

from .conftest import SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]


@pytest.mark.usefixtures("nothing_left")
def test_a_run_without_a_shared_disk_has_the_same_guarantees(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run, disks = tmp_path / "run", tmp_path / "disks"
    few = ("steps=2", *SMALL, "rollout.workers=2", "learner.keep_checkpoints=1")
    by, environment = ("tests.e2e.own_disks", *forked[1:]), {"AGENTRL_TEST_DISKS": str(disks)}
    code, output = agentrl("train", "recipes/quickstart.py", *few, "--run-dir", str(run), "--sandbox", "bubblewrap", by=by, env=environment)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["weight_swaps"], result["delivered_share"]) == (2, 2, 1.0)
    store = SqliteStore(run / "experience.sqlite")
    assert list(verify(run, store)) == []
    store.close()
    for part in ("server", "learner"):
        versions = disks / part / "versions"
        assert folder_manifest(versions / "000002").items() <= folder_manifest(run / "versions" / "000002").items()
    assert (disks / "learner" / "checkpoints" / "000002" / "manifest.json").exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()) == ["000002"]
    assert not (disks / "worker" / "versions").exists(), "a worker has no weights"
    assert not (disks / "worker" / "running").exists() and not (disks / "learner" / "experience.sqlite").exists()
    [*_, step] = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    assert step["workers"] == 2 and step["swap_total_ms"] > step["swap_stall_ms"] > 0
