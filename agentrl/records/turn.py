"""An agent's turn in exact tokens, and the completion from which the turn is created."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.chat import Message, ToolResult
from agentrl.records.fields import Record
from agentrl.records.sampling import Supports, check_forced_tokens

CUT = "time"
"""`finish_reason` of a completion that was cut off at a time limit. Such a completion contains the tokens sampled until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(Record):
    """Policy version `version` sampled the completion tokens `[start, end)`."""

    version: int
    start: int
    end: int

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.start < self.end:
            raise ValueError(f"VersionSpan needs 0 <= start < end, got [{self.start}, {self.end})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Record):
    """One step of an agent (act, observe) in exact tokens. T is the number of completion tokens.

    `prompt_ids` are the tokens between the previous completion and this completion. The context of a turn is the concatenation of
    prompt_ids and completion_ids of all turns before it, followed by its own prompt_ids. No text is tokenized twice.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T] natural log, under the distribution from which the tokens were sampled (the behaviour policy)
    versions: tuple[VersionSpan, ...]  # the spans cover [0, T) without gaps or overlaps
    message: Message  # parsed form of the completion
    finish_reason: str  # "stop", "length" or `CUT`
    tool_results: tuple[ToolResult, ...] = ()
    generate_s: float = 0.0
    tool_s: float = 0.0
    ended_at: float = 0.0  # Unix time at which the tokens were recorded; 0 if unknown
    supports: Supports | None = None  # [T] None means that every token was drawn from the whole vocabulary
    forced: tuple[int, ...] = ()  # indices of completion tokens that were inserted, not sampled; they are never trained

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_forced_tokens("Turn", self.forced, len(self.completion_ids))
        if self.supports is not None:
            self.supports.check("Turn", self.completion_ids)
        n = len(self.completion_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"Turn: {n} completion ids but {len(self.logprobs)} logprobs")
        edge = 0
        for span in self.versions:
            if span.start != edge:
                raise ValueError(f"Turn: version spans leave a gap or overlap at token {edge}")
            edge = span.end
        if edge != n:
            raise ValueError(f"Turn: version spans cover {edge} of {n} completion tokens")

    @property
    def sampled(self) -> int:
        """Number of completion tokens that the policy sampled."""
        return len(self.completion_ids) - len(self.forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Record):
    """A completion from the inference server: exact token ids, their logprobs, and the versions that sampled them."""

    token_ids: tuple[int, ...]  # includes the stop token if a stop token ended the completion
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # "stop", "length", or `CUT` if the request reached its time limit
    supports: Supports | None = None  # [T] None if supports were not requested
    forced: tuple[int, ...] = ()  # indices of tokens that were not sampled, as in `Turn`

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_forced_tokens("Completion", self.forced, len(self.token_ids))
        if self.supports is not None:
            self.supports.check("Completion", self.token_ids)
