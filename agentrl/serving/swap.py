"""Hot swap: loads a published version into the running server, and restores the old one unless a logprob probe agrees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ServingError, SwapError
from agentrl.files import sha256_file
from agentrl.records import ADAPTER, PolicyVersion, Probe, SwapReport
from agentrl.sampling import TIES, Sampling
from agentrl.serving.client import alternatives, distribution, in_support
from agentrl.serving.server import VLLMServer
from agentrl.weights import deltas

log = logging.getLogger(__name__)

FIRST = -(1 << 62)
"""Priority of a probe: before every completion (`agentrl.serving.client.priority`)."""


class HotSwap(ABC):
    """Base class of weight channels on one server; subclasses say how the weights travel.

    The engine pauses between two steps, loads, and resumes; requests in flight continue with the new weights, and their version
    spans record where. On any failure the last good version is restored; when that fails too, the server is condemned
    (`VLLMServer.alive` turns False).
    """

    def __init__(self, server: VLLMServer, *, registry_folder: Path) -> None:
        """`registry_folder`: the run's versions/ folder; versions from elsewhere are refused, here and in the server."""
        self._server = server
        self._registry_folder = registry_folder.resolve()
        self._serving_folder = server.model
        self._lock = asyncio.Lock()

    async def close(self) -> None:  # noqa: B027 - not abstract: a channel that holds something open overrides it
        """Nothing is held open."""

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        """Swaps `version` in. Raises `SwapError` when it is refused; its predecessor then keeps serving.

        A version is refused when its file does not match its record, when loading fails or takes longer than `timeout_s`, or
        when a probe logprob differs by more than `max_abs_diff` nats. Requests that sampled from refused weights fail with
        `ServingError`.
        """
        folder = folder.resolve()
        began = time.perf_counter()
        await asyncio.to_thread(check_version_folder, version, folder, self._registry_folder)
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_s):
                    stall_s = await self._exchange(version.number, folder)
                    diff = await self._disagreement(version.number, probe)
                if not diff <= max_abs_diff:
                    raise SwapError(
                        f"version {version.number}: server and learner differ by {diff:.3g} nats on the probe, {max_abs_diff:g} is allowed"
                    )
            except (ServingError, TimeoutError) as error:
                await self._restore(timeout_s)
                raise _refusal(version, error, timeout_s) from error
            except asyncio.CancelledError:
                await self._restore(timeout_s)
                raise
            self._server.weights.accept(version.number)
            self._serving_folder = folder
        return SwapReport(
            version=version.number,
            stall_ms=1000 * stall_s,
            total_ms=1000 * (time.perf_counter() - began),
            probe_max_abs_diff=diff,
        )

    async def _exchange(self, number: int, folder: Path) -> float:
        """Pauses, loads and resumes; returns the seconds for which requests stood still."""
        control = self._server.control
        stalled = time.perf_counter()
        await control.pause()
        await self._load(number, folder)
        self._server.weights.begin_probation(number)
        await control.resume()
        return time.perf_counter() - stalled

    @abstractmethod
    async def _load(self, number: int, folder: Path) -> None:
        """Loads one version into the paused server and names it."""

    @abstractmethod
    async def _reload(self, number: int, folder: Path) -> None:
        """Loads an earlier version into a paused server that may be in the middle of an update."""

    async def _restore(self, timeout_s: float) -> None:
        """Restores the last good version, or condemns the server."""
        weights, control = self._server.weights, self._server.control
        try:
            async with asyncio.timeout(timeout_s):
                # Requests that sampled from unproven weights are aborted; if none could have, those in flight just wait.
                await control.pause(abort=weights.on_probation is not None)
                weights.refuse()
                await self._reload(weights.number, self._serving_folder)
                await control.resume()
        except (ServingError, TimeoutError) as error:
            weights.refuse()
            self._server.condemn(f"version {weights.number} could not be restored: {error}")
            raise SwapError(
                f"the last good version {weights.number} could not be restored; the server must be restarted: {error}"
            ) from error

    async def _disagreement(self, number: int, probe: Probe) -> float:
        """Largest absolute difference (nats) between the server's and the learner's logprobs; inf when one is not finite."""
        answers = await asyncio.gather(*(self._row_answer(ids) for ids in probe.token_ids))
        differences: list[float] = []
        for answer, ids, ours in zip(answers, probe.token_ids, probe.logprobs, strict=True):
            theirs = parse_prompt_logprobs(answer, ids, number)
            differences += (abs(server - learner) for server, learner in zip(theirs, ours, strict=True))
        sampling = self._server.recipe.rollout.sampling
        for answer, next_ids, next_logprobs in zip(answers, probe.next_ids, probe.next_logprobs, strict=False):
            differences += next_differences(answer, dict(zip(next_ids, next_logprobs, strict=True)), sampling, number)
        return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)

    async def _row_answer(self, token_ids: tuple[int, ...]) -> Any:
        """The server's answer to a row: logprobs of its tokens, which vLLM takes at temperature 1 and without truncation (and without its
        prefix cache), and one token sampled after it as in rollouts, with the likeliest others."""
        sampling = self._server.recipe.rollout.sampling
        asked = {"prompt_logprobs": 0, "logprobs": _likeliest(sampling)}
        body = {
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, **distribution(sampling), **asked, "detokenize": False},
            "cache_salt": self._server.weights.cache_salt,
            "priority": FIRST,  # episodes wait for its verdict
        }
        return await self._server.control.generate(body, timeout_s=self._server.recipe.serving.request_timeout_s)


class FileWeightChannel(HotSwap):
    """A `WeightChannel` whose server maps version folders from the file system it shares with the learner."""

    def __init__(self, server: VLLMServer, *, registry_folder: Path) -> None:
        super().__init__(server, registry_folder=registry_folder)
        self._update_open = False  # an update was begun in the server and has not ended

    async def _load(self, number: int, folder: Path) -> None:
        """Loads one version into the paused server: its delta if that fits the server's weights, otherwise the whole file."""
        if (folder / deltas.WEIGHTS).exists() or not (folder / deltas.RECORD).exists():
            await self._update(number, folder, _file_sizes(folder))
            return
        try:
            await self._update(number, folder, {deltas.FRAMES: (folder / deltas.FRAMES).stat().st_size})
        except ServingError as error:
            log.warning("version %d is loaded whole, because its delta was refused: %s", number, error)
            await self._reload(number, folder)

    async def _reload(self, number: int, folder: Path) -> None:
        """Loads one whole version into a paused server that may be in the middle of an update."""
        if self._update_open:
            with contextlib.suppress(ServingError):  # raised when the server has already ended the update
                await self._server.control.finish_weight_update(None)
        try:
            await asyncio.to_thread(deltas.materialize, folder)
        except ValueError as error:
            raise SwapError(f"version {number}: {error}") from error
        await self._update(number, folder, _file_sizes(folder))

    async def _update(self, number: int, folder: Path, files: dict[str, int]) -> None:
        control = self._server.control
        self._update_open = True
        await control.start_weight_update()
        await control.update_weights({"folder": str(folder), "files": files})
        await control.finish_weight_update(number)
        self._update_open = False


def check_version_folder(version: PolicyVersion, folder: Path, registry_folder: Path) -> None:
    """Raises `SwapError` unless `folder` is in the registry and its weights have the hash in the version's record."""
    if folder == registry_folder or not folder.is_relative_to(registry_folder):
        raise SwapError(f"version {version.number}: {folder} is not below the run's versions folder {registry_folder}")
    try:
        whole = version.weights == ADAPTER or (folder / version.weights).exists()
        delta = None if whole else deltas.read(folder)
        path, expected = (folder / version.weights, version.sha256) if delta is None else (folder / deltas.FRAMES, delta.delta_sha256)
        actual = sha256_file(path)
    except (OSError, ValueError) as error:
        raise SwapError(f"version {version.number}: cannot read its weights in {folder}: {error}") from error
    if actual != expected or (delta is not None and delta.sha256 != version.sha256):
        raise SwapError(f"version {version.number}: {path} is not the file that was published (sha256 differs)")


def parse_prompt_logprobs(answer: Any, token_ids: tuple[int, ...], number: int) -> list[float]:
    """The logprobs of tokens 1..T-1 in vLLM's answer, proven to come from version `number`. Raises `SwapError`."""
    try:
        spans = answer["choices"][0]["weight_versions"]
        positions = answer["prompt_logprobs"]
        logprobs = [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], positions[1:], strict=True)]
        versions = {span["version"] for span in spans}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SwapError(f"version {number}: malformed answer to the logprob probe: {error!r}") from error
    if versions != {str(number)}:
        raise SwapError(f"the server answered the probe of version {number} with {sorted(versions)}")
    return logprobs


def next_differences(answer: Any, ours: Mapping[int, float], sampling: Sampling, number: int) -> list[float]:
    """How far server and learner are apart (nats) in what follows a row, at the rollouts' setting.

    The learner's distribution is restricted to the support that the server answers, as in training. A token of it that the learner
    did not list is at most as likely as the last one listed; only what the server puts above that is a difference.

    Args:
        answer: the server's, with one sampled token.
        ours: the learner's logprobs of the likeliest tokens, before truncation.
    """
    floor = min(ours.values(), default=0.0)
    try:
        (table,) = alternatives(answer)
        theirs = in_support(table, _likeliest(sampling)) if sampling.truncated else table
    except (ServingError, ValueError) as error:
        raise SwapError(f"version {number}: malformed answer to the logprob probe: {error}") from error
    total = _log_sum_exp([ours.get(token, floor) for token in theirs]) if sampling.truncated else 0.0
    gaps = {token: logprob - (ours.get(token, floor) - total) for token, logprob in theirs.items()}
    return [abs(gap) if token in ours else max(gap, 0.0) for token, gap in gaps.items()]


def _likeliest(sampling: Sampling) -> int:
    """How many logprobs the server is asked for after a row."""
    return sampling.top_k + TIES


def _log_sum_exp(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}


def _refusal(version: PolicyVersion, error: BaseException, timeout_s: float) -> SwapError:
    if isinstance(error, SwapError):
        return error
    reason = f"not done within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
    return SwapError(f"version {version.number} was not swapped in: {reason}")
