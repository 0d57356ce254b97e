"""A trace is the record of one failed episode. It is complete enough to be read, tagged, re-run and trained on.

A trace of an agentrl run contains the task and the episode with its exact tokens. A trace of a third-party agent
(`agentrl.failure.formats`) contains the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.records import Episode, Message, Score, Task
from agentrl.records.fields import JsonObject, Record, Text

FORMAT = 1
BY_JUDGE, BY_PERSON = "judge:", "person:"
"""Prefixes in `Tag.by`."""


class CaptureReason(StrEnum):
    """Why an episode was captured."""

    FAILED = "failed"  # score below the threshold
    HACKED = "hacked"  # a score that a rule or an audit verifier rejects
    TIMEOUT = "timeout"  # wall time, or a tool's time, ran out
    LIMIT = "limit"  # turns or tokens ran out
    REGRESSED = "regressed"  # an earlier version passed the task
    FAULT = "fault"  # caused by the infrastructure or the task, not by the policy
    IMPORTED = "imported"  # from an agent outside agentrl
    EXPORTED = "exported"  # from the store of a run, with any score


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag(Record):
    """The kind of a failure and its origin: `Tag(name="wrong_tool", by="rules", confidence=0.9, turn=1)`."""

    name: str
    by: str  # "rules", "judge:NAME" or "person:NAME"
    confidence: float = 1.0  # from 0 to 1
    trajectory: int = 0
    turn: int | None = None  # first turn of the trajectory in which the failure is visible, counted from 0; None means no single turn
    note: Text = ""

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"Tag.confidence must be between 0 and 1, got {self.confidence}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedMessage(Record):
    """One message of an imported conversation."""

    message: Message
    agent: str = ""  # name of the agent that wrote it, if there are several agents
    call_ids: tuple[str, ...] = ()  # ids of `message.tool_calls`, if the source contains them
    answers: str = ""  # for role "tool": id of the call that it answers
    failed: bool = False  # for role "tool": whether the source marks the result as an error
    error: Text = ""  # type of that error, if the source contains it
    reasoning: Text = ""  # the model's reasoning, if the source separates it from the message
    at_s: float | None = None  # seconds since the first message


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Record):
    """One captured episode. Traces of agentrl's runs have `task` and `episode`; imported traces have `spoken`."""

    id: str
    why: CaptureReason
    source: str = "run"  # or the import format: "openai", "otel", "atif"
    task: Task | None = None
    episode: Episode | None = None
    spoken: tuple[ImportedMessage, ...] = ()
    tools: tuple[JsonObject, ...] = ()  # schemas of the offered tools, for imported traces
    score: Score | None = None
    phase: str = ""  # "train", "before", "step12", "after", "gate", ...
    step: int = 0
    tags: tuple[Tag, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)  # run, recipe, model, image, file, service, ...
    missing: tuple[str, ...] = ()  # descriptions of what the source did not contain
    format: int = FORMAT

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if (self.task is None) != (self.episode is None):
            raise ValueError("Trace must have both a task and an episode, or neither")
        if self.format != FORMAT:
            raise ValueError(f"Trace.format {self.format} is not known; this version reads {FORMAT}")

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions that sampled the episode's tokens, in ascending order."""
        turns = (turn for trajectory in (self.episode.trajectories if self.episode else ()) for turn in trajectory.turns)
        return tuple(sorted({span.version for turn in turns for span in turn.versions}))


def deciding_tag_name(tags: Sequence[Tag]) -> str:
    """Returns the tag name under which a trace is counted; empty if it has no tags.

    This is the name of the newest tag set by a person or, if no person set a tag, of the first tag.
    """
    person = next((tag for tag in reversed(tags) if tag.by.startswith(BY_PERSON)), None)
    return person.name if person is not None else tags[0].name if tags else ""


def deciding_tag(tags: Sequence[Tag]) -> Tag | None:
    """Returns the first tag with the name under which a trace is counted; None if there are no tags."""
    return next((tag for tag in tags if tag.name == deciding_tag_name(tags)), None)


def newest_version(episode: Episode | None) -> int:
    """Returns the newest policy version that sampled an episode's tokens; -1 if there is none."""
    turns = (turn for trajectory in (episode.trajectories if episode else ()) for turn in trajectory.turns)
    return max((span.version for turn in turns for span in turn.versions), default=-1)


def kind_of_task(task: Task | None) -> str:
    """Returns the kind of a task, truncated to 80 characters; empty if `task` is None."""
    return "" if task is None else task.kind[:80]
