"""A trace: what one episode that went wrong left behind, complete enough to be read, named, played again and learned from.

Traces of our own runs hold the whole task and the whole episode, with the exact tokens. Those of agents elsewhere (see
`agentrl.failure.formats`) hold what was said; `Trace.messages` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.records import Episode, Message, Score, Task
from agentrl.records.fields import JsonObject, Record, Text

FORMAT = 1


class CaptureReason(StrEnum):
    """Why an episode was kept."""

    FAILED = "failed"  # a score below the best
    HACKED = "hacked"  # a score that a rule or an audit verifier says was not earned
    TIMEOUT = "timeout"  # out of wall time, or a tool's time
    LIMIT = "limit"  # out of turns or tokens
    REGRESSED = "regressed"  # a case that an earlier version passed
    FAULT = "fault"  # not the policy's doing: infrastructure or task
    IMPORTED = "imported"  # somebody else's agent, elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag(Record):
    """A name given to a failure: `Tag(name="wrong_tool", by="rules", confidence=0.9, turn=1)`."""

    name: str
    by: str  # "rules", "judge:NAME" or "person:NAME"
    confidence: float = 1.0  # from 0 to 1
    trajectory: int = 0
    turn: int | None = None  # the first turn of that trajectory where it shows, counted from 0; None: no single one
    note: Text = ""

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"Tag.confidence lies between 0 and 1, got {self.confidence}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedMessage(Record):
    """One message as somebody else's format tells it; a tool's answer says which call it is for."""

    message: Message
    agent: str = ""  # who speaks, where there are several
    call_ids: tuple[str, ...] = ()  # of `message.tool_calls`, where the format names them
    answers: str = ""  # the call that this is the answer of, for role "tool"
    failed: bool = False  # a tool's answer that the format marks as an error
    error: Text = ""  # the type of that error, if the format names it
    reasoning: Text = ""  # what the model thought, where the format keeps that apart from the message
    at_s: float | None = None  # seconds since the trace's first message


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Record):
    """One episode that is worth another look. `task` and `episode` are whole for our own runs, None for imported ones."""

    id: str
    why: CaptureReason
    source: str = "run"  # or the format it was imported from: "openai", "otel", "atif"
    task: Task | None = None
    episode: Episode | None = None
    spoken: tuple[ImportedMessage, ...] = ()  # what was said, for imported ones
    tools: tuple[JsonObject, ...] = ()  # schemas of the tools that were offered, for imported ones
    score: Score | None = None
    phase: str = ""  # "train", "before", "step12", "after", "gate", ...
    step: int = 0
    tags: tuple[Tag, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)  # run, recipe, model, image, file, service, ...
    missing: tuple[str, ...] = ()  # what the source did not hold, in words: a trace with gaps says so
    format: int = FORMAT

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if (self.task is None) != (self.episode is None):
            raise ValueError("Trace: a task and an episode come together, or not at all")
        if self.format != FORMAT:
            raise ValueError(f"Trace.format {self.format} is not known; this version reads {FORMAT}")

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions that sampled its tokens, oldest first."""
        turns = (turn for one in (self.episode.trajectories if self.episode else ()) for turn in one.turns)
        return tuple(sorted({span.version for turn in turns for span in turn.versions}))

    @property
    def replays(self) -> bool:
        """Whether it can be played again from its own content: the task is here."""
        return self.task is not None
