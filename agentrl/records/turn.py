"""One turn of an agent in exact tokens, and the completion that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.chat import Message, ToolResult
from agentrl.records.fields import Record
from agentrl.records.sampling import Supports, check_forced_tokens

CUT = "time"  # `finish_reason` of a completion that was cut off at a time limit, with the tokens sampled until then


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(Record):
    """Completion tokens `[start, end)` were sampled by the weights of policy version `version`."""

    version: int
    start: int
    end: int

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.start < self.end:
            raise ValueError(f"VersionSpan needs 0 <= start < end, got [{self.start}, {self.end})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Record):
    """One act -> observe step of one agent, in exact tokens.

    `prompt_ids` are only the tokens that are new since the previous turn's completion; the whole context is the
    concatenation over turns of prompt_ids + completion_ids. Nothing is ever tokenized twice.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T] of the behaviour policy, natural log: of the distribution that was sampled from
    versions: tuple[VersionSpan, ...]  # cover [0, T) without gap or overlap
    message: Message  # parsed form of the completion
    finish_reason: str  # "stop", "length" or `CUT`
    tool_results: tuple[ToolResult, ...] = ()
    generate_s: float = 0.0
    tool_s: float = 0.0
    supports: Supports | None = None  # [T] of the completion's tokens; None: all were drawn from the whole vocabulary
    forced: tuple[int, ...] = ()  # places of completion tokens that were put there, not sampled: they are context, and never trained

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
        """How many tokens of the completion the policy sampled."""
        return len(self.completion_ids) - len(self.forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Record):
    """What the inference server answered: exact ids, their logprobs, and which weights sampled them."""

    token_ids: tuple[int, ...]  # the stop token is included when one ended the completion
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # "stop", "length", or `CUT` if the request's time was up
    supports: Supports | None = None  # one a token, where they were asked for
    forced: tuple[int, ...] = ()  # places of tokens that were not sampled, as in a `Turn`

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_forced_tokens("Completion", self.forced, len(self.token_ids))
        if self.supports is not None:
            self.supports.check("Completion", self.token_ids)
