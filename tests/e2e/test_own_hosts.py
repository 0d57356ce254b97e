"""A run over hosts with their own addresses and disks, one of which is lost: `scripts/cluster_demo.py` in its short form."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.experience import SqliteStore
from agentrl.experience.audit import verify

from .conftest import ROOT, SMALL, steps_logged, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap, pytest.mark.slow]


def demonstration() -> Any:
    spec = importlib.util.spec_from_file_location("cluster_demo", ROOT / "scripts" / "cluster_demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("nothing_left")
def test_a_run_over_namespaced_hosts_survives_the_loss_of_the_learners_host(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The server's host reads versions from a store, which all hosts see."""
    store = tmp_path_factory.mktemp("store")
    transfer = json.dumps({"ref": "file", "options": {"store": f"file://{store}"}})
    code, output = demonstration().demonstrate(tmp_path, 2, [*SMALL, f"serving.weight_transfer={transfer}"])
    assert code == 0, output[-6000:] + (tmp_path / "ray.log").read_text()[-3000:]
    run = tmp_path / "run"
    result = summary(run)
    assert (result["steps"], result["weight_swaps"], result["delivered_share"]) == (2, 2, 1.0)
    assert steps_logged(run) == [1, 2]
    ledger = SqliteStore(run / "experience.sqlite")
    assert list(verify(run, ledger)) == []
    ledger.close()
    for log in ("server.log", "learner.log"):
        assert (run / "logs" / log).exists(), "a host sends what its parts write"
    assert "object store" not in output and [*store.iterdir()] == [], "the driver has deleted its versions"
    assert "is ready on cpu" in (run / "logs" / "learner.log").read_text()
