"""Sources of tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from agentrl.records import Split, Task


class TaskFamily(Protocol):
    """A source of tasks. `task(split, index)` is a pure function of the family's seed, split and index."""

    name: str

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split; None if it is endless."""

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of a split."""
        ...


class GoldFamily(TaskFamily, Protocol):
    """A family that knows the right answers, for `agentrl check` and practice."""

    def gold(self, task: Task) -> str:
        """Python source of the gold solution. Run in the sandbox of the task, it prints the right answer."""
        ...


class VariedFamily(GoldFamily, Protocol):
    """A family that can generate variants of its tasks, as practice for failures."""

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        """Yields training tasks for the same skill, each with its relation to `task`: alike, harder, easier or a label of the family.

        A pure function of the content of the task and the seed; may be endless. `gold` must solve the variants too.
        """
