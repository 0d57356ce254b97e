"""Lists the sandboxes that are open on this machine, and removes what dead drivers left behind.

A killed driver leaves containers behind. Bubblewrap sandboxes end with their driver; only their folders and control groups remain. Each
sandbox carries the lease of its driver, which tells whether that driver still runs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandbox import cgroups, docker_client
from agentrl.sandbox.lease import alive, read_run_label, runtime_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSandbox:
    """A sandbox on this machine: `OpenSandbox(name="agentrl-...-0", backend="docker", run="quickstart", driver_alive=False)`."""

    name: str
    backend: str  # "docker", "bubblewrap", or "container" for one that several Docker sandboxes share
    run: str
    driver_alive: bool


def list_open() -> list[OpenSandbox]:
    """Every sandbox of this user's drivers, dead ones included. Raises `SandboxError`, or `SandboxTimeout` if the daemon is silent."""
    sandboxes: dict[str, OpenSandbox] = {}
    for driver in _subfolders(runtime_folder()):
        for folder in _subfolders(driver):
            backend, run = read_run_label(folder)
            sandboxes[folder.name] = OpenSandbox(name=folder.name, backend=backend, run=run, driver_alive=alive(driver.name))
    for name, labels in _containers().items():
        lease = labels.get(docker_client.LABEL_LEASE, "")
        backend = "container" if docker_client.LABEL_SHARED in labels else "docker"
        sandboxes[name] = OpenSandbox(name=name, backend=backend, run=labels.get(docker_client.LABEL_RUN, ""), driver_alive=alive(lease))
    return sorted(sandboxes.values(), key=lambda sandbox: sandbox.name)


def prune() -> int:
    """Removes the containers, folders and control groups of dead drivers. Returns the number of sandboxes. Blocking."""
    dead = {sandbox.name for sandbox in list_open() if not sandbox.driver_alive}
    for name in dead & _containers().keys():
        docker_client.remove(name)
    for driver in _subfolders(runtime_folder()):
        if not alive(driver.name):
            shutil.rmtree(driver, ignore_errors=True)
    hierarchy = cgroups.find_hierarchy()
    if hierarchy is not None:
        for name in hierarchy.names():
            if not alive(lease_in_name(name)):
                hierarchy.remove(name)
                dead.add(name)
    return len(dead)


def lease_in_name(name: str) -> str:
    """The lease in a sandbox's name (`agentrl-<lease>-<number>`)."""
    return name.removeprefix("agentrl-").rpartition("-")[0]


def _subfolders(folder: Path) -> list[Path]:
    """The folders in `folder`; none if it has just been removed, like a driver's folder with its last sandbox."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _containers() -> dict[str, dict[str, str]]:
    return docker_client.containers(docker_client.LABEL_LEASE) if docker_client.reachable() else {}
