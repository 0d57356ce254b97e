"""What lists and counts say of traces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentrl.failure.trace import Trace
from agentrl.failure.triage import deciding_tag_name
from agentrl.records import Episode, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """What a list says of a trace; the texts in it are hostile."""

    seq: int
    id: str
    phase: str
    step: int
    version: int  # the newest that sampled any of its tokens; -1: none
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
    """How many episodes of a sort there were; `why` and `tag` are empty for those that passed."""

    phase: str
    step: int
    version: int
    why: str
    tag: str
    kind: str
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilter:
    """Which traces a list is of; empty fields ask nothing."""

    tag: str = ""
    kind: str = ""
    why: str = ""
    phase: str = ""
    version: int | None = None
    ids: tuple[str, ...] = ()

    def sql_where(self) -> tuple[str, list[Any]]:
        asked = {"tag": self.tag, "kind": self.kind, "why": self.why, "phase": self.phase}
        terms = [f"{name} = ?" for name, value in asked.items() if value]
        values: list[Any] = [value for value in asked.values() if value]
        if self.version is not None:
            terms, values = [*terms, "version = ?"], [*values, self.version]
        if self.ids:
            terms, values = [*terms, "id IN (SELECT value FROM json_each(?))"], [*values, json.dumps(self.ids)]
        return (f" WHERE {' AND '.join(terms)}" if terms else ""), values


def count_of_trace(trace: Trace) -> EpisodeCount:
    """What a trace counts as."""
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
    """The newest policy version that sampled any of an episode's tokens; -1: none."""
    turns = (turn for one in (episode.trajectories if episode else ()) for turn in one.turns)
    return max((span.version for turn in turns for span in turn.versions), default=-1)


def kind_of_task(task: Task | None) -> str:
    """The kind of question that a task is, as evaluations count it."""
    return "" if task is None else task.kind[:80]
