"""The JSON of a run's events: the newest of them, and what needs attention."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.observe.event_log import MAX_PAGE, newest_offset, read_events
from agentrl.observe.events import (
    AlertRaised,
    EvaluationFinished,
    Event,
    PartRestarted,
    RunStarted,
    StageStarted,
    StepFinished,
    VersionJudged,
    VersionServed,
    kind_of,
)
from agentrl.view.source import RunSource

NEWEST = 40
"""Events that a page shows at first."""
NOTABLE = (AlertRaised, PartRestarted, VersionJudged, EvaluationFinished, RunStarted, StageStarted, VersionServed, StepFinished)
_BACK = 64 << 10  # bytes before the end of the stream that the newest events are read from
_NOTABLE_BACK = 4 << 20
_MAX_NOTABLE = 200
_PAGES = 8


def events_data(source: RunSource) -> dict[str, Any]:
    """Returns the newest events and the newest notable ones, the newest first. A run without events has neither."""
    try:
        newest = _read(source.path, _BACK)
        notable = [event for event in _read(source.path, _NOTABLE_BACK) if isinstance(event, NOTABLE)]
    except (OSError, ValueError) as error:
        return {"run": source.id, "newest": [], "notable": [], "notes": [f"events cannot be read: {str(error)[:300]}"]}
    return {
        "run": source.id,
        "newest": [event_line(event) for event in newest[-NEWEST:][::-1]],
        "notable": [event_line(event) for event in notable[-_MAX_NOTABLE:][::-1]],
        "notes": [],
    }


def event_line(event: Event) -> dict[str, Any]:
    """Returns an event with the name of its kind."""
    return {"kind": kind_of(event), **asdict(event)}


def _read(path: Path, back: int) -> list[Event]:
    events, offset = list[Event](), newest_offset(path, back=back)
    for _ in range(_PAGES):
        page = read_events(path, after=offset, limit=MAX_PAGE)
        events += page.events
        if page.offset == offset:
            break
        offset = page.offset
    return events
