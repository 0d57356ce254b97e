"""Sources of tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from agentrl.records import Split, Task


class TaskFamily(Protocol):
    """A source of tasks. `task(split, index)` is a pure function of the family's seed, split and index."""

    name: str

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split; None if the split is infinite."""

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index in a split."""
        ...


class GoldFamily(TaskFamily, Protocol):
    """A family that provides the correct answers, for `agentrl check` and for practice."""

    def gold(self, task: Task) -> str:
        """Returns the Python source of the gold solution. When this program runs in the task's sandbox, it prints the correct answer."""
        ...


class VariedFamily(GoldFamily, Protocol):
    """A family that can generate variants of its tasks, as practice after failures."""

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        """Yields pairs for the same skill: the relation to `task` (alike, harder, easier or the family's own label), and a training task.

        The sequence of variants depends only on the content of the task and the seed. The sequence may be infinite. `gold` must also return
        solutions for the variants.
        """
