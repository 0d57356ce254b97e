"""Counts the operations in progress in a driver and its rollout workers, by kind, for the timeline of a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

REPORT_S = 5.0
"""Seconds after which a report from another process no longer counts."""


class Activity:
    """Counts the operations in progress, by kind, in this process and in processes that report their counts. Use an instance from only one
    event loop."""

    def __init__(self) -> None:
        self._running = Counter[str]()
        self._reports: dict[str, tuple[float, Mapping[str, int]]] = {}  # process -> when it reported, and its operations

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        """Counts the `with` block as one operation of kind `kind` while it runs."""
        self._running[kind] += 1
        try:
            yield
        finally:
            self._running[kind] -= 1

    def count(self, kind: str) -> int:
        """Returns the number of operations of kind `kind` in progress here and in the processes that reported in the last `REPORT_S` s."""
        oldest = time.monotonic() - REPORT_S
        return self._running[kind] + sum(counts.get(kind, 0) for at, counts in self._reports.values() if at > oldest)

    def own(self) -> dict[str, int]:
        """Returns the number of operations in progress in this process, by kind."""
        return dict(self._running)

    def report(self, process: str, counts: Mapping[str, int]) -> None:
        """Replaces the last counts reported by process `process` with `counts`."""
        self._reports[process] = time.monotonic(), counts

    def drop_reports(self) -> None:
        """Discards the counts that other processes reported."""
        self._reports.clear()


ACTIVITY = Activity()
"""The operations of this driver and its rollout workers."""
GROUPS, ATTEMPTS, SANDBOXES, SCORING, REQUESTS = "groups", "attempts", "sandboxes", "scoring", "requests"
"""Kinds: running groups; running attempts; opening a sandbox or a call in one; scoring an episode or a group; requests that the driver
sends for its workers."""
