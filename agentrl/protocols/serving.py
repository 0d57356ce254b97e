"""The protocols for the policy, its server, and the channel that transfers new weights to the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.records import Completion, PolicyVersion, Probe, SamplingParams, SwapReport


class Policy(Protocol):
    """Samples completions from token ids: an inference server, or a scripted policy in tests."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Samples one completion from the distribution that `params` describes, with logprobs under that distribution.

        After `timeout_s`, the policy returns the tokens sampled until then, with the finish reason `CUT`. A policy that cannot return early
        ignores `timeout_s`. The call to such a policy is cancelled when the episode's time runs out, and the tokens of the request are
        lost. If `params.supports` is true, the completion must include the support of every token. `request_id` consists of the episode's
        id, a hyphen and a number. Raises `ServingError` if the server fails.
        """


MAX_CACHE_USE = 0.9
"""Share of the KV cache in use above which no further episode starts. The rest is for the next turns of the episodes in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """The use of the KV caches of a policy's servers."""

    reading: int  # number of the reading; it increases with each new reading
    waiting: float = 0.0  # number of requests that wait in the servers for a free slot or cache blocks
    shares: tuple[float, ...]  # [servers] share of cache blocks that running requests hold, 0 to 1; cached prefixes count as free


class PolicyServer(Policy, Protocol):
    """A policy whose weights change while it serves requests. Requests wait while a server or its weights are being replaced."""

    @property
    def version(self) -> int:
        """Number of the version that serves requests; -1 before the first version."""

    @property
    def sha256(self) -> str:
        """Hash of the weights that serve requests. The version number does not identify the weights, because a learner that has returned to
        a checkpoint reuses version numbers."""

    @property
    def cache_use(self) -> CacheUse | None:
        """The newest reading of the KV cache use, at most a few seconds old; None before the first reading."""

    @property
    def accepts_requests(self) -> bool:
        """Whether requests are currently sent to the server, according to the newest known state."""

    @property
    def loading(self) -> bool:
        """Whether a version is being loaded."""

    @property
    def token_s(self) -> float:
        """Seconds per sampled token for a single request, measured at the start of the server; 0 if unknown."""

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts serving. Returns when the server serves `version` and its logprobs agree with the probe. `await_probe`: whether to wait
        until the learner has written the probe of version 0."""

    def episode(self, episode_id: str, task_key: str) -> AbstractContextManager[object]:
        """Returns a context manager for an episode. The context allows attempts at the same task, which share a prompt, to use the same
        server."""

    def figures(self) -> dict[str, float]:
        """Returns metrics of the servers: the number of waiting requests, and the load of each server if there are several."""

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Loads a published version. If the server's logprobs disagree with the probe, the previous version continues to serve. Raises
        `SwapError` if the logprobs disagree, and `ServingError` if the server fails."""

    async def fall_back(self, version: PolicyVersion) -> None:
        """Returns to `version`, which was published earlier. Called if the learner retracted or the gate rejected the serving version."""

    async def wait_version(self, number: int) -> None:
        """Waits until version `number` or a newer version serves requests."""

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Restarts servers that die, until cancelled. Raises `ServingError`, or an `ExceptionGroup` with it, if no server can be
        restarted. `on_loss` is called if the loss of a server may block the learner."""

    async def close(self) -> None:
        """Stops all servers."""


class WeightChannel(Protocol):
    """Loads published versions into a running server.

    The factory of a channel receives the server (`agentrl.serving.VLLMServer`) and `registry_folder`, the folder with the versions. A new
    channel is created for each server that is started. The server is started for the file channel unless the recipe selects nccl.
    """

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        """Loads `version` and compares the server's logprobs with those in the probe. Raises `SwapError` if the logprobs disagree."""

    async def close(self) -> None:
        """Releases the channel's resources. Does not stop the server."""
