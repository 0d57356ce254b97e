"""Sources of tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from agentrl.records import Split, Task


class TaskFamily(Protocol):
    """A source of tasks. `task(split, index)` is a pure function of the family's seed, split and index."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of tasks in the split; None when generated without end."""

    def task(self, split: Split, index: int) -> Task: ...

    def gold(self, task: Task) -> str:
        """Python source of the gold solution: run in the task's sandbox, it prints the right answer."""


class VariedFamily(TaskFamily, Protocol):
    """A family that makes other tasks like a given one of its own: the practice for a failure."""

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        """Training tasks that ask for the same skill: how each stands to `task` (alike, harder, easier, or a word of its own), and it.

        A pure function of the task's content and the seed, with or without an end. `gold` solves them as it does any other task.
        """
