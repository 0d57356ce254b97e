"""The quickstart over three hosts, one of which is killed and replaced while it trains: `make cluster-demo`.

    python scripts/cluster_demo.py [--steps 4] [RECIPE OVERRIDES...]

The hosts are network namespaces of this machine (tests/cluster/hosts.py), each with its own address, Ray node and disk for runs:

    host 0   driver and Redis
    host 1   the policy's server
    host 2   learner and rollout workers; killed after the first step, and replaced by host 3

Requires root. Prints the output of the run, which ends with its summary. The exit code is that of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.cluster.hosts import Host, hosts  # noqa: E402

PORT = 6379
STORE_BYTES = 80 << 20
WAIT_S = 600.0
JOIN_S = 120.0
RESOURCES = {
    "server": {"cpus": 1, "memory_gib": 1, "serves": 1},
    "learner": {"cpus": 1, "memory_gib": 1, "trains": 1},
    "worker": {"cpus": 1, "memory_gib": 0.5, "trains": 1},
}
PRIORITY = {"RAY_worker_niceness": "0"}
"""Variable of a node whose parts get as much of a shared machine as other programs; Ray's default is 15."""
SURVIVING = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
"""Variables of a cluster that survives the end of its head for five minutes."""
ADDRESS_FILE = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
DISK = "mount -t tmpfs -o size=4g none {runs} && exec {command}"  # hides the driver's disk from the host


class Cluster:
    """A Ray cluster on namespaced hosts. Only the first host has the folder `runs` of the driver.

    `storage`: folder in which the head keeps its tables; without one, the cluster ends with its head.
    """

    def __init__(self, head: Host, runs: Path, *, storage: Path | None = None) -> None:
        self.head, self.runs = head, runs
        self._environment = PRIORITY | ({} if storage is None else {**SURVIVING, "RAY_gcs_storage_path": str(storage)})
        self.address = f"{head.address}:{PORT}"
        self._log = (runs / "ray.log").open("ab")
        self.start_head()

    def start_head(self) -> None:
        """Starts the head's node, also after its death.

        A killed head leaves the file with its address, and Ray does not start if a process of the machine uses that address: here those
        of the other hosts, which share its process table.
        """
        ADDRESS_FILE.unlink(missing_ok=True)
        options = ("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
        self.head_node = self._start(self.head, *options)

    def add(self, host: Host, **resources: float) -> None:
        """Starts the node of a host."""
        self._start(host, f"--address={self.address}", "--num-cpus=4", f"--resources={json.dumps(resources)}", own_disk=True)

    def wait_for(self, nodes: int) -> None:
        """Returns when the cluster has this many nodes."""
        deadline = time.monotonic() + JOIN_S
        count = f"import json, sys; from agentrl.cluster.ray_nodes import list_nodes; print(len(list_nodes('{self.address}')))"
        while time.monotonic() < deadline:
            result = subprocess.run(self.head.command(sys.executable, "-c", count), capture_output=True, text=True, cwd=ROOT, check=False)
            if result.stdout.strip() == str(nodes):
                return
            time.sleep(1.0)
        sys.exit(f"error: the cluster does not have {nodes} nodes; see {self.runs / 'ray.log'}")

    def _start(self, host: Host, *options: str, own_disk: bool = False) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name("ray"))
        common = (f"--node-ip-address={host.address}", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", "--block")
        command = [program, "start", *options, *common]
        if own_disk:
            text = " ".join(f"'{word}'" for word in command)
            command = ["sh", "-c", DISK.format(runs=self.runs, command=text)]
        return host.start(*command, stdout=self._log, stderr=self._log, cwd=ROOT, env={**os.environ, **self._environment})


def train(cluster: Cluster, run: Path, overrides: list[str], *, by: tuple[str, ...] = ("agentrl",)) -> subprocess.Popen[str]:
    """Starts the run on the first host."""
    run_overrides = ["rollout.workers=1", "store=redis", f"cluster.resources={json.dumps(RESOURCES)}", *overrides]
    options = ["--run-dir", str(run), "--sandbox", "bubblewrap", "--cluster", cluster.address]
    command = ("-m", *by, "train", "recipes/quickstart.py", *run_overrides, *options)
    return cluster.head.python(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(run: Path) -> list[int]:
    """Returns the steps that the run has recorded."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "episodes" in line]


def demonstrate(runs: Path, steps: int, overrides: list[str], *, by: tuple[str, ...] = ("agentrl",)) -> tuple[int, str]:
    """Runs the demonstration with run folders in `runs`. Returns the exit code of the run and its output."""
    run = runs / "run"
    with hosts(4) as (head, server, learner, spare):
        cluster = Cluster(head, runs)
        cluster.wait_for(1)
        for number, (host, resource) in enumerate(((server, {"serves": 1}), (learner, {"trains": 2})), start=2):
            cluster.add(host, **resource)
            cluster.wait_for(number)  # nodes of one machine that start at once choose the same sockets
        print(f"three hosts: driver on {head.address}, server on {server.address}, learner and worker on {learner.address}", flush=True)
        process = train(cluster, run, [f"steps={steps}", *overrides], by=by)
        deadline = time.monotonic() + WAIT_S
        while not steps_of(run) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if steps_of(run):
            learner.kill()
            print(f"killed host {learner.address} after step {max(steps_of(run))}; {spare.address} replaces it", flush=True)
            cluster.add(spare, trains=2)
        output, _ = process.communicate(timeout=2 * WAIT_S)
        return process.returncode, output


def main() -> int:
    """Runs the demonstration in a temporary folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("overrides", nargs="*", help="overrides of recipes/quickstart.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-demo-") as name:
        code, output = demonstrate(Path(name), arguments.steps, arguments.overrides)
        print(output)
        finished_steps = steps_of(Path(name) / "run")
    print(f"the run finished {len(finished_steps)} of {arguments.steps} steps, with exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
