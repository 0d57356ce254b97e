"""Hot swap: loads a published version into the running server, and restores the old version unless the logprob probe agrees."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

from agentrl.base.files import sha256_file
from agentrl.errors import ServingError, SwapError
from agentrl.records import ADAPTER, PolicyVersion, Probe, SwapReport
from agentrl.serving.probe import max_logprob_difference
from agentrl.serving.server import VLLMServer
from agentrl.version import deltas

log = logging.getLogger(__name__)

_POLL_S = 0.005


class HotSwap(ABC):
    """Base class of weight channels to one server.

    The engine pauses between two steps, loads the weights and resumes. Requests in flight continue with the new weights, and their version
    spans record the change. On any failure, the last good version is restored. If that fails too, the server counts as dead
    (`VLLMServer.alive`).
    """

    def __init__(self, server: VLLMServer, *, registry_folder: Path) -> None:
        """`registry_folder`: the run's versions/ folder; the server and the channel reject versions from elsewhere."""
        self._server = server
        self._registry_folder = registry_folder.resolve()
        self._serving_folder = server.model
        self._lock = asyncio.Lock()

    async def close(self) -> None:  # noqa: B027 - optional
        """Closes nothing."""

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        """Swaps `version` in. If the version is rejected, raises `SwapError`, and its predecessor keeps serving.

        A version is rejected if its file does not match its record, if loading fails or takes longer than `timeout_s`, or if a probe
        logprob differs by more than `max_abs_diff` nats. Requests that sampled from rejected weights fail with `ServingError`.
        """
        folder = folder.resolve()
        start = time.perf_counter()
        await asyncio.to_thread(check_version_folder, version, folder, self._registry_folder)
        try:
            await self._server.stage(folder)  # while the server computes tokens
        except ServingError as error:
            raise SwapError(f"version {version.number} cannot be sent to the server's host: {error}") from error
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_s):
                    stall_s = await self._exchange(version.number, folder)
                    diff = await max_logprob_difference(self._server, version.number, probe)
                if not diff <= max_abs_diff:
                    raise SwapError(
                        f"version {version.number}: server and learner differ by {diff:.3g} nats on the probe; limit: {max_abs_diff:g}"
                    )
            except (ServingError, OSError, asyncio.CancelledError) as error:  # OSError: a file of the version is gone
                await self._restore(timeout_s)
                if isinstance(error, SwapError | asyncio.CancelledError):
                    raise
                reason = f"the swap did not finish within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                raise SwapError(f"version {version.number} was not swapped in: {reason}") from error
            self._server.weights.accept(version.number)
            self._serving_folder = folder
        return SwapReport(
            version=version.number, stall_ms=1000 * stall_s, total_ms=1000 * (time.perf_counter() - start), probe_max_abs_diff=diff
        )

    async def _exchange(self, number: int, folder: Path) -> float:
        """Pauses the server, loads the version and resumes the server. Returns the length of the pause in seconds."""
        control = self._server.control
        paused = time.perf_counter()
        await control.pause()
        await self._load(number, folder)
        self._server.weights.begin_probation(number)
        await control.resume()
        return time.perf_counter() - paused

    @abstractmethod
    async def _load(self, number: int, folder: Path) -> None:
        """Loads one version into the paused server and sets its number."""

    @abstractmethod
    async def _reload(self, number: int, folder: Path) -> None:
        """Loads an earlier version into a paused server whose update may be incomplete."""

    async def _restore(self, timeout_s: float) -> None:
        """Restores the last good version, or marks the server as dead."""
        weights, control = self._server.weights, self._server.control
        try:
            async with asyncio.timeout(timeout_s):
                # Requests that may have sampled from unverified weights are aborted; others wait.
                await control.pause(abort=weights.on_probation is not None)
                weights.refuse()
                await self._reload(weights.number, self._serving_folder)
                await control.resume()
        except (ServingError, OSError) as error:
            weights.refuse()
            self._server.mark_unsound(f"version {weights.number} could not be restored: {error}")
            raise SwapError(f"version {weights.number} could not be restored; the server must be restarted: {error}") from error
        except asyncio.CancelledError:
            weights.refuse()
            self._server.mark_unsound(f"version {weights.number} was not restored, because the swap was cancelled twice")
            raise


class FileWeightChannel(HotSwap):
    """A `WeightChannel` whose server memory-maps the files of versions in the run folder, or in a mirror of it on the server's host."""

    def __init__(self, server: VLLMServer, *, registry_folder: Path, store: str = "") -> None:
        """`store`: the object store from which the server's host fetches versions (`agentrl.cluster.object_store`)."""
        super().__init__(server, registry_folder=registry_folder)
        self._update_open = False  # whether a weight update was started but not finished

    async def _load(self, number: int, folder: Path) -> None:
        """Loads one version into the paused server: its delta if the delta applies to the server's weights, otherwise the complete file."""
        if (folder / deltas.WEIGHTS).exists() or not (folder / deltas.DELTA_RECORD).exists():
            await self._update(number, folder, _file_sizes(folder))
            return
        try:
            await self._update(number, folder, {deltas.DELTA_FILE: (folder / deltas.DELTA_FILE).stat().st_size})
        except ServingError as error:
            log.warning("the complete weights of version %d are loaded, because the server rejected its delta: %s", number, error)
            await self._reload(number, folder)

    async def _reload(self, number: int, folder: Path) -> None:
        """Loads one complete version into a paused server whose update may be incomplete."""
        if self._update_open:
            with contextlib.suppress(ServingError):  # the server may have finished the update
                await self._server.control.finish_weight_update(None)
        try:
            await asyncio.to_thread(deltas.materialize, folder)
        except ValueError as error:
            raise SwapError(f"version {number}: {error}") from error
        await self._server.stage(folder)  # the complete file may be new
        await self._update(number, folder, _file_sizes(folder))

    async def _update(self, number: int, folder: Path, files: dict[str, int]) -> None:
        control = self._server.control
        self._update_open = True
        await control.start_weight_update()
        await control.update_weights({"folder": self._server.host_path(folder), "files": files})
        await control.finish_weight_update(number)
        self._update_open = False


def check_version_folder(version: PolicyVersion, folder: Path, registry_folder: Path) -> None:
    """Raises `SwapError` unless `folder` is in the registry and its weights have the hash in the version's record."""
    if folder == registry_folder or not folder.is_relative_to(registry_folder):
        raise SwapError(f"version {version.number}: {folder} is not inside the run's versions folder {registry_folder}")
    try:
        whole = version.weights == ADAPTER or (folder / version.weights).exists()
        delta = None if whole else deltas.read_delta(folder)
        path, expected = (folder / version.weights, version.sha256) if delta is None else (folder / deltas.DELTA_FILE, delta.delta_sha256)
        actual = sha256_file(path)
    except (OSError, ValueError) as error:
        raise SwapError(f"version {version.number}: cannot read its weights in {folder}: {error}") from error
    if actual != expected or (delta is not None and delta.sha256 != version.sha256):
        raise SwapError(f"version {version.number}: {path} is not the published file (sha256 differs)")


def _file_sizes(folder: Path) -> dict[str, int]:
    if not (sizes := {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "*.safetensors"))
    return sizes


class NcclWeightChannel(HotSwap):
    """A `WeightChannel` for a server started with `serving.weight_transfer=nccl`. Restores old versions from their folders."""

    async def _load(self, number: int, folder: Path) -> None:
        while await self._server.control.version() != str(number):
            await asyncio.sleep(_POLL_S)  # the caller's deadline bounds the wait for the learner

    async def _reload(self, number: int, folder: Path) -> None:
        # The learner has no old weights to send. A server that is stuck in a broadcast does not respond and is replaced.
        await self._server.stage(folder)
        await self._server.control.reload(self._server.host_path(folder), number)
