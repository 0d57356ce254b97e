"""Task weighting: tasks whose recent attempts have different scores are used more often.

A group with equal scores provides no training signal, and a task that is nearly always solved leaves little to learn. Both properties are
estimated from the task's recent groups, with the rates of its kind as the prior. A few groups of a kind that is never solved are therefore
evidence about all tasks of that kind.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from agentrl.base.numbers import is_above
from agentrl.records import Group, Task, codec

MOST_KIND = 200  # maximum length of a kind's name, in characters
TASK_WINDOW, KIND_WINDOW = 8, 64
"""Numbers of newest groups, per task and per kind, that determine a weight. These numbers are small, because the policy changes with every
step."""
PRIOR = 4.0
"""Number of groups of a task that have as much influence on its weight as the rates of its kind."""
MIN_WEIGHT = 0.1
"""Minimum probability that a drawn task is accepted. It is not 0, so that a kind that was never solved is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The properties of one group's scores that weighting needs."""

    __pydantic_config__: ClassVar[Any] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}  # for agentrl.records.codec

    group: int
    task: str  # `Task.id`
    key: str  # `Task.key`
    kind: str
    counted: int  # number of scored attempts
    lowest: float
    mean: float
    highest: float  # highest score; 0.0 if there are no scores, as for `lowest` and `mean`
    broken: bool  # whether no attempt was scored because of a task fault

    @classmethod
    def from_group(cls, task: Task, group: Group) -> GroupOutcome:
        """Returns the outcome of a finished group."""
        kind = task.kind[:MOST_KIND]
        blank = cls(
            group=group.index, task=task.id, key=group.task_key, kind=kind, counted=0, lowest=0.0, mean=0.0, highest=0.0, broken=False
        )
        return blank.with_scores(group)

    def with_scores(self, group: Group) -> GroupOutcome:
        """Returns the outcome of the same task with the current scores of the group."""
        scores = [scored.score.value for scored in group.scored if scored.score.value is not None]
        return replace(
            self,
            counted=len(scores),
            lowest=min(scores, default=0.0),
            mean=sum(scores) / max(len(scores), 1),
            highest=max(scores, default=0.0),
            broken=not scores and group.fault is not None,
        )

    @property
    def has_spread(self) -> bool:
        """Whether the attempts have different scores."""
        return is_above(self.highest, self.lowest)

    @property
    def headroom(self) -> float:
        """The difference between 1 and the mean score, limited to the range from 0 to 1; 0 for a broken task."""
        return 0.0 if self.broken else min(max(1.0 - self.mean, 0.0), 1.0)

    @classmethod
    def from_line(cls, line: bytes) -> GroupOutcome | None:
        """Parses a line that `agentrl.records.codec` wrote. Returns None if the line is invalid or has scores that are not finite."""
        try:
            return codec.from_json(cls, line)
        except ValueError:
            return None


class Tally(NamedTuple):
    """Counts over the newest groups of a task or of a kind."""

    groups: int
    differed: int  # number of groups with different scores
    headroom: float  # sum over the groups

    def rates(self, prior: tuple[float, float], strength: float) -> tuple[float, float]:
        """Returns the estimated fraction of groups with different scores, and the estimated headroom. `strength`: number of groups to which
        the prior is equivalent."""
        total = strength + self.groups
        return (strength * prior[0] + self.differed) / total, (strength * prior[1] + self.headroom) / total


NO_GROUPS = Tally(0, 0, 0.0)


@dataclass(frozen=True)
class Weights:
    """Weights of tasks, between `MIN_WEIGHT` and 1. They are relative to the kind with the largest weight, which has weight 1.

    A weight is the probability that the next group has different scores, times the headroom, which is 1 minus the mean score. Both factors
    are estimated from the n newest groups. If s is the sum over these groups, the estimate is (PRIOR * r + s) / (PRIOR + n) for a task,
    where r is the rate of its kind, and (1 + s) / (1 + n) for a kind.
    """

    tasks: Mapping[str, Tally]  # by `Task.key`, for the tasks that were used
    kinds: Mapping[str, Tally]

    def weight_of(self, task: Task) -> float:
        """Returns the weight of a task."""
        rates = _kind_rates(self.kinds.get(task.kind[:MOST_KIND], NO_GROUPS))
        if self.tasks:  # the check avoids computing a key, which hashes the full task
            rates = self.tasks.get(task.key, NO_GROUPS).rates(rates, PRIOR)
        return min(1.0, max(MIN_WEIGHT, rates[0] * rates[1] / self._best))

    @cached_property
    def _best(self) -> float:
        return max((differed * headroom for differed, headroom in map(_kind_rates, self.kinds.values())), default=1.0)

    def accepts(self, task: Task, *, seed: int, group: int, turn: int) -> bool:
        """Whether a group that has already skipped `turn` tasks uses this task. The result is deterministic."""
        return random.Random(f"{seed}/{group}/{turn}/weight").random() < self.weight_of(task)


def _kind_rates(tally: Tally) -> tuple[float, float]:
    """Returns the two estimates of `Tally.rates` for a kind.

    They are never 0, and they are 1 if the kind has no groups, so that the kind is tried.
    """
    return tally.rates((1.0, 1.0), 1.0)


class TaskHistory:
    """The recent groups of each kind, and of each task if `by_task` is set. Call `add` in the order of the steps."""

    def __init__(self, *, min_group_size: int, by_task: bool) -> None:
        self._counts = min_group_size
        self._by_task = by_task
        self._tasks = _RecentGroups(TASK_WINDOW)
        self._kinds = _RecentGroups(KIND_WINDOW)

    def add(self, groups: Iterable[GroupOutcome]) -> None:
        """Adds groups. Skips groups with fewer scored attempts than the learner needs, except those of broken tasks."""
        for outcome in groups:
            if outcome.broken or outcome.counted >= self._counts:
                self._kinds.note(outcome.kind, outcome)
                if self._by_task:
                    self._tasks.note(outcome.key, outcome)

    def weights(self) -> Weights:
        """Returns a copy of the current weights."""
        return Weights(self._tasks.tallies.copy(), self._kinds.tallies.copy())


class _RecentGroups:
    """The newest groups by name, as pairs (whether the scores differ, headroom), and their tallies."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._groups: dict[str, deque[tuple[bool, float]]] = {}
        self.tallies: dict[str, Tally] = {}

    def note(self, name: str, outcome: GroupOutcome) -> None:
        groups = self._groups.setdefault(name, deque(maxlen=self._window))
        groups.append((outcome.has_spread, outcome.headroom))
        self.tallies[name] = Tally(len(groups), sum(differed for differed, _ in groups), sum(headroom for _, headroom in groups))
