"""Receivers of a run's events: trackers in the driver, and episode listeners in every process that runs episodes."""

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
    """Receives the metrics and events of a run in the driver, on a separate thread. The factory of a tracker receives the run folder and
    the recipe.

    A tracker inherits from this class and overrides the methods that it needs. Methods that are not overridden do nothing. An exception in
    a tracker is logged. A tracker that is slow or hangs does not delay the run: up to 1,024 events wait in a queue, and further events are
    dropped.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a finished step. Steps are numbered from 1. A value may be NaN or infinite."""
        return None

    def alert(self, text: str) -> None:
        """Called with a warning for the user, such as a skipped update. The warning may contain text from an agent."""
        return None

    def stage(self, name: str, detail: str = "") -> None:
        """Called when the run enters a stage. A run may enter a stage several times."""
        return None

    def progress(self, index: int, group: Group) -> None:
        """Called when group `index` was scored or excluded."""
        return None

    def evaluating(self, done: int, total: int) -> None:
        """Handles the progress of an evaluation or of sampling: the number of finished attempts and the total number of attempts."""
        return None

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """Handles the result of an evaluation. `phase` is "before", "step8" or "after", for example. `rates` maps split -> success rate."""
        return None

    def swapped(self, report: SwapReport) -> None:
        """Handles a swap of the servers to a different version."""
        return None

    def judged(self, version: int, outcome: str, reason: str) -> None:
        """Handles the gate's decision on a version; `outcome` is a `GateOutcome`."""
        return None

    def close(self) -> None:
        """Handles the end of the run. Idempotent."""
        return None


class EpisodeListener(Protocol):
    """Receives the events of episodes, including evaluation episodes, in the process that runs them.

    A listener inherits from this class and overrides the methods that it needs. Methods that are not overridden do nothing. A listener is
    called on the event loop between the steps of an episode, so it must return at once and must not raise an exception.
    """

    def started(self, task: Task, episode_id: str, *, group: int | None, attempt: int, turns: int) -> None:
        """Handles the start of an attempt. `turns`: number of saved turns from which the attempt resumes. `group` is None if the attempt
        belongs to no group."""
        return None

    def turn_ended(self, episode_id: str, trajectory: int, number: int, agent: str, turn: Turn) -> None:
        """Handles turn `number` of a trajectory. The turn has no tool results yet."""
        return None

    def tools_ended(self, episode_id: str, trajectory: int, number: int, turn: Turn) -> None:
        """Handles turn `number` of a trajectory again when its tool results are complete."""
        return None

    def ended(self, episode: Episode) -> None:
        """Handles the end of an attempt. A failed attempt may be retried."""
        return None

    def cancelled(self, attempt: Cancelled) -> None:
        """Handles the cancellation of an attempt. No episode is recorded for a cancelled attempt."""
        return None

    def scored(self, scored: ScoredEpisode) -> None:
        """Handles the score of an attempt, or the reason why the attempt has no score. Late parts of the score may still arrive."""
        return None


class SilentListener(EpisodeListener):
    """A listener that does nothing."""
