"""Scores an answer to a task from the `reasoning` family with the scorer for its dataset.

The scorers belong to reasoning-gym and parse a model's text. They run in a subprocess (`rewards.reasoning_scorers`) with limits on time and
memory, and receive only answers in their dataset's alphabet (`sandboxes.reasoning.catalogue`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from agentrl.base.numbers import ROUNDING, is_at_least
from agentrl.records import Episode, Score, Task
from agentrl.reward.worker import QUEUE_TIMEOUT_S
from rewards.reasoning_scorers import CallFailed, CallTimeout, Scorers
from sandboxes.reasoning.catalogue import speaks

LONGEST = 1000
"""Maximum length of an answer in characters. If four times the length of the truth is more, that is the maximum."""
SHOWN = 80  # maximum number of characters of an answer that the evidence quotes

_scorers = Scorers()
_asking = ThreadPoolExecutor(1, thread_name_prefix="reasoning")
"""A separate executor, because requests wait for each other in it. A cancelled request is never sent, and other work does not wait."""


class OwnScorer:
    """1 if the dataset's scorer gives full marks, else 0."""

    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Returns 1.0 if the dataset's scorer gives full marks and the answer contains only the truth, else 0.0.

        The part `exact` equals the value, and the part `partial` is the scorer's mark. Partial marks are not a reward, because many scorers
        give 0.01 or 0.05 to any answer in the correct form. Missing, very long and malformed answers are wrong. An answer is also wrong if
        the scorer raises an error, exceeds its limits twice, or returns an invalid mark, but gives full marks to the truth. If such answers
        were unscored, an agent could submit one to avoid a score of 0. If the scorer also fails on the truth, the answer is unscored.

        Raises `TaskError` if the package no longer generates the task's problem.
        """
        truth, origin = str(task.data["answer"]), task.data["origin"]
        name = str(origin["dataset"])
        answer = (episode.answer or "").strip()
        if wrong := _wrong(name, answer, truth):
            return Score(value=0.0, parts={"exact": 0.0, "partial": 0.0}, evidence=wrong)
        mark, problem = await _marked(origin, truth, answer)
        if problem and is_at_least((await _marked(origin, truth, truth))[0], 1.0):  # the scorer works, so the answer is the cause
            mark, problem = await _marked(origin, truth, answer)  # retry: the machine may have been slow
            if problem:
                return Score(value=0.0, parts={"exact": 0.0, "partial": 0.0}, evidence=f"answer {answer[:SHOWN]!r}: the scorer {problem}")
        if problem:
            return Score(value=None, reason=f"reasoning-gym's scorer of {name} {problem}")
        exact = float(is_at_least(mark, 1.0))
        return Score(
            value=exact,
            parts={"exact": exact, "partial": min(max(mark, 0.0), 1.0)},
            evidence=f"answer {answer[:SHOWN]!r}, truth {truth[:SHOWN]!r}, mark {mark:g}",
        )


async def _marked(origin: Any, truth: str, answer: str) -> tuple[float, str]:
    """Returns the scorer's mark, from 0 to 1 within rounding, and the problem if there is no mark."""
    try:
        mark = await asyncio.get_running_loop().run_in_executor(_asking, _scorers.mark, origin, truth, answer)
    except (CallFailed, CallTimeout) as error:
        return 0.0, str(error)
    if not -ROUNDING <= mark <= 1 + ROUNDING:  # also rejects NaN
        return 0.0, f"returned {mark}, which is not from 0 to 1"
    return mark, ""


def _wrong(name: str, answer: str, truth: str) -> str:
    """Returns why an answer is wrong without a call to the scorer; empty if the scorer must decide."""
    longest = max(LONGEST, 4 * len(truth))
    if not answer:
        return "no answer was submitted"
    if len(answer) > longest:
        return f"the answer has {len(answer)} characters, more than {longest}"
    return "" if speaks(name, answer) else f"answer {answer[:SHOWN]!r} does not have the form of {name}"


own_scorer = OwnScorer()
