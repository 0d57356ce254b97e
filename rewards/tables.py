"""Scores an answer of the `tables` family against the truth in the task."""

from __future__ import annotations

from agentrl.base.numbers import parse_number, same_number
from agentrl.records import Episode, Score, Task

RELATIVE = 1e-6
LONGEST = 1000  # characters of an answer that are looked at; every true answer is far shorter
SHOWN = 80  # characters of an answer quoted as evidence


async def exact_answer(task: Task, episode: Episode) -> Score:
    """1.0 when the submitted answer is the truth, else 0.0.

    Text is compared after stripping white space at both ends. If the truth is a number, the answer may be any decimal notation of a
    number within 1e-6 relative, or within the task's absolute `tolerance` (half a unit of the second decimal for totals and averages,
    so both rounded and exact answers count), as `agentrl.base.numbers.same_number` compares them: two whole numbers must be equal.
    No answer, or a huge one, is wrong: a score of 0.0.
    """
    truth = str(task.data["answer"])
    if episode.answer is None:
        return Score(value=0.0, evidence="no answer was submitted")
    if len(episode.answer) > LONGEST:
        return Score(value=0.0, evidence=f"answer of {len(episode.answer)} characters is longer than {LONGEST}")
    right = says(episode.answer, truth, float(task.data.get("tolerance", 0.0)))
    answer = episode.answer.strip()
    return Score(value=float(right), evidence=f"answer {answer[:SHOWN]!r}, truth {truth!r}")


def says(answer: str, truth: str, tolerance: float = 0.0) -> bool:
    """Whether an answer is the truth, as text or as a number."""
    answer = answer.strip()
    if answer == truth:
        return True
    given, wanted = parse_number(answer), parse_number(truth)
    return given is not None and wanted is not None and same_number(given, wanted, relative=RELATIVE, absolute=tolerance)
