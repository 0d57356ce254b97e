"""The cases of suites as a task family: what the recipe of an evaluation names as its tasks where nobody wrote a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.rollout import SUITE_FAMILY
from agentrl.errors import TaskError
from agentrl.failure.case import Suite, load_suite
from agentrl.records import Split, Task

REFERENCE = SUITE_FAMILY
_BETWEEN = "\n"


class SuiteTasks:
    """An `agentrl.protocols.TaskFamily` of cases. Nothing is learned from them: they are there to be evaluated.

    Args:
        folders: of the suites, absolute, a line each.
    """

    name = "suites"

    def __init__(self, *, seed: int, folders: str) -> None:
        self._tasks = [case.task for folder in folders.split(_BETWEEN) for case in load_suite(Path(folder)).cases]

    def size(self, split: Split) -> int:
        return len(self._tasks) if split is Split.TRAIN else 0

    def task(self, split: Split, index: int) -> Task:
        return self._tasks[index % len(self._tasks)]

    def gold(self, task: Task) -> str:
        raise TaskError(f"case {task.id!r} has no gold solution: it was captured, not made")


def suite_task_options(suites: Sequence[Suite]) -> dict[str, str]:
    """`tasks.options` of a recipe whose tasks these are."""
    return {"folders": _BETWEEN.join(str(suite.folder.resolve()) for suite in suites)}
