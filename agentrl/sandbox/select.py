"""Chooses the sandbox backend of a run: one of those that ship, or anybody's. There is no fallback to the host."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from agentrl.config.recipe import SandboxConfig
from agentrl.errors import SandboxError, SandboxUnavailable, UserError
from agentrl.plugins import parts
from agentrl.protocols import SandboxBackend
from agentrl.sandbox import bubblewrap, docker_client, images, reaper
from agentrl.sandbox.backend import ChannelBackend
from agentrl.sandbox.bubblewrap import BubblewrapBackend
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.plain import PoolAdapter
from agentrl.sandbox.pool import WarmPool

log = logging.getLogger(__name__)

START_DOCKER = f"sudo apt-get install docker.io crun && sudo {sys.executable} -m agentrl.sandbox.daemon start"
RESTART_DOCKER = "sudo systemctl restart docker, or end that dockerd and start one"
INSTALL_BUBBLEWRAP = "sudo apt-get install bubblewrap mmdebstrap"


def open_auto(*, root: Path, run_label: str) -> DockerBackend | BubblewrapBackend:
    """`select_backend("auto", ...)`."""
    return select_backend("auto", run_label=run_label, root=root)


def open_docker(*, root: Path, run_label: str) -> DockerBackend | BubblewrapBackend:
    """`select_backend("docker", ...)`."""
    return select_backend("docker", run_label=run_label, root=root)


def open_bubblewrap(*, root: Path, run_label: str) -> DockerBackend | BubblewrapBackend:
    """`select_backend("bubblewrap", ...)`."""
    return select_backend("bubblewrap", run_label=run_label, root=root)


def select_backend(
    name: str, *, run_label: str, root: Path, progress: images.Progress = images.no_progress
) -> DockerBackend | BubblewrapBackend:
    """The backend of ours called `name`: `auto` is Docker when a local daemon answers, bubblewrap when that works, else
    `SandboxUnavailable`. `UserError` for a name that none of ours has.

    `root` is the folder that `SandboxSpec.image` is relative to; `run_label` marks what the run leaves open. Blocks for a
    moment, never starts a daemon, and raises `SandboxUnavailable` with the command that puts it right.
    """
    if name not in parts.BACKEND.shipped:
        raise UserError(f"no sandbox backend {name!r} ships", fix=f"use {', '.join(parts.BACKEND.shipped)}")
    daemon = docker_client.daemon_state() if name in ("auto", "docker") else "absent"
    if daemon == "answers":
        return DockerBackend(run_label=run_label, root=root, progress=progress)
    if name == "docker":
        raise SandboxUnavailable(
            f"no Docker daemon answers at {docker_client.daemon_address()}"
            + (": one is there, takes connections and says nothing" if daemon == "silent" else ""),
            fix=f"{RESTART_DOCKER if daemon == 'silent' else START_DOCKER}  (or choose sandbox.backend=bubblewrap)",
        )
    problem = bubblewrap.unavailable_reason()
    if not problem:
        return BubblewrapBackend(run_label=run_label, root=root, progress=progress)
    if name == "bubblewrap":
        raise SandboxUnavailable(f"bubblewrap does not work here: {problem}", fix=INSTALL_BUBBLEWRAP)
    raise SandboxUnavailable(
        f"programs cannot be isolated here: no Docker daemon at {docker_client.daemon_address()}, and bubblewrap does not work: {problem}",
        fix=f"one of\n    {START_DOCKER}\n    {INSTALL_BUBBLEWRAP}",
    )


def open_backend(config: SandboxConfig, *, run_label: str, root: Path) -> SandboxBackend:
    """The backend that a recipe names. Raises `SandboxUnavailable` for one of ours, `PluginError` for somebody's that is none."""
    made: SandboxBackend = parts.make_part(parts.BACKEND, config.backend, config.options, run_label=run_label, root=root)
    return made


async def open_sandboxes(config: SandboxConfig, *, run_label: str, root: Path) -> WarmPool:
    """The sandboxes of a run: removes what dead drivers left, opens the backend, and puts a warm pool in front of it."""
    made = await asyncio.to_thread(open_backend, config, run_label=run_label, root=root)
    backend = made if isinstance(made, ChannelBackend) else PoolAdapter(made)
    try:
        await asyncio.to_thread(reaper.prune)
    except SandboxError as error:
        if backend.name == "docker":
            raise
        log.warning("what dead drivers left is not removed: %s", error)  # a daemon that this run does not use
    return WarmPool(backend, warm=config.warm, max_open=config.max_open, fill_timeout_s=config.open_timeout_s)
