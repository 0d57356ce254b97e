"""Hot swap from GPU to GPU: the learner broadcasts over NCCL while the controller keeps the server paused.

Learner and controller meet at the server: the learner publishes its version and waits until the server is paused
(`agentrl.serving.trainer_client`); the controller pauses it and waits until the server reports the version's number.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.serving.swap import HotSwap

_POLL_S = 0.005


class NcclWeightChannel(HotSwap):
    """A `WeightChannel` for a server started with `serving.weight_transfer=nccl`. Restores old versions from their folders."""

    async def _load(self, number: int, folder: Path) -> None:
        while await self._server.control.version() != str(number):
            await asyncio.sleep(_POLL_S)  # the caller's deadline bounds the wait for the learner

    async def _reload(self, number: int, folder: Path) -> None:
        # The learner has no old weights to send. A server that is stuck in a broadcast does not answer and is replaced.
        await self._server.control.reload(str(folder), number)
