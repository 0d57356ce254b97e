"""The gate's own server of the policy: it keeps the version that is judged, while the policy's servers go on with newer ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.protocols import VersionRegistry
from agentrl.records import PolicyVersion
from agentrl.serving.supervisor import SupervisedServer

log = logging.getLogger(__name__)

NAME = "gate"
"""Of the server: its log is logs/server-gate.log."""


class GateServer:
    """A supervised vLLM server that takes in the versions it is given, and no others. `start` it before `serve`."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        registry: VersionRegistry,
        *,
        gpus: str | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`gpus`: CUDA_VISIBLE_DEVICES of the server; None: as in the driver. `alert`: as for `SupervisedServer`."""
        recipe = recipe.but({"serving.port": 0}) if recipe.serving.port else recipe  # that one is the policy's
        self._run_dir, self._registry = run_dir, registry
        self._version: PolicyVersion | None = None
        self.policy = SupervisedServer(recipe, run_dir, registry, gpus=gpus, name=NAME, newest=self._newest, alert=alert)

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts it with the weights of a version. Raises what `SupervisedServer.start` does."""
        self._version = version
        await self.policy.start(version, await_probe=await_probe)

    async def serve(self, version: PolicyVersion) -> None:
        """Returns once it serves this version. Raises `SwapError` where it refuses it, and `ServingError` where it does not come back."""
        self._version = version
        if (self.policy.version, self.policy.sha256) != (version.number, version.sha256):
            await self.policy.load_with_retries(version)

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts it when it dies, with the version that it was given last, or with version 0, whose weights always stay, where those are
        gone: then that one is not judged any more. Ends only by cancellation or `ServingError`."""
        await self.policy.watch(on_loss=on_loss)

    async def close(self) -> None:
        """Stops the server."""
        await self.policy.close()

    def _newest(self) -> PolicyVersion | None:
        given = self._version
        if given is None or given.number == 0:
            return given
        known = self._registry.get(given.number)
        there = known is not None and known.sha256 == given.sha256 and (self._run_dir / given.folder / "probe.json").exists()
        return given if there else self._registry.get(0)
