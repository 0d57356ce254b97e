"""The nodes of a running Ray cluster. A separate process reads the nodes, because a connection to an address that does not respond cannot
be interrupted, and because a process can be connected to only one cluster.

    python -m agentrl.cluster.ray_nodes HOST:PORT
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentrl.base.installation import import_optional
from agentrl.base.user_code import printable
from agentrl.cluster.fit import ClusterNode
from agentrl.errors import UserError

WAIT_S = 30.0
_LARGEST = 64 << 20  # maximum bytes of a response: 4,096 nodes need 4 MiB
_MARK = "agentrl-nodes:"
# The server at ray:// starts a process for each connection. On a busy head this process may die.
_CLIENT_SERVER_DIED = ("client server failed", "Initialization failure from server")


def list_nodes(address: str, *, wait_s: float = WAIT_S) -> list[ClusterNode]:
    """Returns the live nodes of the cluster at `address` (`auto`, HOST:PORT or ray://HOST:PORT). Reserves nothing in the cluster. With
    ray://, the free amounts are unknown, and the total amounts are returned instead.

    Raises `UserError` if Ray is not installed, or no cluster with this Ray version responds within `wait_s` seconds.
    """
    import_optional("ray", "cluster", needed_for="cluster.address")
    deadline = time.monotonic() + wait_s
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "agentrl.cluster.ray_nodes", address], capture_output=True, stdin=subprocess.DEVNULL, timeout=wait_s
        )
    except subprocess.TimeoutExpired:
        raise _unreachable(address, f"no answer within {wait_s:g} s") from None
    marked = [line for line in answer.stdout[:_LARGEST].decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if answer.returncode or not marked:
        *_, last = answer.stderr.decode(errors="replace").strip().splitlines() or ["no answer"]
        if any(failed in last for failed in _CLIENT_SERVER_DIED) and (left := deadline - time.monotonic()) > 1.0:
            return list_nodes(address, wait_s=left)
        raise _unreachable(address, printable(last, 400))
    return [ClusterNode(**node) for node in json.loads(marked[-1].removeprefix(_MARK))]


def _unreachable(address: str, reason: str) -> UserError:
    fix = "start a cluster (ray start --head), and give cluster.address as HOST:PORT of its head, or ray://HOST:10001"
    if "version mismatch" in reason.lower():
        return UserError(
            f"the Ray cluster at {address} uses a different version of Ray or Python: {reason}",
            fix="install the same versions of Ray and Python everywhere",
        )
    return UserError(f"no Ray cluster responds at {address}: {reason}", fix=fix)


def _read_nodes(address: str) -> list[dict[str, Any]]:
    """Connects to the cluster and returns the `ClusterNode` arguments for each node."""
    ray: Any = importlib.import_module("ray")  # its functions have no annotations
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    free: Mapping[str, Mapping[str, float]] = {}
    if not address.startswith("ray://"):
        free = importlib.import_module("ray._private.state").available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = Counter(node["NodeName"] for node in alive)  # several nodes may run on one machine
    return [
        {
            "name": node["NodeName"] if names[node["NodeName"]] == 1 else f"{node['NodeName']}#{node['NodeID'][:8]}",
            "total": node["Resources"],
            "free": free.get(node["NodeID"], node["Resources"]),
            "labels": node.get("Labels") or {},
        }
        for node in alive
    ]


def main() -> int:
    """Prints the nodes as one line of JSON. Returns 1, with a message on standard error, if no cluster responds."""
    try:
        nodes = _read_nodes(sys.argv[1])
    except Exception as error:  # Ray raises arbitrary errors
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"{_MARK}{json.dumps(nodes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
