"""A supervised vLLM server: rollouts see one policy, although its server may die, restart and load new weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from agentrl.base.liveness import RestartAlert, Restarts
from agentrl.cluster.device import serves_on_gpu
from agentrl.config.recipe import Recipe, ServingConfig
from agentrl.errors import RequestRefused, ServerDied, ServingError, StoreError, SwapError
from agentrl.plugins import parts
from agentrl.protocols import CacheUse, Launcher, VersionRegistry, WeightChannel
from agentrl.records import WHOLE_MODEL, Completion, PolicyVersion, Probe, SamplingParams, SwapReport, VersionState
from agentrl.serving import TokenClient, UnsentError, VLLMServer
from agentrl.serving.access import announce_server, withdraw_server
from agentrl.serving.probe import PROBE_FILE, max_logprob_difference, probe_limit, read_probe
from agentrl.serving.server import server_log_name, server_title
from agentrl.version import deltas

log = logging.getLogger(__name__)

_RESTARTS = 5  # maximum number in a row
_SWAP_TRIES = 3
_WATCH_S = 0.5
_USE_EVERY = 4  # checks of `watch` between two readings of the cache use
_Taken = TypeVar("_Taken")
_KV_CACHE_USE, _WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"


class ServerLost(SwapError):
    """The server died during a swap."""


@asynccontextmanager
async def in_time(seconds: float, problem: str) -> AsyncIterator[asyncio.Timeout]:
    """Context manager that raises `ServerDied` with `problem` if the block exceeds `seconds`, or the deadline that the block sets."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield deadline
    except TimeoutError:
        raise ServerDied(problem) from None


class SupervisedServer:
    """A `PolicyServer` on a supervised vLLM server. Requests wait while the server restarts.

    `version` is the number of the serving version. After `_RESTARTS` restarts in a row, `watch` raises `ServingError`. `ServerPool` uses
    several of these servers and does not wait for a dead server's successor. `ServerPool` calls `accepts_requests`, `try_generate`,
    `load_version` and `load_or_restart`.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        registry: VersionRegistry,
        *,
        name: str = "",
        newest: Callable[[], Awaitable[PolicyVersion | None]] | None = None,
        launcher: Launcher | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`name`, `launcher`: as for `VLLMServer`; with NCCL, the address of an unnamed server is announced to the learner.
        `newest`: returns the version that a restarted server loads; None uses `version_to_serve`. `alert`: called with a message for the
        user when a server is restarted.
        """
        self.version = -1
        self.sha256 = ""  # hash of the serving weights, because a resumed learner may publish a number again
        self._restarts = Restarts()
        self.cache_use: CacheUse | None = None
        self._recipe, self._run_dir, self._registry = recipe, run_dir, registry
        self._name, self._newest, self._alert = name, newest or partial(asyncio.to_thread, version_to_serve, registry), alert
        self.title, self._launcher = server_title(name), launcher
        self._nccl = recipe.serving.weight_transfer.ref == "nccl"
        self._server: VLLMServer | None = None
        self._gone: VLLMServer | None = None  # the server, after a check showed that it is dead
        self._client: TokenClient | None = None
        self._channel: WeightChannel | None = None
        self._ready = asyncio.Event()
        self._changed = asyncio.Condition()
        self._busy = asyncio.Lock()  # held by a swap or a restart

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts a server with the weights of `version`, and admits requests when the probe agrees.

        If version 0 is a copy of a model that no run produced, it has no probe, and is served without a comparison. An adapter is swapped
        into a server that was started with version 0. If `await_probe` is True, waits until the learner, which is starting, has
        written the probe of version 0.

        Raises the errors of `VLLMServer.start`, `ServingError` also if the weights cannot be built or the probe disagrees, `SwapError` if
        the adapter is rejected, and `PluginError` if the weight channel cannot be loaded.
        """
        base = version if version.weights == WHOLE_MODEL else await asyncio.to_thread(self._registry.get, 0)
        assert base is not None, "version 0 was registered"
        model = self._run_dir / base.folder
        try:
            await asyncio.to_thread(deltas.materialize, model)
        except ValueError as error:
            raise ServingError(f"version {base.number} cannot be served: {error}") from error
        server = VLLMServer(
            recipe=self._recipe, model=model, version=base.number, run_dir=self._run_dir, name=self._name, launcher=self._launcher
        )
        self._server = server
        await server.start()
        self._client = TokenClient.for_server(server)
        self._channel = open_channel(self._recipe.serving, server, registry_folder=self._run_dir / "versions")
        await self._prove(server, base, await_probe=await_probe)
        if base is not version:
            await self._exchange(self._channel, version, self._probe_of(version))
        if self._nccl and not self._name:
            announce_server(self._run_dir, server.url, key=server.key)
        await self._set_version(version)
        self._ready.set()

    def episode(self, episode_id: str, task_key: str) -> AbstractContextManager[object]:
        """Does nothing, because a single server receives all requests."""
        return nullcontext()

    def figures(self) -> dict[str, float]:
        """Returns the number of requests that were waiting in the server at the newest reading; empty if there is no reading."""
        return {} if self.cache_use is None else {"requests_waiting": self.cache_use.waiting}

    @property
    def restarts(self) -> int:
        """The number of restarts so far."""
        return self._restarts.total

    @property
    def token_s(self) -> float:
        """Seconds per sampled token; 0 if no server is running."""
        return 0.0 if self._server is None else self._server.token_s

    @property
    def accepts_requests(self) -> bool:
        """Whether the server accepts requests now, as far as is known."""
        return self._ready.is_set() and self._server is not None and self._server is not self._gone

    @property
    def loading(self) -> bool:
        """Whether a version is being loaded."""
        return self._busy.locked()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Samples one completion; see `TokenClient.generate`. A request that a dying server never received is sent to its successor."""
        while True:
            server = await self._opened_server()
            completion = await self.try_generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
            if completion is not None:
                return completion
            await self._replaced(server)

    async def try_generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Completion | None:
        """Samples one completion from the current server. Returns None if no server is running, or if the server died before it received
        the request.

        Raises `ServerDied` if the server dies after it received the request, and `ServingError` for other failures.
        """
        client = self._client
        if client is None:
            return None
        try:
            return await client.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        except UnsentError:
            if client is self._client and not await self.check_died():
                raise
            return None
        except RequestRefused:
            raise
        except ServingError as error:
            if client is self._client and not await self.check_died():
                raise
            raise ServerDied(f"{self.title} died: {error}") from error

    async def check_died(self) -> bool:
        """Whether the server is dead. If it is dead, `accepts_requests` is False until a successor serves."""
        server = self._server
        if server is not None and await server.alive():
            return False
        self._gone = server
        return True

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Swaps a published version into the running server. The old version keeps serving unless the probe agrees.

        If the server dies meanwhile, the swap is repeated on its successor. Raises `SwapError` after three attempts on live servers, and
        `ServingError` if no successor becomes ready.
        """
        report = await self._with_successor(self._swap, version)
        await asyncio.to_thread(mark_serving, self._registry, version)
        await self._set_version(version)
        return report

    async def fall_back(self, version: PolicyVersion) -> None:
        """Swaps in the earlier version `version`, or restarts the server with it, after the learner retracted the serving version or the
        gate rejected it."""
        if self._can_swap(version):
            await self.swap(version)
            return
        await self._start_with(version)
        await asyncio.to_thread(mark_serving, self._registry, version)

    async def load_version(self, version: PolicyVersion) -> SwapReport:
        """Swaps a version into the current server without recording it in the registry.

        Raises `ServerLost` if the server dies meanwhile, and `SwapError` if the server rejects the version three times.
        """
        report = await self._swap(version)
        await self._set_version(version)
        return report

    async def load_or_restart(self, version: PolicyVersion) -> SwapReport | None:
        """Swaps a version in as `load_version` does. If the version cannot be swapped in, restarts the server with the version and returns
        None."""
        if self._can_swap(version):
            return await self.load_version(version)
        await self._start_with(version)
        return None

    async def load_with_retries(self, version: PolicyVersion) -> None:
        """Loads a version as `load_or_restart` does, and continues with the server's successor if the server dies meanwhile.

        Raises `SwapError` after three attempts on live servers, and `ServingError` if no successor becomes ready.
        """
        await self._with_successor(self.load_or_restart, version)

    def request_replacement(self, reason: str) -> None:
        """Makes `watch` replace the server, if one is running."""
        if self._server is not None:
            self._server.mark_unsound(reason)
            self._gone = self._server

    def _can_swap(self, version: PolicyVersion) -> bool:
        """Whether the version can be swapped in: it has a probe, and with NCCL it is not version 0."""
        return (version.number > 0 or not self._nccl) and (self._run_dir / version.folder / PROBE_FILE).exists()

    async def _start_with(self, version: PolicyVersion) -> None:
        self._ready.clear()
        async with self._busy:
            await self._stop()
            await self.start(version)

    async def _with_successor(self, take: Callable[[PolicyVersion], Awaitable[_Taken]], version: PolicyVersion) -> _Taken:
        """Calls `take`. If the server dies meanwhile, calls `take` again for the server's successor."""
        while True:
            server = await self._opened_server()
            try:
                return await take(version)
            except ServerLost as error:
                log.warning("%s: version %d waits for the next server: %s", self.title, version.number, error)
                await self._replaced(server)

    async def _swap(self, version: PolicyVersion) -> SwapReport:
        probe = self._probe_of(version)
        for attempt in itertools.count(1):
            try:
                async with self._busy:
                    if self._channel is None:
                        raise ServerLost(f"{self.title} is stopped, so no weights can be swapped in")
                    report = await self._exchange(self._channel, version, probe)
                    self._restarts.completed()
                    return report
            except SwapError as error:
                if await self.check_died():
                    raise ServerLost(str(error)) from error
                log.warning("swap to version %d, attempt %d: %s", version.number, attempt, error)
                if attempt == _SWAP_TRIES:
                    raise
        raise AssertionError("unreachable")

    def _probe_of(self, version: PolicyVersion) -> Probe:
        folder = self._run_dir / version.folder
        if (probe := read_probe(folder)) is None:
            raise SwapError(f"version {version.number} has no {PROBE_FILE} in {folder}: the version was retracted")
        return probe

    async def _exchange(self, channel: WeightChannel, version: PolicyVersion, probe: Probe) -> SwapReport:
        folder, serving = self._run_dir / version.folder, self._recipe.serving
        return await channel.swap(version, folder, probe, max_abs_diff=self._probe_limit, timeout_s=serving.request_timeout_s)

    async def _opened_server(self) -> VLLMServer:
        """Waits until the server accepts requests, and returns it. Raises `ServingError` if the server does not become
        ready in time."""
        async with in_time(self._recipe.serving.startup_timeout_s, "the inference server did not become ready again"):
            await self._ready.wait()
        assert self._server is not None, "requests pass only after start()"
        return self._server

    async def _replaced(self, server: VLLMServer) -> None:
        """Returns when `watch` has started to replace `server`, or when `server` is found to be alive."""
        async with in_time(self._recipe.serving.startup_timeout_s, "the inference server died and was not replaced"):
            while self._server is server and self._ready.is_set() and not await server.alive():
                await asyncio.sleep(_WATCH_S)

    async def wait_version(self, number: int) -> None:
        """Returns when version `number` or a newer one is serving."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= number)

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts the server when it dies, with the version that `newest` returns. Runs until it is cancelled. If a restart fails, raises
        `ServingError` or another error of `start`.

        With NCCL, `on_loss` is called, because the learner may be stuck in a transfer to the dead server.
        """
        for reading in itertools.count():
            await asyncio.sleep(_WATCH_S)
            if (server := self._server) is None:
                continue
            if await server.alive():
                self._gone = None
                self._restarts.progress()
                if reading % _USE_EVERY == 0:
                    self.cache_use = await _cache_use(server, reading)
                continue
            self.cache_use = None
            if self._server is not server or not self._ready.is_set():
                continue  # `fall_back` is restarting it
            self._ready.clear()
            server.kill()  # ends a swap that waits for a silent server, which releases the lock
            async with self._busy:
                await self._replace(server.end_reason, on_loss)

    async def _replace(self, reason: str, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Starts the server's successor. Retries if the successor is killed while it starts. Raises `ServingError` if the successor cannot
        start."""
        while True:
            failures = self._restarts.failed()
            if failures > _RESTARTS:
                raise ServingError(f"{self.title} died {failures} times in a row; see logs/{server_log_name(self._name)}")
            why = f"{self.title} is replaced: {reason}; restart {failures} of at most {_RESTARTS} in a row"
            self._alert(RestartAlert("server", why))
            await self._stop()
            if self._nccl:
                await on_loss()
            version = await self._newest()
            if version is None:
                raise ServingError("there is no policy version to serve")
            try:
                await self.start(version)
            except ServingError:
                if self._server is None or not await self._server.was_killed():
                    raise
                reason = "it was killed while it started"
                await asyncio.sleep(_WATCH_S * 2**failures)
                continue
            self._restarts.started()
            return

    async def close(self) -> None:
        """Stops the server."""
        self._ready.clear()
        await self._stop()

    async def _prove(self, server: VLLMServer, version: PolicyVersion, *, await_probe: bool) -> None:
        """Compares a new server's logprobs with the probe of its version. Raises `ServingError` if the logprobs disagree."""
        folder, serving = self._run_dir / version.folder, self._recipe.serving
        until = asyncio.get_running_loop().time() + serving.startup_timeout_s
        while (probe := read_probe(folder)) is None and await_probe:
            if asyncio.get_running_loop().time() > until:
                raise ServingError(
                    f"version {version.number} has no {PROBE_FILE} after {serving.startup_timeout_s:g} s: "
                    "the learner writes it after it loads the model\n  fix: see logs/learner.log, or raise serving.startup_timeout_s"
                )
            await asyncio.sleep(_WATCH_S)
        if probe is None:
            return
        try:
            async with asyncio.timeout(serving.request_timeout_s):
                diff = await max_logprob_difference(server, version.number, probe)
        except TimeoutError:
            raise ServingError(f"{self.title} returned no logprobs within {serving.request_timeout_s:g} s of its start") from None
        if not diff <= self._probe_limit:
            raise ServingError(
                f"{self.title} started with version {version.number}, but its logprobs differ by {diff:.3g} nats from"
                f" {folder / PROBE_FILE}; the limit is {self._probe_limit:g} (serving.probe_max_abs_diff)\n  fix: restore the"
                " published weights, or set policy.dtype to the learner's"
            )

    @property
    def _probe_limit(self) -> float:
        chosen = self._recipe.serving.probe_max_abs_diff
        return probe_limit(self._recipe.policy.dtype, gpu=serves_on_gpu(self._recipe)) if chosen is None else chosen

    async def _stop(self) -> None:
        self._ready.clear()  # a restart may have admitted requests while `fall_back` waited for it
        if not self._name:
            withdraw_server(self._run_dir)
        closing, self._channel, self._client = (self._channel, self._client), None, None  # requests then detect that it is gone
        for part in closing:
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
    """Returns the share of the KV cache in use, or None if the server does not report it."""
    try:
        read = await server.control.metrics()
    except ServingError:  # `watch` detects a dead server
        return None
    share, waiting = read.get(_KV_CACHE_USE), read.get(_WAITING, 0.0)
    return None if share is None or not 0 <= share <= 1 else CacheUse(reading=reading, shares=(share,), waiting=waiting)


def open_channel(config: ServingConfig, server: VLLMServer, *, registry_folder: Path) -> WeightChannel:
    """Returns the recipe's weight channel for one server. Raises `PluginError` if the channel cannot be loaded."""
    channel: WeightChannel = parts.make_part(parts.CHANNEL, config.weight_transfer, server, registry_folder=registry_folder)
    return channel


def mark_serving(registry: VersionRegistry, version: PolicyVersion) -> None:
    """Records that `version` is serving, unless it has been retracted meanwhile. Raises `StoreError` if the state cannot be recorded."""
    try:
        registry.set_state(version.number, VersionState.SERVING)
    except StoreError:
        record = registry.get(version.number)
        if record is not None and record.sha256 == version.sha256 and record.state is not VersionState.ROLLED_BACK:
            raise
        log.warning("version %d was retracted during its swap", version.number)


def version_to_serve(registry: VersionRegistry) -> PolicyVersion | None:
    """Returns the version that a server should load: the newest serving or promoted version, else the newest version that was not rolled
    back.

    A promoted version takes precedence over a newer version that no gate has judged. Returns None if there is no such version.
    """
    return registry.latest(VersionState.SERVING, VersionState.PROMOTED) or registry.latest(VersionState.CANDIDATE, VersionState.SERVED)
