"""Which training tasks are given more often: those whose attempts were lately scored differently from one another.

A group whose attempts all score the same trains nothing, solved or not; and what is solved nearly always has little left to teach. Both
are read off a task's own last groups, and for a task that was never given off those of its kind.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from agentrl.base.scores import is_above
from agentrl.config.tasks import WeightingConfig
from agentrl.records import Group, Task, codec

MOST_KIND = 200  # characters of a kind's name that are kept: a family may name it as it likes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What one group of a task of the family was worth to the learner."""

    __pydantic_config__: ClassVar[Any] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}  # for agentrl.records.codec

    group: int
    task: str
    """`Task.id`."""
    key: str
    """`Task.key`."""
    kind: str
    counted: int
    """Attempts that were scored."""
    lowest: float
    mean: float
    highest: float
    """Of their scores; 0.0 where there are none."""
    broken: bool
    """Whether no attempt was scored for a fault of the task itself."""

    @classmethod
    def from_group(cls, task: Task, group: Group) -> GroupOutcome:
        scores = [one.score.value for one in group.scored if one.score.value is not None]
        return cls(
            group=group.index,
            task=task.id,
            key=group.task_key,
            kind=task.kind[:MOST_KIND],
            counted=len(scores),
            lowest=min(scores, default=0.0),
            mean=sum(scores) / max(len(scores), 1),
            highest=max(scores, default=0.0),
            broken=not scores and group.fault is not None,
        )

    @property
    def has_spread(self) -> bool:
        """Whether some attempts were scored higher than others."""
        return is_above(self.highest, self.lowest)

    @property
    def headroom(self) -> float:
        """How far the attempts were from a score of 1, from 0 to 1; nothing can be learned from a broken task."""
        return 0.0 if self.broken else min(max(1.0 - self.mean, 0.0), 1.0)

    @classmethod
    def from_line(cls, line: bytes) -> GroupOutcome | None:
        """Of a line that `agentrl.records.codec` wrote; None for what is none, and for one with scores that are not finite."""
        try:
            return codec.from_json(cls, line)
        except ValueError:
            return None


@dataclass(frozen=True)
class Weights:
    """How often tasks are given, against the kind that is given most often, which has 1. Never below `least`.

    The weight of a task, or of a kind, of whose newest n groups (at most `window`) s had attempts that scored differently, with a mean
    score of m, is (1 + s) / (1 + n) * (1 - m): how likely its next group is to teach, times what is left to learn. One of which nothing
    is known has 1.
    """

    least: float
    tasks: Mapping[str, float]
    """`Task.key` -> weight, of those that were given."""
    kinds: Mapping[str, float]

    def weight_of(self, task: Task) -> float:
        weight = self.tasks.get(task.key) if self.tasks else None  # a key is a hash of all that the task holds
        if weight is None:
            weight = self.kinds.get(task.kind[:MOST_KIND], 1.0)
        return min(1.0, max(self.least, weight / self._best)) if self._best > 0 else 1.0

    @cached_property
    def _best(self) -> float:
        return max(self.kinds.values(), default=1.0)

    def accepts(self, task: Task, *, seed: int, group: int, turn: int) -> bool:
        """Whether the group is given this task, when `turn` others were passed over before it: always the same answer."""
        return random.Random(f"{seed}/{group}/{turn}/weight").random() < self.weight_of(task)


class TaskHistory:
    """The last groups of each kind, and with `by_task` of each task. `add` them in the order of their indices."""

    def __init__(self, config: WeightingConfig, *, min_group_size: int, by_task: bool) -> None:
        self._least = config.least
        self._counts = min_group_size
        self._by_task = by_task
        self._tasks = _Lately(config.window)
        self._kinds = _Lately(config.window)

    def add(self, groups: Iterable[GroupOutcome]) -> None:
        """Groups with fewer scored attempts than the learner takes tell nothing of their task; a broken one taught nothing."""
        for one in groups:
            if one.broken or one.counted >= self._counts:
                self._kinds.note(one.kind, one)
                if self._by_task:
                    self._tasks.note(one.key, one)

    def weights(self) -> Weights:
        """A copy: what is added later does not change it."""
        return Weights(self._least, self._tasks.weights.copy(), self._kinds.weights.copy())


class _Lately:
    """Of each name the newest groups, as whether their attempts were scored differently and their headroom, and the weight that follows."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._groups: dict[str, deque[tuple[bool, float]]] = {}
        self.weights: dict[str, float] = {}

    def note(self, name: str, one: GroupOutcome) -> None:
        groups = self._groups.setdefault(name, deque(maxlen=self._window))
        groups.append((one.has_spread, one.headroom))
        likely = (1 + sum(differed for differed, _ in groups)) / (1 + len(groups))
        self.weights[name] = likely * sum(headroom for _, headroom in groups) / len(groups)
