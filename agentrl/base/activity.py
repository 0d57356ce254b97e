"""Counts the driver's operations in progress, by kind, for the timeline of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """The number of operations in progress, by kind. Use it from one event loop."""

    def __init__(self) -> None:
        self._running = Counter[str]()

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        """Counts the block as one operation of a kind."""
        self._running[kind] += 1
        try:
            yield
        finally:
            self._running[kind] -= 1

    def count(self, kind: str) -> int:
        """Returns the number of operations of a kind in progress."""
        return self._running[kind]


ACTIVITY = Activity()
"""The operations of this driver."""
GROUPS, ATTEMPTS, SANDBOXES, SCORING = "groups", "attempts", "sandboxes", "scoring"
"""Kinds: running groups and attempts; opening a sandbox or a call in one; scoring an episode or a group."""
