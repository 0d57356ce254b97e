"""The policy as rollouts see it, always available: behind it the server may die, be restarted and get new weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentrl import codec, parts
from agentrl.errors import ServingError, StoreError, SwapError
from agentrl.protocols import CacheUse, VersionRegistry, WeightChannel
from agentrl.recipe import Recipe, ServingConfig
from agentrl.records import WHOLE_MODEL, Completion, PolicyVersion, Probe, SamplingParams, SwapReport, VersionState
from agentrl.serving import TokenClient, UnsentError, VLLMServer
from agentrl.weights import deltas
from agentrl.weights.announcement import announce, withdraw

log = logging.getLogger(__name__)

_RESTARTS = 5
_SWAP_TRIES = 3
_WATCH_S = 0.5
_USE_EVERY = 4  # looks of `watch`: a server writes some hundred metrics each time it is asked
_KV_CACHE_USE = "vllm:kv_cache_usage_perc"


class ServedPolicy:
    """A `PolicyServer` on a supervised vLLM server: requests wait at a gate while the server is restarted.

    `version` is the number of the serving version. After `_RESTARTS` restarts in a run it raises `ServingError`.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, registry: VersionRegistry, *, gpus: str | None = None) -> None:
        """`gpus`: CUDA_VISIBLE_DEVICES of the server; None: as in the driver."""
        self.version = -1
        self.sha256 = ""  # of its weights: the learner may resume from a checkpoint and publish the same number again
        self.restarts = 0
        self.cache_use: CacheUse | None = None
        self._recipe, self._run_dir, self._registry, self._gpus = recipe, run_dir, registry, gpus
        self._nccl = recipe.serving.weight_transfer == "nccl"
        self._server: VLLMServer | None = None
        self._client: TokenClient | None = None
        self._channel: WeightChannel | None = None
        self._ready = asyncio.Event()
        self._changed = asyncio.Condition()
        self._busy = asyncio.Lock()  # a swap and a restart never overlap

    async def start(self, version: PolicyVersion) -> None:
        """Starts a server with the weights of `version`, then lets requests through.

        An adapter is swapped into a server started with version 0; raises `SwapError` when it is refused.
        """
        base = version if version.weights == WHOLE_MODEL else self._registry.get(0)
        assert base is not None, "version 0 was registered"
        model = self._run_dir / base.folder
        try:
            await asyncio.to_thread(deltas.materialize, model)
        except ValueError as error:
            raise ServingError(f"version {base.number} cannot be served: {error}") from error
        server = VLLMServer(recipe=self._recipe, model=model, version=base.number, run_dir=self._run_dir, gpus=self._gpus)
        self._server = server
        await server.start()
        self._client = TokenClient.for_server(server)
        self._channel = open_channel(self._recipe.serving, server, registry_folder=self._run_dir / "versions")
        if base is not version:
            await self._swap_in_adapter(self._channel, version)
        announce(self._run_dir, server.url)
        await self._set_version(version)
        self._ready.set()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        while True:
            server = await self._opened_server()
            client = self._client
            assert client is not None, "requests pass only after start()"
            try:
                return await client.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
            except UnsentError:
                if client is self._client and await server.alive():
                    raise
                await self._replaced(server)  # it has received nothing, so its successor gets the request

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Swaps a published version into the running server; the old one keeps serving unless the probe agrees.

        When the server dies meanwhile, the swap is retried with its successor. Raises `SwapError` after three tries on live
        servers, and `ServingError` when no server comes back.
        """
        folder = self._run_dir / version.folder
        probe = codec.from_json(Probe, (folder / "probe.json").read_bytes())
        tries = 0
        while True:
            server = await self._opened_server()
            try:
                report = await self._swap_once(version, folder, probe)
            except SwapError as error:
                if not await server.alive():
                    log.warning("swap to version %d waits for the next server: %s", version.number, error)
                    await self._replaced(server)
                    continue
                tries += 1
                log.warning("swap to version %d, try %d: %s", version.number, tries, error)
                if tries == _SWAP_TRIES:
                    raise
                continue
            self._mark_serving(version)
            await self._set_version(version)
            return report

    async def fall_back(self, version: PolicyVersion) -> None:
        """Serves `version`, published earlier, instead of one that the learner has retracted."""
        if (self._run_dir / version.folder / "probe.json").exists():
            await self.swap(version)
            return
        self._ready.clear()  # version 0 has no probe: a server is started with it instead
        async with self._busy:
            await self._stop()
            await self.start(version)
        self._mark_serving(version)

    def _mark_serving(self, version: PolicyVersion) -> None:
        try:
            self._registry.set_state(version.number, VersionState.SERVING)
        except StoreError:
            record = self._registry.get(version.number)
            if record is not None and record.sha256 == version.sha256 and record.state is not VersionState.ROLLED_BACK:
                raise
            log.warning("version %d was retracted while it was swapped in", version.number)  # its successor is on its way

    async def _swap_once(self, version: PolicyVersion, folder: Path, probe: Probe) -> SwapReport:
        async with self._busy:
            if self._channel is None:
                raise ServingError("no server to swap weights into")
            return await self._channel.swap(
                version,
                folder,
                probe,
                max_abs_diff=self._recipe.serving.probe_max_abs_diff,
                timeout_s=self._recipe.serving.request_timeout_s,
            )

    async def _opened_server(self) -> VLLMServer:
        """The server, once requests may pass. Raises `ServingError` when it does not come back in time."""
        try:
            async with asyncio.timeout(self._recipe.serving.startup_timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise ServingError("the inference server did not come back") from None
        assert self._server is not None, "requests pass only after start()"
        return self._server

    async def _replaced(self, server: VLLMServer) -> None:
        """Returns once `watch` has begun to replace `server`, or `server` turns out to be alive."""
        try:
            async with asyncio.timeout(self._recipe.serving.startup_timeout_s):
                while self._server is server and self._ready.is_set() and not await server.alive():
                    await asyncio.sleep(_WATCH_S)
        except TimeoutError:
            raise ServingError("the inference server died and was not replaced") from None

    async def wait_version(self, number: int) -> None:
        """Returns once version `number` or a newer one is serving."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= number)

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts the server when it dies, with the newest version that served; ends only by cancellation or `ServingError`.

        `on_loss` is called with NCCL, where the learner may be stuck in a transfer to the dead server.
        """
        for reading in itertools.count():
            await asyncio.sleep(_WATCH_S)
            if (server := self._server) is None:
                continue
            if await server.alive():
                if reading % _USE_EVERY == 0 and self._recipe.rollout.max_cache_use < 1:
                    self.cache_use = await _cache_use(server, reading)
                continue
            self.cache_use = None
            if self._server is not server or not self._ready.is_set():
                continue  # `fall_back` has stopped it, and starts another
            self._ready.clear()
            async with self._busy:
                self.restarts += 1
                if self.restarts > _RESTARTS:
                    raise ServingError(f"the inference server died {self.restarts} times; see logs/server.log")
                log.warning("the inference server died; restart %d of at most %d", self.restarts, _RESTARTS)
                await self._stop()
                if self._nccl:
                    await on_loss()
                version = to_serve(self._registry)
                if version is None:
                    raise ServingError("no policy version to serve")
                await self.start(version)

    async def close(self) -> None:
        self._ready.clear()
        await self._stop()

    async def _swap_in_adapter(self, channel: WeightChannel, version: PolicyVersion) -> None:
        folder, serving = self._run_dir / version.folder, self._recipe.serving
        probe = codec.from_json(Probe, (folder / "probe.json").read_bytes())
        await channel.swap(version, folder, probe, max_abs_diff=serving.probe_max_abs_diff, timeout_s=serving.request_timeout_s)

    async def _stop(self) -> None:
        self._ready.clear()  # a restart may have let requests through while `fall_back` waited for it
        withdraw(self._run_dir)
        cut_off, self._channel, self._client = (self._channel, self._client), None, None  # so that requests see that it has gone
        for part in cut_off:
            if part is not None:
                await part.close()
        if self._server is not None:
            await self._server.stop()
        self._server = None

    async def _set_version(self, version: PolicyVersion) -> None:
        async with self._changed:
            self.version, self.sha256 = version.number, version.sha256
            self._changed.notify_all()


async def _cache_use(server: VLLMServer, reading: int) -> CacheUse | None:
    """None where the server does not tell: then nothing is held back for it."""
    try:
        share = (await server.control.metrics()).get(_KV_CACHE_USE)
    except ServingError:  # it may be about to die, which `watch` sees by itself
        return None
    return None if share is None or not 0 <= share <= 1 else CacheUse(reading=reading, share=share)


def open_channel(config: ServingConfig, server: VLLMServer, *, registry_folder: Path) -> WeightChannel:
    """The weight channel that a recipe names, on one server. Raises `PluginError`."""
    made: WeightChannel = parts.make(
        parts.CHANNEL, config.weight_transfer, config.weight_transfer_options, server, registry_folder=registry_folder
    )
    return made


def to_serve(registry: VersionRegistry) -> PolicyVersion | None:
    """The version that a server should answer with; after the serving one was rolled back, the newest that was not."""
    return registry.latest(VersionState.SERVING, VersionState.PROMOTED) or registry.latest(VersionState.CANDIDATE, VersionState.SERVED)
