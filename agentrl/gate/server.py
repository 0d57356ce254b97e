"""The gate's server of the policy (`gate.server=own`).

It keeps the version under evaluation, while the policy's servers continue with newer versions.
"""

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
"""Name of the server; its log is logs/server-gate.log."""


class GateServer:
    """A supervised vLLM server that serves the requested versions only. Call `start` before `serve`."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        registry: VersionRegistry,
        *,
        gpus: str | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`gpus`: CUDA_VISIBLE_DEVICES of the server; None inherits the driver's. `alert`: as for `SupervisedServer`."""
        self._run_dir, self._registry = run_dir, registry
        self._version: PolicyVersion | None = None
        self.policy = SupervisedServer(recipe, run_dir, registry, gpus=gpus, name=NAME, newest=self._newest, alert=alert)

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts it with the weights of a version. Raises as `SupervisedServer.start` does."""
        self._version = version
        await self.policy.start(version, await_probe=await_probe)

    async def serve(self, version: PolicyVersion) -> None:
        """Returns when it serves this version. Raises `SwapError` if it rejects it, and `ServingError` if it does not come back."""
        self._version = version
        if (self.policy.version, self.policy.sha256) != (version.number, version.sha256):
            await self.policy.load_with_retries(version)

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts it with the latest requested version when it dies, or with version 0 if that version's weights are gone.

        Ends only by cancellation or `ServingError`.
        """
        await self.policy.watch(on_loss=on_loss)

    async def close(self) -> None:
        """Stops the server."""
        await self.policy.close()

    def _newest(self) -> PolicyVersion | None:
        version = self._version
        if version is None or version.number == 0:
            return version
        known = self._registry.get(version.number)
        exists = known is not None and known.sha256 == version.sha256 and (self._run_dir / version.folder / "probe.json").exists()
        return version if exists else self._registry.get(0)
