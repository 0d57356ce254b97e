"""Rows and counts of captured traces, and filters for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentrl.failure.trace import Trace
from agentrl.failure.triage import deciding_tag_name
from agentrl.records import Episode, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """A trace in a list. Its texts are hostile."""

    seq: int
    id: str
    phase: str
    step: int
    version: int  # newest policy version that sampled its tokens; -1 means none
    why: str
    tag: str
    kind: str
    task_id: str
    task_key: str
    score: float | None
    question: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeCount:
    """The number of episodes with these values; `why` and `tag` are empty if they passed."""

    phase: str
    step: int
    version: int
    why: str
    tag: str
    kind: str
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilter:
    """A filter for traces; empty fields match all."""

    tag: str = ""
    kind: str = ""
    why: str = ""
    phase: str = ""
    version: int | None = None
    ids: tuple[str, ...] = ()

    def sql_where(self) -> tuple[str, list[Any]]:
        """The SQL WHERE clause and its parameters."""
        equal = {"tag": self.tag, "kind": self.kind, "why": self.why, "phase": self.phase}
        terms = [f"{name} = ?" for name, value in equal.items() if value]
        values: list[Any] = [value for value in equal.values() if value]
        if self.version is not None:
            terms, values = [*terms, "version = ?"], [*values, self.version]
        if self.ids:
            terms, values = [*terms, "id IN (SELECT value FROM json_each(?))"], [*values, json.dumps(self.ids)]
        return (f" WHERE {' AND '.join(terms)}" if terms else ""), values


def count_of_trace(trace: Trace) -> EpisodeCount:
    """The count of one trace."""
    return EpisodeCount(
        phase=trace.phase,
        step=trace.step,
        version=newest_version(trace.episode),
        why=str(trace.why),
        tag=deciding_tag_name(trace.tags),
        kind=kind_of_task(trace.task),
        n=1,
    )


def newest_version(episode: Episode | None) -> int:
    """The newest policy version that sampled an episode's tokens; -1 if there is none."""
    turns = (turn for trajectory in (episode.trajectories if episode else ()) for turn in trajectory.turns)
    return max((span.version for turn in turns for span in turn.versions), default=-1)


def kind_of_task(task: Task | None) -> str:
    """The kind of a task, at most 80 characters; empty without a task."""
    return "" if task is None else task.kind[:80]
