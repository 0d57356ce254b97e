"""The newest events of a run, and a stream that notifies pages when the run changes. All viewers of a run share one poll."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import StoreError
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
from agentrl.observe.run_folders import run_state
from agentrl.view.source import Missing, RunSource

if TYPE_CHECKING:
    from agentrl.view.library import RunLibrary

MAX_STREAMS = 32
"""Maximum number of pages that are updated live at the same time."""
MAX_ACTIVITY = 60
"""Number of newest events that are sent to a page at a time. Older events are sent only if they are notable."""
LOOK_S = 1.0
"""Seconds between two reads of a run."""
NEWEST_EVENTS = 40
"""Maximum number of events that a page shows initially."""
NOTABLE = (AlertRaised, PartRestarted, VersionJudged, EvaluationFinished, RunStarted, StageStarted, VersionServed, StepFinished)
_EVENTS_BACK = 64 << 10  # number of bytes at the end of the stream that are searched for the newest events
_NOTABLE_BACK = 4 << 20
_MAX_NOTABLE = 200
_PAGES = 8
_SILENCE_S = 15.0  # time without events after which a comment is sent to keep the connection open
GONE = {"gone": True}


@dataclass(slots=True, eq=False)
class Live:
    """The event streams that a server sends to the pages of runs."""

    library: RunLibrary
    streams: int = 0
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _looks: dict[str, tuple[float, asyncio.Task[dict[str, Any]]]] = field(default_factory=dict)

    def stop(self) -> None:
        """Ends all streams."""
        self._stopped.set()

    async def events(self, run: str, *, is_closed: Callable[[], bool] = lambda: False) -> AsyncIterator[bytes]:
        """Yields server-sent events: the events that the run records from now on, and an event at the start and whenever the newest step,
        the groups or the state of the run change. If the run is removed, the last event reports it.

        Args:
            is_closed: returns whether the page was closed. The server cannot distinguish a closed connection from one whose client is
                waiting for the response.
        """
        self.streams += 1
        loop, last, spoke = asyncio.get_running_loop(), None, 0.0
        offset: int | None = None
        try:
            while not self._stopped.is_set() and not is_closed():
                mark = await self._look(run)
                if mark != last:
                    last, spoke = mark, loop.time()
                    yield f"event: change\ndata: {json.dumps(mark)}\n\n".encode()
                    if mark == GONE:
                        return
                elif loop.time() - spoke > _SILENCE_S:
                    spoke = loop.time()
                    yield b": open\n\n"
                lines, offset = await asyncio.to_thread(self._activity, run, offset)
                if lines:
                    spoke = loop.time()
                    yield f"event: activity\ndata: {json.dumps(lines)}\n\n".encode("utf-8", "replace")
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._stopped.wait()
                except TimeoutError:
                    continue
        finally:
            self.streams -= 1

    async def _look(self, run: str) -> dict[str, Any]:
        """Returns a value that changes whenever the run changes. The value is at most `LOOK_S` seconds old."""
        now = asyncio.get_running_loop().time()
        known = self._looks.get(run)
        if known is None or now - known[0] > 0.9 * LOOK_S:
            known = (now, asyncio.create_task(asyncio.to_thread(self._mark, run)))
            self._looks = {name: look for name, look in self._looks.items() if now - look[0] < 60} | {run: known}
        return await asyncio.shield(known[1])

    def _activity(self, run: str, offset: int | None) -> tuple[list[dict[str, Any]], int | None]:
        """Returns the newest events after an offset, and the next offset. With the offset None, reading starts at the end of the stream."""
        source = self.library.open(run)
        if source is None:
            return [], offset
        try:
            if offset is None:
                return [], newest_offset(source.path, back=0)
            page = read_events(source.path, after=offset)
            first = len(page.events) - MAX_ACTIVITY
            shown = (event for number, event in enumerate(page.events) if number >= first or isinstance(event, NOTABLE))
            return [event_line(event) for event in shown], page.offset
        except (OSError, ValueError):
            return [], offset

    def _mark(self, run: str) -> dict[str, Any]:
        source = self.library.open(run)
        if source is None:
            return GONE
        with source.lock:
            try:
                source.refresh()
                steps = source.metrics.steps
                mark: dict[str, Any] = {"state": run_state(source.path), "step": steps[-1] if steps else None, "steps": len(steps)}
                mark["store"] = source.store().change_mark()
            except Missing:
                return GONE
            except StoreError:
                mark["store"] = None
            return mark


def events_data(source: RunSource) -> dict[str, Any]:
    """Returns the newest events and the newest notable events, the newest first. Both lists are empty if the run has no events,
    or if they cannot be read; then a note gives the reason."""
    try:
        newest = _read_back(source.path, _EVENTS_BACK)
        notable = [event for event in _read_back(source.path, _NOTABLE_BACK) if isinstance(event, NOTABLE)]
    except (OSError, ValueError) as error:
        return {"run": source.id, "newest": [], "notable": [], "notes": [f"events cannot be read: {str(error)[:300]}"]}
    return {
        "run": source.id,
        "newest": [event_line(event) for event in newest[-NEWEST_EVENTS:][::-1]],
        "notable": [event_line(event) for event in notable[-_MAX_NOTABLE:][::-1]],
        "notes": [],
    }


def event_line(event: Event) -> dict[str, Any]:
    """Returns an event as JSON data, with the name of its kind."""
    return {"kind": kind_of(event), **asdict(event)}


def _read_back(path: Path, back: int) -> list[Event]:
    events, offset = list[Event](), newest_offset(path, back=back)
    for _ in range(_PAGES):
        page = read_events(path, after=offset, limit=MAX_PAGE)
        events += page.events
        if page.offset == offset:
            break
        offset = page.offset
    return events
