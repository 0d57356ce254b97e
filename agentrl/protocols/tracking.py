"""Receivers of what happens in a run: trackers in the driver, and listeners of episodes in every process that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.records import Cancelled, Episode, Group, ScoredEpisode, SwapReport, Task, Turn


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

    def swapped(self, report: SwapReport) -> None:
        """Handles that the servers have swapped to a version."""
        return None

    def judged(self, version: int, outcome: str, reason: str) -> None:
        """Handles the gate's decision on a version; `outcome` is a `GateOutcome`."""
        return None

    def close(self) -> None:
        """The run has ended. Idempotent."""
        return None


class EpisodeListener(Protocol):
    """Receives what happens in episodes, also of evaluations, in the process that runs them.

    A listener inherits from this class and overrides the methods that it needs; the others do nothing. It is called on the event loop
    between the steps of an episode, so it must return at once, and it must not raise.
    """

    def started(self, task: Task, episode_id: str, *, group: int | None, attempt: int, turns: int) -> None:
        """Handles the start of an attempt. `turns`: number of saved turns that it continues. `group` is None outside of groups."""
        return None

    def turn_ended(self, episode_id: str, trajectory: int, number: int, agent: str, turn: Turn) -> None:
        """Handles turn `number` of a trajectory, which has no tool results yet."""
        return None

    def tools_ended(self, episode_id: str, trajectory: int, number: int, turn: Turn) -> None:
        """Handles the same turn with its tool results."""
        return None

    def ended(self, episode: Episode) -> None:
        """Handles the end of an attempt, also of a failed one, which may be retried."""
        return None

    def cancelled(self, attempt: Cancelled) -> None:
        """Handles the end of an attempt without a record."""
        return None

    def scored(self, scored: ScoredEpisode) -> None:
        """Handles the score of an attempt, or the reason why it has none. Late parts may still arrive."""
        return None


class SilentListener(EpisodeListener):
    """A listener that does nothing."""
