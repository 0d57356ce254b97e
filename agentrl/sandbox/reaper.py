"""What is open on this machine, and the removal of what dead drivers left behind.

A driver that is killed leaves containers that nobody closes. (Bubblewrap sandboxes die with their driver; of those only folders
and control groups stay.) Every sandbox carries its driver's lease, so anyone can tell the dead from the living.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import requests
from docker.errors import DockerException

from agentrl.sandbox import cgroups, docker, docker_client
from agentrl.sandbox.lease import alive, read_run_label, runtime_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSandbox:
    """A sandbox on this machine: `OpenSandbox(name="agentrl-...-0", backend="docker", run="quickstart", driver_alive=False)`."""

    name: str
    backend: str  # "docker", "bubblewrap", or "container" for one that sandboxes of the Docker backend share
    run: str
    driver_alive: bool


def list_open() -> list[OpenSandbox]:
    """Every sandbox of this user's drivers, those of dead drivers included.

    Raises `SandboxError` when the daemon misbehaves, `SandboxTimeout` when it is there and does not answer.
    """
    found: dict[str, OpenSandbox] = {}
    for folder in _folders():
        lease = folder.parent.name
        backend, run = read_run_label(folder)
        found[folder.name] = OpenSandbox(name=folder.name, backend=backend, run=run, driver_alive=alive(lease))
    for name, labels in _containers().items():
        lease = labels.get(docker_client.LABEL_LEASE, "")
        backend = "container" if docker_client.LABEL_SHARED in labels else "docker"
        found[name] = OpenSandbox(name=name, backend=backend, run=labels.get(docker_client.LABEL_RUN, ""), driver_alive=alive(lease))
    return sorted(found.values(), key=lambda sandbox: sandbox.name)


def prune() -> int:
    """Removes everything of dead drivers: containers, folders, control groups. Gives how many sandboxes that was. Blocking."""
    dead = {sandbox.name for sandbox in list_open() if not sandbox.driver_alive}
    try:
        for name in dead & _containers().keys():
            docker.remove(name)
    except (DockerException, requests.RequestException) as error:
        raise docker_client.daemon_error(error) from error
    for driver in _inside(runtime_folder()):
        if not alive(driver.name):
            shutil.rmtree(driver, ignore_errors=True)
    hierarchy = cgroups.find_hierarchy()
    if hierarchy is not None:
        for name in hierarchy.names():
            if not alive(lease_in_name(name)):
                hierarchy.group(name).remove()
                dead.add(name)
    return len(dead)


def lease_in_name(name: str) -> str:
    """The lease in a sandbox's name (`agentrl-<lease>-<number>`)."""
    return name.removeprefix("agentrl-").rpartition("-")[0]


def _folders() -> list[Path]:
    """Those of the sandboxes of all drivers."""
    return [folder for driver in _inside(runtime_folder()) for folder in _inside(driver)]


def _inside(folder: Path) -> list[Path]:
    """The folders in `folder`; none when it has just gone, as one does with a driver's last sandbox."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _containers() -> dict[str, dict[str, str]]:
    return docker.ask(lambda: docker.containers(docker_client.LABEL_LEASE), without={})
