"""Scores an answer to a task from the `tables` family by comparing it with the task's truth."""

from __future__ import annotations

import math
from typing import Any

from agentrl.base.numbers import parse_number, same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task

RELATIVE = 1e-6
LONGEST = 1000  # maximum length of an answer in characters; true answers are far shorter
SHOWN = 80  # maximum number of characters of an answer that the evidence quotes


async def exact_answer(task: Task, episode: Episode) -> Score:
    """Returns 1.0 if the submitted answer equals the truth, else 0.0.

    Text is compared after stripping. If the truth is a number, the answer may be a number in any decimal notation, within a relative
    tolerance of 1e-6 or within the task's absolute `tolerance` (half a unit in the second decimal place for totals and averages, so that
    both rounded and exact answers are correct). `agentrl.base.numbers.same_number` compares the numbers; two whole numbers must be equal. A
    missing or very long answer is wrong. Raises `TaskError` if the tolerance is invalid.
    """
    truth, tolerance = str(task.data["answer"]), valid_tolerance(task, task.data.get("tolerance", 0.0))
    if episode.answer is None:
        return Score(value=0.0, evidence="no answer was submitted")
    if len(episode.answer) > LONGEST:
        return Score(value=0.0, evidence=f"the answer has {len(episode.answer)} characters, more than {LONGEST}")
    right = says(episode.answer, truth, tolerance)
    answer = episode.answer.strip()
    return Score(value=float(right), evidence=f"answer {answer[:SHOWN]!r}, truth {truth!r}")


def valid_tolerance(task: Task, tolerance: Any) -> float:
    """Returns an absolute tolerance of the task as a number. Raises `TaskError` if it is not a finite number of at least 0."""
    try:
        number = float(tolerance)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise TaskError(f"task {task.id}: the tolerance {str(tolerance)[:SHOWN]!r} is not a finite number of at least 0")
    return number


def says(answer: str, truth: str, tolerance: float = 0.0) -> bool:
    """Whether an answer equals the truth, as text or as a number within a relative 1e-6 or the absolute `tolerance`."""
    answer = answer.strip()
    if answer == truth:
        return True
    given, wanted = parse_number(answer), parse_number(truth)
    return given is not None and wanted is not None and same_number(given, wanted, relative=RELATIVE, absolute=tolerance)
