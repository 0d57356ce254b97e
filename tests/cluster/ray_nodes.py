"""A Ray cluster whose nodes are processes of this machine: a head, on which no part starts, and further nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.processes import process_tree
from agentrl.cluster import ray_launcher
from agentrl.cluster.fit import ClusterNode
from agentrl.cluster.plan import Bundle, ClusterPlan, PlannedPart
from agentrl.cluster.ray_launcher import RayLauncher
from agentrl.cluster.ray_nodes import list_nodes

STORE_BYTES = 80 << 20
PATIENCE_S = 120.0  # on a machine with other work
# Ray's defaults stop writing objects to a disk that is 95% full, and kill workers when memory is. The tests must not depend on that.
RAY_SETTINGS = {"local_fs_capacity_threshold": 1.0, "memory_monitor_refresh_ms": 0}


def plan_of(address: str, *names: str, cpus: float = 0.1, custom: dict[str, float] | None = None) -> ClusterPlan:
    """A plan with one bundle for each name."""
    bundles = (Bundle(name=name, cpus=cpus, custom=custom or {}) for name in names)
    return ClusterPlan(parts=tuple(PlannedPart(name=bundle.name, count=1, bundle=bundle) for bundle in bundles), address=address)


def kill_node(raylet: int) -> None:
    """Kills a raylet and all processes that it has started, as the end of a machine does."""
    for pid in process_tree(raylet):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class RayNodes:
    """The nodes of a cluster, while `running` is open."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._listed: list[ClusterNode] | None = None  # since the last change

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return str(self._cluster.address)

    def add(self, cpus: int = 2, **resources: float) -> Any:
        """Adds a node and waits until the cluster has it."""
        self._listed = None
        return self._cluster.add_node(num_cpus=cpus, resources=resources, object_store_memory=STORE_BYTES)

    def remove(self, node: Any) -> None:
        """Removes a node, which may be dead."""
        self._listed = None
        self._cluster.remove_node(node, allow_graceful=False)

    def kill(self, node: Any) -> None:
        """Kills all processes of a node with SIGKILL."""
        kill_node(node.all_processes["raylet"][0].process.pid)

    @asynccontextmanager
    async def launcher(self, plan: ClusterPlan, folder: Path) -> AsyncIterator[RayLauncher]:
        """A launcher with a project folder in the run folder."""
        if self._listed is None:
            self._listed = list_nodes(self.address, wait_s=PATIENCE_S)  # in another process, which takes seconds
        listed = self._listed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_launcher, "list_nodes", lambda address, wait_s: listed)
            patch.setattr(ray_launcher, "RESERVE_S", PATIENCE_S)
            launcher = await RayLauncher.open(plan, folder, root=folder / "project")
        try:
            yield launcher
        finally:
            await launcher.close()


@contextmanager
def running(*, client_port: int | None = None) -> Iterator[RayNodes]:
    """Starts a head. `client_port`: also a server for drivers outside of the cluster, `ray://127.0.0.1:PORT`."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "ray_client_server_port": client_port}
    cluster = Cluster(head_node_args={**head, "_system_config": RAY_SETTINGS}, initialize_head=True)
    try:
        yield RayNodes(cluster)
    finally:
        cluster.shutdown()
