"""Scores an answer of the `tables` family against the truth in the task."""

from __future__ import annotations

import math

from agentrl.records import Episode, Score, Task

RELATIVE = 1e-6
LONGEST = 1000  # characters of an answer that are looked at; every true answer is far shorter
SHOWN = 80  # characters of an answer quoted as evidence


async def exact_answer(task: Task, episode: Episode) -> Score:
    """1.0 when the submitted answer is the truth, else 0.0.

    Text is compared after stripping white space at both ends. Where the truth is a number, any finite decimal notation of a
    number within 1e-6 relative, or within the task's absolute `tolerance` (half a unit of the second decimal for totals and
    averages, so both rounded and exact answers count), is right. No answer, or a huge one, is wrong: a score of 0.0.
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
    return answer.strip() == truth or _same_number(answer.strip(), truth, tolerance)


def _same_number(answer: str, truth: str, tolerance: float) -> bool:
    given, wanted = _number(answer), _number(truth)
    if given is None or wanted is None:
        return False
    return abs(given - wanted) <= max(tolerance, RELATIVE * abs(wanted))


def _number(text: str) -> float | None:
    """A finite number in plain ASCII decimal or scientific notation, or None (`nan`, `inf`, `1e999`, `1_000`, `٣` are none)."""
    if not text.isascii() or "_" in text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
