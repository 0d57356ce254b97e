"""Policy versions, the probe that verifies a swap, and the report of a swap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.records.fields import Record

WHOLE_MODEL = "model.safetensors"
"""The file of a version with all weights."""


ADAPTER = "adapter_model.safetensors"
"""The file of a version that is a low-rank adapter to version 0."""


class VersionState(StrEnum):
    """State of a policy version: candidate -> serving -> served; promoted or rolled back after a gate decision."""

    CANDIDATE = "candidate"
    SERVING = "serving"
    SERVED = "served"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion(Record):
    """One set of weights. Version 0 is the base policy; version n is the result of learner step n."""

    number: int
    parent: int | None
    folder: str  # relative to the run folder; a Hugging Face folder, or the files of an adapter to version 0
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
    """Token rows with the logprobs that the learner computes for them. There are P rows. A server with the same weights must compute the
    same logprobs."""

    token_ids: tuple[tuple[int, ...], ...]  # [P][T]
    logprobs: tuple[tuple[float, ...], ...]  # [P][T-1], logprob of token t+1 given tokens <= t, temperature 1
    next_ids: tuple[tuple[int, ...], ...] = ()  # [P][M] the M most likely tokens after each row; empty: not compared
    next_logprobs: tuple[tuple[float, ...], ...] = ()  # [P][M] their logprobs, before any truncation
    temperature: float | None = None  # of `next_logprobs`; None means the temperature of rollouts

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
    """The cost of a weight swap, and how well server and learner agree."""

    version: int
    stall_ms: float  # time in which no request made progress
    total_ms: float
    probe_max_abs_diff: float  # nats
