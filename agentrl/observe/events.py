"""The events of a run, in order, as typed records in `events/` in the run folder.

One driver writes the stream, and any number of readers follow it. The stream is split into segments, such as
`events/000000000000000.jsonl`. The name of a segment is the offset of its first byte. Only the newest segments are kept. An offset is a
position in the whole stream, so it stays valid after segments are deleted and after the run is resumed. The output of agents and tools is
untrusted, and is clipped. The experience store contains the complete episodes.

    page = read_events(run_dir, after=0)
    page = read_events(run_dir, after=page.offset)   # the events since then

A run folder may come from a third party, so lines have a bounded length. A line that contains no known event is counted and skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic_core import from_json, to_json

MAX_LINE = 16 << 10
"""Maximum line length in bytes. Longer lines are skipped."""
NAME_CHARS = 200
"""Maximum number of characters in a name, id or kind in an event."""
PREVIEW_CHARS = 400
"""Maximum number of characters in the output of an agent or tool in an event."""
TEXT_CHARS = 2000
"""Maximum number of characters in an alert or reason in an event."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of the events of a run."""

    at: Number = field(default_factory=time.time)  # Unix time in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A driver opened the run. The stream of a resumed run contains one such event per driver."""

    name: str  # name of the run folder
    recipe: str
    steps: Count  # number of learner steps in the recipe; 0 means that the run continues until it is stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted(Event):
    """The run entered a stage, such as "train"."""

    stage: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStarted(Event):
    """An attempt at a task started, or continued from its saved state."""

    episode: str
    task_id: str
    kind: str  # kind of the task
    split: str  # train, heldout or heldout_real
    group: Count | None = None  # None outside of training
    attempt: Count = 0  # number of earlier tries
    turns: Count = 0  # number of turns finished in an earlier process


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded(Event):
    """The policy finished a turn."""

    episode: str
    trajectory: Count  # index in the episode's tree
    turn: Count  # index in the trajectory
    agent: str
    prompt_tokens: Count  # number of new prompt tokens
    sampled_tokens: Count
    version: Count | None  # newest version that sampled a token; None if no version did
    seconds: Number
    finish_reason: str
    text: str = ""  # the start of the message
    calls: tuple[str, ...] = ()  # names of the called tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnded(Event):
    """A tool call returned a result."""

    episode: str
    trajectory: Count
    turn: Count
    call: Count  # index of the call in its turn
    tool: str
    ok: bool
    seconds: Number
    arguments: str = ""  # the start of the arguments as JSON
    output: str = ""  # the start of the output


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded(Event):
    """An attempt ended. If the attempt failed, it may be retried under a different id."""

    episode: str
    stop_reason: str  # "cancelled" if the group did not need the attempt
    turns: Count
    tokens: Count  # number of sampled tokens
    seconds: Number
    failure: str = ""  # kind of the failure, if one excludes the attempt
    blame: str = ""  # policy, task or infrastructure


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScored(Event):
    """An attempt was scored or excluded, or is waiting for parts of its score that are computed later."""

    episode: str
    score: Number | None
    pending: bool = False
    reason: str = ""  # why the attempt has no score


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStored(Event):
    """All attempts of a group have ended, and the group is stored with its scores."""

    group: Count
    task_id: str
    kind: str
    scores: tuple[Number | None, ...]  # by attempt; None for an excluded attempt
    tokens: Count  # number of sampled tokens
    cancelled: Count = 0  # number of cancelled attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionServed(Event):
    """The servers swapped to a version, and the probe confirmed its weights."""

    version: Count
    seconds: Number
    stall_s: Number  # time in which no request made progress
    probe_max_abs_diff: Number | None = None  # in nats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(Event):
    """A learner step was recorded."""

    step: Count  # counted from 1, so it equals the version that the step produced
    metrics: Mapping[str, Number | None]  # at most 256 entries


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFinished(Event):
    """An evaluation ended."""

    phase: str  # before, step8, after
    rates: Mapping[str, tuple[Number, Number, Number, Count]]  # split -> mean, 95% interval, number of tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionJudged(Event):
    """The gate decided on a version."""

    version: Count
    outcome: str  # reference, promoted, blocked, rolled back or not judged
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRaised(Event):
    """A problem needs attention."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRestarted(Event):
    """A part of the run failed and is being restarted."""

    part: str  # "server", "learner", "rollout worker", "judge" or "redis"
    text: str  # the alert


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Event):
    """Events are missing at this point, because they arrived faster than they could be written or because writing failed."""

    count: Count


KINDS: Mapping[str, type[Event]] = {
    "run_started": RunStarted,
    "stage": StageStarted,
    "episode_started": EpisodeStarted,
    "turn": TurnEnded,
    "tool": ToolEnded,
    "episode_ended": EpisodeEnded,
    "episode_scored": EpisodeScored,
    "group": GroupStored,
    "version_served": VersionServed,
    "step": StepFinished,
    "evaluation": EvaluationFinished,
    "version_judged": VersionJudged,
    "alert": AlertRaised,
    "part_restarted": PartRestarted,
    "dropped": EventsDropped,
}
"""Name of an event in the stream -> its class."""
EPISODE_EVENTS = (EpisodeStarted, TurnEnded, ToolEnded, EpisodeEnded, EpisodeScored, EventsDropped)
"""The events that a rollout worker sends to the driver."""
_NAMES = {kind: name for name, kind in KINDS.items()}
_LIMITS = {"text": TEXT_CHARS, "reason": TEXT_CHARS, "detail": TEXT_CHARS, "arguments": PREVIEW_CHARS, "output": PREVIEW_CHARS}
_MOST = 256  # maximum number of entries in a list or object


def kind_of(event: Event) -> str:
    """Returns the name under which an event is stored in the stream."""
    return _NAMES[type(event)]


def encode(event: Event) -> bytes:
    """Returns an event as one line of JSON, at most `MAX_LINE` bytes. Strings and lists are clipped, and numbers that are not
    finite become null."""
    limits = _LIMITS_OF[kind_of(event)]
    data = {name: _plain(getattr(event, name), most) for name, most in limits.items()}
    line = to_json({"event": kind_of(event), **data}) + b"\n"
    while len(line) > MAX_LINE:  # strings with many bytes per character, or many entries
        limits = {name: most // 2 for name, most in limits.items()}
        data = {name: _plain(getattr(event, name), most) for name, most in limits.items()}
        line = to_json({"event": kind_of(event), **data}) + b"\n"
    return line


def decode(line: bytes) -> Event | None:
    """Returns the event in a line; None if the event's name is unknown. Raises `ValueError` if the line is not an event."""
    if len(line) > MAX_LINE:
        raise ValueError(f"the line has {len(line)} bytes; an event has at most {MAX_LINE}")
    data = from_json(line, allow_inf_nan=False, cache_strings="keys")
    name = data.get("event") if isinstance(data, dict) else None
    if not isinstance(name, str):
        raise ValueError("the line has no event name")
    kind = KINDS.get(name)
    if kind is None:
        return None
    if name not in _adapters:
        _adapters[name] = TypeAdapter(kind)
    event: Event = _adapters[name].validate_python(data)
    return event


def _limits(kind: type[Event]) -> dict[str, int]:
    """Returns a mapping from the fields of an event to the maximum number of characters in each field."""
    limits = {attribute.name: _LIMITS.get(attribute.name, NAME_CHARS) for attribute in fields(kind)}
    return limits | {"text": PREVIEW_CHARS} if kind is TurnEnded else limits


_LIMITS_OF = {name: _limits(kind) for name, kind in KINDS.items()}
_adapters: dict[str, TypeAdapter[Any]] = {}


def _plain(value: Any, most: int) -> Any:
    if isinstance(value, str):
        short = value[:most]
        return short if short.isascii() else short.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple | list):
        return [_plain(item, most) for item in value[: min(_MOST, most)]]
    if isinstance(value, Mapping):
        return {_plain(str(key), most): _plain(item, most) for key, item in list(value.items())[: min(_MOST, most)]}
    return value
