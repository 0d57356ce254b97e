"""Runs a tracker on a separate thread, so that a tracker that hangs, raises exceptions or is slow neither stops nor slows down the run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from agentrl.base import user_code
from agentrl.errors import PluginError
from agentrl.protocols import Interval, Tracker
from agentrl.records import Group, SwapReport

log = logging.getLogger(__name__)

OPEN_S = 60.0
"""Maximum time for opening a tracker, in seconds."""
CLOSE_S = 10.0
"""Maximum time for a tracker to handle the waiting events and close at the end of the run, in seconds."""
MAX_EVENTS = 1024
"""Maximum number of waiting events. Additional events are dropped and counted."""

MAX_GROUPS = 64
"""Number of waiting events from which on a group is dropped. It is smaller than `MAX_EVENTS`, because a group holds all of its
tokens."""

Event = Callable[[Tracker], None]


class BackgroundTracker(Tracker):
    """A tracker whose methods return at once. A daemon thread opens the wrapped tracker, calls its methods in order, and closes it.

    Args:
        open_tracker: opens the wrapped tracker.
        name: name of the tracker in log and error messages.

    Raises:
        PluginError: the tracker did not open within `open_s` seconds. An exception that `open_tracker` raises is raised unchanged.
    """

    def __init__(self, open_tracker: Callable[[], Tracker], *, name: str, open_s: float = OPEN_S, close_s: float = CLOSE_S) -> None:
        self.dropped = 0
        """Number of events dropped because the tracker was slower than the run."""
        self._name, self._close_s = name, close_s
        self._events: queue.Queue[Event | None] = queue.Queue(MAX_EVENTS)
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(open_tracker,), name=f"tracker {name}", daemon=True)
        self._closed = False
        self._thread.start()
        if not self._opened.wait(open_s):
            self._closed = True
            raise PluginError(f"tracker {name!r} did not open within {open_s:g} s", fix="check its service, or remove it from trackers")
        if self._error is not None:
            self._closed = True
            raise self._error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forwards the metrics of a finished step to the wrapped tracker."""
        copied = dict(metrics)
        self._add(lambda one: one.log(step, copied))

    def alert(self, text: str) -> None:
        """Forwards an alert to the wrapped tracker."""
        self._add(lambda one: one.alert(text))

    def stage(self, name: str, detail: str = "") -> None:
        """Forwards the start of a stage to the wrapped tracker."""
        self._add(lambda one: one.stage(name, detail))

    def progress(self, index: int, group: Group) -> None:
        """Forwards a finished group to the wrapped tracker."""
        self._add(lambda one: one.progress(index, group), most=MAX_GROUPS)

    def evaluating(self, done: int, total: int) -> None:
        """Forwards the progress of an evaluation to the wrapped tracker."""
        self._add(lambda one: one.evaluating(done, total))

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """Forwards the success rates from an evaluation to the wrapped tracker."""
        self._add(lambda one: one.evaluated(phase, rates))

    def swapped(self, report: SwapReport) -> None:
        """Forwards a weight swap to the wrapped tracker."""
        self._add(lambda one: one.swapped(report))

    def judged(self, version: int, outcome: str, reason: str) -> None:
        """Forwards a decision of the gate to the wrapped tracker."""
        self._add(lambda one: one.judged(version, outcome, reason))

    def close(self) -> None:
        """Waits at most `close_s` seconds until the wrapped tracker has handled the waiting events and closed, and
        logs a warning if it has not. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._events.put(None, timeout=self._close_s / 2)
        except queue.Full:
            pass
        else:
            self._thread.join(self._close_s / 2)
        if self._thread.is_alive():
            log.warning("tracker %s did not close within %g s; its last events may be missing", self._name, self._close_s)

    def _add(self, event: Event, *, most: int = MAX_EVENTS) -> None:
        if self._closed:
            return
        if self._events.qsize() < most:  # no other thread adds events
            self._events.put_nowait(event)
            return
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4, ...
            log.warning("tracker %s is slower than the run: %d events were dropped", self._name, self.dropped)

    def _run(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._opened.set()
        while (event := self._events.get()) is not None:
            with user_code.logging_faults(f"tracker {self._name}"):
                event(tracker)
        with user_code.logging_faults(f"closing tracker {self._name}"):
            tracker.close()
