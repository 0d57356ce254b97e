"""Chooses the sandbox backend of a run. There is no fallback to the host."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Literal

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.recipe import SandboxConfig
from agentrl.sandbox import bubblewrap, engine, images, reaper
from agentrl.sandbox.bubblewrap import BubblewrapBackend
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.pool import WarmPool

log = logging.getLogger(__name__)

START_DOCKER = f"sudo apt-get install docker.io crun && sudo {sys.executable} -m agentrl.sandbox.daemon start"
RESTART_DOCKER = "sudo systemctl restart docker, or end that dockerd and start one"
INSTALL_BUBBLEWRAP = "sudo apt-get install bubblewrap mmdebstrap"

BackendName = Literal["auto", "docker", "bubblewrap"]


def select_backend(
    name: BackendName, *, run_label: str, root: Path, progress: images.Progress = images.silent
) -> DockerBackend | BubblewrapBackend:
    """The backend `name`; `auto` is Docker when a local daemon answers, bubblewrap when that works, else `SandboxUnavailable`.

    `root` is the folder that `SandboxSpec.image` is relative to; `run_label` marks what the run leaves open. Blocks for a
    moment, never starts a daemon, and raises `SandboxUnavailable` with the command that puts it right.
    """
    daemon = engine.state() if name in ("auto", "docker") else "absent"
    if daemon == "answers":
        return DockerBackend(run_label=run_label, root=root, progress=progress)
    if name == "docker":
        raise SandboxUnavailable(
            f"no Docker daemon answers at {engine.address()}"
            + (": one is there, takes connections and says nothing" if daemon == "silent" else ""),
            fix=f"{RESTART_DOCKER if daemon == 'silent' else START_DOCKER}  (or choose sandbox.backend=bubblewrap)",
        )
    problem = bubblewrap.works()
    if not problem:
        return BubblewrapBackend(run_label=run_label, root=root, progress=progress)
    if name == "bubblewrap":
        raise SandboxUnavailable(f"bubblewrap does not work here: {problem}", fix=INSTALL_BUBBLEWRAP)
    raise SandboxUnavailable(
        f"programs cannot be isolated here: no Docker daemon answers at {engine.address()}, and bubblewrap does not work: {problem}",
        fix=f"one of\n    {START_DOCKER}\n    {INSTALL_BUBBLEWRAP}",
    )


async def open_sandboxes(config: SandboxConfig, *, run_label: str, root: Path, progress: images.Progress = images.silent) -> WarmPool:
    """The sandboxes of a run: removes what dead drivers left, chooses the backend, and puts a warm pool in front of it."""
    backend = await asyncio.to_thread(select_backend, config.backend, run_label=run_label, root=root, progress=progress)
    try:
        await asyncio.to_thread(reaper.prune)
    except SandboxError as error:
        if backend.name == "docker":
            raise
        log.warning("what dead drivers left is not removed: %s", error)  # a daemon that this run does not use
    return WarmPool(backend, warm=config.warm, max_open=config.max_open, fill_timeout_s=config.open_timeout_s)
