"""Policy versions, the probe that verifies a weight swap, and the report on a weight swap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.records.fields import Record

WHOLE_MODEL = "model.safetensors"
"""The file that contains all weights of a version."""


ADAPTER = "adapter_model.safetensors"
"""The weights file of a version that is a low-rank adapter for version 0."""


class VersionState(StrEnum):
    """State of a policy version: candidate -> serving -> served, or promoted or rolled back after a gate decision."""

    CANDIDATE = "candidate"
    SERVING = "serving"
    SERVED = "served"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion(Record):
    """A set of weights. Version 0 is the base policy. Version n is the result of learner step n."""

    number: int
    parent: int | None
    folder: str  # relative to the run folder; a Hugging Face folder, or the files of an adapter for version 0
    sha256: str  # hash of the file `weights`
    state: VersionState = VersionState.CANDIDATE
    evals: Mapping[str, float] = field(default_factory=dict)
    weights: str = WHOLE_MODEL  # or ADAPTER

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.weights not in (WHOLE_MODEL, ADAPTER):
            raise ValueError(f"PolicyVersion: weights must be {WHOLE_MODEL} or {ADAPTER}, got {self.weights!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Record):
    """P rows of tokens, with the logprobs that the learner computes. A server with the same weights must compute the same logprobs."""

    token_ids: tuple[tuple[int, ...], ...]  # [P][T]
    logprobs: tuple[tuple[float, ...], ...]  # [P][T-1], logprob of token t+1 given tokens <= t, temperature 1
    next_ids: tuple[tuple[int, ...], ...] = ()  # [P][M] the M most likely tokens after each row; empty if not compared
    next_logprobs: tuple[tuple[float, ...], ...] = ()  # [P][M] their logprobs, before any truncation
    temperature: float | None = None  # temperature for `next_logprobs`; None means the rollout temperature

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError("Probe: the number of logprob rows must equal the number of token rows")
        for ids, logprobs in zip(self.token_ids, self.logprobs, strict=True):
            if len(logprobs) != len(ids) - 1:
                raise ValueError(f"Probe: {len(ids)} tokens need {len(ids) - 1} logprobs, got {len(logprobs)}")
        if self.next_ids and len(self.next_ids) != len(self.token_ids):
            raise ValueError("Probe: give next tokens for every row or for none")
        if [len(ids) for ids in self.next_ids] != [len(logprobs) for logprobs in self.next_logprobs]:
            raise ValueError("Probe: every next token needs its logprob")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport(Record):
    """The cost of a weight swap, and how closely the server and the learner agree."""

    version: int
    stall_ms: float  # time in which no request made progress
    total_ms: float
    probe_max_abs_diff: float  # nats
