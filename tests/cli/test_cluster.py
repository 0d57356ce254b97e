from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.commands import agentrl

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.py")


def test_the_plan_of_a_recipe_is_shown_without_starting_anything() -> None:
    result = agentrl("cluster", "plan", QUICKSTART, "rollout.workers=3", "device=cpu")
    assert result.returncode == 0, result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["driver", "1"],
        ["server", "1"],
        ["learner", "1"],
        ["worker", "3"],
    ]
    data = json.loads(agentrl("cluster", "plan", QUICKSTART, "--json").stdout)
    assert data["address"] == "local" and [part["part"] for part in data["parts"]] == ["driver", "server", "learner"]


def test_a_manifest_needs_a_device_and_starts_with_the_commands(tmp_path: Path) -> None:
    unknown = agentrl("cluster", "manifest", QUICKSTART)
    assert unknown.returncode == 2 and "add device=cuda or device=cpu" in unknown.stderr
    out = tmp_path / "a" / "run.yaml"
    result = agentrl("cluster", "manifest", QUICKSTART, "device=cpu", "--namespace", "rl", "--out", str(out))
    assert result.returncode == 0, result.stderr
    text = out.read_text()
    assert "# kubectl -n rl create secret generic quickstart-redis" in text.splitlines()[1]
    assert [document["kind"] for document in yaml.safe_load_all(text)].count("RayJob") == 1


def test_a_dockerfile_has_the_projects_sandbox_images_and_excludes_runs(tmp_path: Path) -> None:
    out = tmp_path / "Dockerfile"
    assert agentrl("cluster", "dockerfile", "--project", str(ROOT), "--out", str(out)).returncode == 0
    assert "sandboxes/tables" in out.read_text() and "runs\n" in (tmp_path / "Dockerfile.dockerignore").read_text()


def test_an_address_without_a_cluster_is_an_error_within_the_deadline() -> None:
    result = agentrl("cluster", "plan", QUICKSTART, "--cluster", "127.0.0.1:1/x")
    assert result.returncode == 2 and "cluster.address" in result.stderr


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """Starts a Ray cluster with two nodes on this machine, in a separate process, and returns its address."""
    code = (
        "import sys\nfrom ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'include_dashboard': False})\n"
        "cluster.add_node(num_cpus=4, resources={'disk': 1}, labels={'pool': 'a'})\n"
        "print(cluster.address, flush=True)\nsys.stdin.read()\ncluster.shutdown()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    yield next(line.strip() for line in process.stdout if line[:1].isdigit())
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_plan_is_compared_with_the_nodes_of_a_running_cluster(head: str) -> None:
    fits = agentrl(
        "cluster", "plan", QUICKSTART, "device=auto", "--cluster", head, 'cluster.resources={"server": {"cpus": 3, "pool": "a"}}'
    )
    assert fits.returncode == 0 and fits.stdout.rstrip().endswith("The plan fits."), fits
    large = agentrl("cluster", "plan", QUICKSTART, "--cluster", head, 'cluster.resources={"server": {"cpus": 5}}')
    assert large.returncode == 2 and "1 x server (5 CPU" in large.stderr and "room for 0" in large.stderr and "1 disk" in large.stderr
    data = json.loads(
        agentrl("cluster", "plan", QUICKSTART, "--cluster", head, 'cluster.resources={"server": {"gpus": 1}}', "--json").stdout
    )
    assert data["assignment"] is None and len(data["nodes"]) == 2 and any("GPU" in problem for problem in data["problems"])


@pytest.mark.slow
def test_a_port_without_a_listener_is_an_error_within_30_s() -> None:
    result = agentrl("cluster", "plan", QUICKSTART, "--cluster", "127.0.0.1:1")
    assert result.returncode == 2 and "no Ray cluster responds at 127.0.0.1:1" in result.stderr
