"""The quickstart's recipe on a Ray cluster, whose nodes are processes of this machine, while one node is killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.cluster import ray_nodes

from .conftest import SMALL, start, steps_logged, summary, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap, pytest.mark.slow]
# The server is on the first node. The others have the learner and the workers, or room for them.
RESOURCES = {
    "server": {"cpus": 1, "memory_gib": 1, "first": 1},
    "learner": {"cpus": 1, "memory_gib": 1, "other": 1},
    "worker": {"cpus": 1, "memory_gib": 0.5, "other": 1},
}


def processes_of(run: Path, module: str) -> list[psutil.Process]:
    """Processes of a part of a run, the oldest first: their command lines have the module and the run folder."""
    candidates = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    matching = [process for process, arguments in candidates if module in arguments and str(run) in arguments]
    return sorted(matching, key=lambda process: process.create_time())


def raylet_of(part: psutil.Process) -> psutil.Process:
    """The process that is the node of a part."""
    return next(parent for parent in part.parents() if "raylet" in parent.name())


@pytest.mark.usefixtures("nothing_left")
def test_a_run_on_a_cluster_survives_the_loss_of_a_node(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    with ray_nodes.running() as nodes:
        nodes.add(4, first=1)
        for _ in range(2):
            nodes.add(4, other=3)
        overrides = (*SMALL, "steps=3", "rollout.workers=1", "store=redis", f"cluster.resources={json.dumps(RESOURCES)}")
        options = ("--run-dir", str(run), "--sandbox", "bubblewrap", "--cluster", nodes.address)
        process = start("train", "recipes/quickstart.py", *overrides, *options, by=forked)
        wait_for(lambda: len(steps_logged(run)) >= 1, process, 600.0)
        learner = processes_of(run, "agentrl.learner.main")[0]
        ray_nodes.kill_node(raylet_of(learner).pid)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output[-6000:]
        result = summary(run)
        assert (result["steps"], result["weight_swaps"], result["delivered_share"]) == (3, 3, 1.0)
        assert "the learner is lost" in output and steps_logged(run) == [1, 2, 3]
        assert not processes_of(run, "agentrl.learner.main") and not processes_of(run, "agentrl.run.worker")
