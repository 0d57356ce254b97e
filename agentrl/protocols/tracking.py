"""Who hears of a run's figures, as structural types: part of `agentrl.protocols`, which has them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.records import Group


class Interval(Protocol):
    """A mean over `n` episodes and its 95% confidence interval."""

    @property
    def value(self) -> float: ...

    @property
    def ci_low(self) -> float: ...

    @property
    def ci_high(self) -> float: ...

    @property
    def n(self) -> int: ...


class Tracker(Protocol):
    """Hears what happens in a run, in the driver, on one thread. A factory gets the run folder and the recipe.

    A tracker that inherits from this class writes the methods that it needs: the others do nothing. What one raises is logged, and
    the run goes on; one that takes long keeps the run waiting.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a finished step, which counts from 1; a value may be NaN or infinite."""
        return None

    def alert(self, text: str) -> None:
        """What a person must not miss, such as an update that was left out. May hold an agent's words."""
        return None

    def stage(self, name: str, detail: str = "") -> None:
        """The run enters a stage; it may enter one again."""
        return None

    def progress(self, index: int, group: Group) -> None:
        """Group `index` was scored, or left out."""
        return None

    def evaluating(self, done: int, total: int) -> None:
        """So many of the tasks of one evaluation are done."""
        return None

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """The result of one evaluation ("before", "step8", "after"), by split."""
        return None

    def close(self) -> None:
        """The run has ended. Idempotent."""
        return None
