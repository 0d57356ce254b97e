"""The cases of suites as a task family, for the recipe of an evaluation without a user's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.rollout import SUITE_FAMILY
from agentrl.errors import TaskError
from agentrl.failure.case import Suite, load_suite
from agentrl.plugins.parts import Part
from agentrl.records import Split, Task

REFERENCE = SUITE_FAMILY
_BETWEEN = "\n"


class SuiteTasks:
    """An `agentrl.protocols.TaskFamily` of cases, for evaluation only.

    Args:
        folders: absolute paths of the suites, one per line.
    """

    name = "suites"

    def __init__(self, *, seed: int, folders: str) -> None:
        self._tasks = [case.task for folder in folders.split(_BETWEEN) for case in load_suite(Path(folder)).cases]

    def size(self, split: Split) -> int:
        """The number of cases; all are in the training split."""
        return len(self._tasks) if split is Split.TRAIN else 0

    def task(self, split: Split, index: int) -> Task:
        """Returns a case's task."""
        return self._tasks[index % len(self._tasks)]

    def gold(self, task: Task) -> str:
        """Raises `TaskError`, because captured cases have no gold solution."""
        raise TaskError(f"case {task.id!r} was captured and has no gold solution")


def suite_family(suites: Sequence[Suite]) -> Part:
    """Returns `tasks.family` for a recipe with these tasks."""
    return Part(REFERENCE, options={"folders": _BETWEEN.join(str(suite.folder.resolve()) for suite in suites)})
