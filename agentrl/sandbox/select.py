"""Selects the sandbox backend of a run, shipped or user-supplied. Programs never run directly on the host."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from agentrl.config.recipe import SandboxConfig
from agentrl.errors import SandboxError, SandboxUnavailable, UserError
from agentrl.plugins import parts
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.protocols.sandbox import OPEN_TIMEOUT_S
from agentrl.records import SandboxSpec
from agentrl.sandbox import bubblewrap, cleanup, docker_client, images
from agentrl.sandbox.bubblewrap import BubblewrapBackend
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.pool import WARM, WarmPool

log = logging.getLogger(__name__)

_LOCAL = ("auto", "docker", "bubblewrap")
_START_DOCKER = f"sudo apt-get install docker.io crun && sudo {sys.executable} -m agentrl.sandbox.daemon start"
_RESTART_DOCKER = "sudo systemctl restart docker, or stop that dockerd and start a new one"
_INSTALL_BUBBLEWRAP = "sudo apt-get install bubblewrap mmdebstrap"


def select_backend(
    name: str, *, run_label: str, root: Path, progress: images.Progress = images.no_progress
) -> DockerBackend | BubblewrapBackend:
    """Returns the shipped backend `name`. `auto` selects Docker if a local daemon responds, or else bubblewrap if it works.

    Blocks briefly and never starts a daemon. Raises `UserError` for an unknown name, and `SandboxUnavailable`, which contains the command
    that corrects the problem, if the backend does not work.

    Args:
        run_label: label of all sandboxes that the run opens.
        root: the folder that `SandboxSpec.image` is relative to.
    """
    if name not in _LOCAL:
        raise UserError(f"{name!r} is not a sandbox backend of this machine", fix=f"choose one of {', '.join(_LOCAL)}")
    daemon: docker_client.State = "absent"
    try:
        daemon = docker_client.daemon_state() if name in ("auto", "docker") else "absent"
        missing = f"no Docker daemon answers at {docker_client.daemon_address()}"
    except SandboxUnavailable as error:  # the daemon is on a different machine
        if name == "docker":
            raise
        missing = error.message
        log.warning("%s; trying bubblewrap", missing)
    if daemon == "answers":
        return DockerBackend(run_label=run_label, root=root, progress=progress)
    if name == "docker":
        silent = daemon == "silent"
        raise SandboxUnavailable(
            f"the Docker daemon at {docker_client.daemon_address()} accepts connections but does not answer" if silent else missing,
            fix=f"{_RESTART_DOCKER if silent else _START_DOCKER}  (or choose sandbox.backend=bubblewrap)",
        )
    problem = bubblewrap.unavailable_reason()
    if not problem:
        return BubblewrapBackend(run_label=run_label, root=root, progress=progress)
    if name == "bubblewrap":
        raise SandboxUnavailable(f"bubblewrap does not work on this machine: {problem}", fix=_INSTALL_BUBBLEWRAP)
    raise SandboxUnavailable(
        f"this machine has no working sandbox backend: {missing}, and bubblewrap does not work: {problem}",
        fix=f"run one of these commands:\n    {_START_DOCKER}\n    {_INSTALL_BUBBLEWRAP}",
    )


open_auto = functools.partial(select_backend, "auto")
open_docker = functools.partial(select_backend, "docker")
open_bubblewrap = functools.partial(select_backend, "bubblewrap")


def open_backend(config: SandboxConfig, *, run_label: str, root: Path) -> SandboxBackend:
    """Returns the backend that a recipe names. Raises `SandboxUnavailable` if a shipped backend does not work, `UserError` if its options
    are invalid, and `PluginError` if a user-supplied backend is invalid."""
    backend: SandboxBackend = parts.make_part(parts.BACKEND, config.backend, run_label=run_label, root=root)
    return backend


async def open_sandboxes(config: SandboxConfig, *, run_label: str, root: Path, warm: int = WARM, lazily: bool = False) -> SandboxBackend:
    """Opens the backend of a run, removes what dead drivers left behind, and returns a warm pool in front of the backend.

    The pool keeps at most `warm` sandboxes of a spec ready. Raises the errors of `open_backend`, and `SandboxError` if the backend is
    Docker and its daemon fails. If `lazily` is true, opens the backend, and raises these errors, only when the first image or sandbox is
    needed. Use this option for runs whose tasks may not need a sandbox.
    """
    if lazily:
        return LazySandboxes(functools.partial(open_sandboxes, config, run_label=run_label, root=root, warm=warm))
    opening = asyncio.create_task(asyncio.to_thread(open_backend, config, run_label=run_label, root=root))
    try:
        backend = await asyncio.shield(opening)  # a cancellation would not stop the thread, so its backend could not be closed
        await _prune(backend)
    except BaseException:
        await asyncio.shield(asyncio.create_task(_close(opening)))  # a second cancellation would end it
        raise
    return WarmPool(backend, warm=min(warm, config.max_open, getattr(backend, "most_warm", warm)), max_open=config.max_open)


async def _close(opening: asyncio.Task[SandboxBackend]) -> None:
    await (await opening).close()


async def _prune(backend: SandboxBackend) -> None:
    try:
        await asyncio.to_thread(cleanup.prune)
    except SandboxError as error:
        if backend.name == "docker":
            raise
        log.warning("cannot remove the sandboxes of dead drivers: %s", error)  # the problem is a daemon that this run does not use


class LazySandboxes:
    """A `SandboxBackend` that opens the real backend when the first image or sandbox is needed."""

    name = "none"

    def __init__(self, opening: Callable[[], Awaitable[SandboxBackend]]) -> None:
        self._opening, self._lock = opening, asyncio.Lock()
        self._backend: SandboxBackend | None = None
        self._closed = False

    async def _opened(self) -> SandboxBackend:
        async with self._lock:
            if self._closed:
                raise SandboxError("the sandboxes of this run are closed")
            if self._backend is None:
                backend = await self._opening()
                if self._closed:  # in the meantime, by a call of `close` that may have been cancelled
                    await backend.close()
                    raise SandboxError("the sandboxes of this run are closed")
                self._backend = backend
            return self._backend

    async def prepare(self, spec: SandboxSpec) -> None:
        """See `SandboxBackend.prepare`."""
        await (await self._opened()).prepare(spec)

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: bytes | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Sandbox:
        """See `SandboxBackend.open`."""
        return await (await self._opened()).open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)

    async def close(self) -> None:
        """See `SandboxBackend.close`. Waits if the backend is being opened."""
        self._closed = True
        async with self._lock:
            if self._backend is not None:
                await self._backend.close()
