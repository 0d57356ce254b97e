"""Trackers: receivers of the metrics and events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.records import Group


class Interval(Protocol):
    """A mean over `n` episodes with its 95% confidence interval."""

    @property
    def value(self) -> float:
        """The mean."""
        ...

    @property
    def ci_low(self) -> float:
        """Lower bound of the interval."""
        ...

    @property
    def ci_high(self) -> float:
        """Upper bound of the interval."""
        ...

    @property
    def n(self) -> int:
        """Number of episodes."""
        ...


class Tracker(Protocol):
    """Receives the metrics and events of a run, in the driver, on a thread of its own. Its factory receives the run folder and the recipe.

    A tracker inherits from this class and overrides the methods that it needs; the others do nothing. An exception is logged. A tracker
    that is slow or hangs does not delay the run: events wait in a queue of 1,024, and further ones are dropped.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a finished step. Steps count from 1; a value may be NaN or infinite."""
        return None

    def alert(self, text: str) -> None:
        """Called with a warning for the user, such as a skipped update. It may contain text of an agent."""
        return None

    def stage(self, name: str, detail: str = "") -> None:
        """Called when the run enters a stage. A run may enter a stage several times."""
        return None

    def progress(self, index: int, group: Group) -> None:
        """Called when group `index` was scored or excluded."""
        return None

    def evaluating(self, done: int, total: int) -> None:
        """Progress of an evaluation, in tasks."""
        return None

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """The result of an evaluation ("before", "step8", "after"), by split."""
        return None

    def close(self) -> None:
        """The run has ended. Idempotent."""
        return None
