"""The policy, the server it runs on, and the channel that brings new weights."""

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
        """Raises `ServingError` when the server fails; never gives an empty completion without a finish reason.

        After `timeout_s` it returns the tokens that were sampled until then, perhaps none, with the finish reason `CUT`. A policy that
        cannot do so ignores `timeout_s`, and is cancelled at the end of the episode's time; the tokens of that request are lost then.

        The tokens are drawn from the distribution that `params` describe, and their logprobs are of it; with `params.supports` the
        completion has the support of every token, or its episode fails. `request_id` is the id of the episode, a hyphen and a number.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How full the key/value caches of a policy's servers are."""

    reading: int  # counts up: another number is another reading
    shares: tuple[float, ...]  # of each cache's blocks that running requests hold, 0 to 1; prefixes that are only kept count as free


class PolicyServer(Policy, Protocol):
    """A policy whose weights change while it answers: what a run needs of serving.

    Requests wait while what serves is being replaced; callers of `generate` never hear of it.
    """

    @property
    def version(self) -> int:
        """Number of the version that answers now; -1 before the first."""

    @property
    def sha256(self) -> str:
        """Of its weights: a learner that went back to a checkpoint makes the same number again."""

    @property
    def cache_use(self) -> CacheUse | None:
        """The newest reading, some seconds old at most; None while there is none."""

    @property
    def token_s(self) -> float:
        """Seconds per sampled token of one request, measured on the idle server at its start; 0 if unknown."""

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Returns once it answers with `version` and the logprob probe agrees. `await_probe`: wait for the learner to write version 0's."""

    def episode(self, episode_id: str, task_key: str) -> AbstractContextManager[object]:
        """Around an episode whose requests come: attempts at one task share their prompt, and may be kept together."""

    def figures(self) -> dict[str, float]:
        """What a step's line of metrics says of several servers; empty for one."""

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Takes a published version in; the old one serves on unless the probe agrees. Raises `SwapError`, `ServingError`."""

    async def fall_back(self, version: PolicyVersion) -> None:
        """Serves `version`, published earlier, in place of one that the learner has retracted."""

    async def wait_version(self, number: int) -> None:
        """Returns once version `number` or a newer one answers."""

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Replaces what dies; ends by cancellation or `ServingError`. `on_loss` is called when the learner may be stuck with it."""

    async def close(self) -> None: ...


class WeightChannel(Protocol):
    """Takes published versions into the running server.

    A factory gets the server (`agentrl.serving.VLLMServer`) and, as `registry_folder`, the folder that versions are in: a new
    channel for each server that is started, one of several replicas too. The server begins with the file channel's end, unless the
    recipe says nccl.
    """

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        """Returns once the server answers with `version` and the probe agrees, else raises `SwapError`."""

    async def close(self) -> None:
        """Lets go of what the channel holds; the server is stopped by its owner."""
