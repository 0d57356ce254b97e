"""Scores an answer of the `reasoning` family with the scorer of its dataset.

The scorers are reasoning-gym's, and read what a model wrote. They run in a process of their own (`rewards.reasoning_scorers`), with
bounds on time and memory, and see no answer that is not in its dataset's language (`sandboxes.reasoning.catalogue`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from agentrl.base.scores import ROUNDING, is_at_least
from agentrl.records import Episode, Score, Task
from agentrl.reward.worker import QUEUE_TIMEOUT_S
from rewards.reasoning_scorers import CallFailed, CallTimeout, Scorers
from sandboxes.reasoning.catalogue import speaks

LONGEST = 1000
"""Characters of an answer that are looked at; four times the true one's where that is more."""
SHOWN = 80  # characters of an answer quoted as evidence

_scorers = Scorers()
_asking = ThreadPoolExecutor(1, thread_name_prefix="reasoning")
"""Of its own, because answers wait for one another here: whoever stops waiting is never asked about, and nothing else waits with them."""


class OwnScorer:
    """Full marks of the dataset's own scorer, or nothing."""

    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """1.0 when the dataset's own scorer gives full marks to an answer that is the truth alone, else 0.0. Marks are kept as a part.

        Parts: `exact`, the value again, and `partial`, the scorer's mark as it is. Many pay 0.01 or 0.05 for any answer of the right form,
        which is why partial marks are no reward here. White space at both ends of an answer plays no part. No answer, a huge one, and one
        that is not in its dataset's language are wrong. So is one at which the scorer raises, exceeds its bounds twice, or gives something
        else than a number from 0 to 1, when it gives the truth full marks: or an agent could choose which of its answers count. When it
        fails at the truth, too, the answer is unscored.

        Raises `TaskError` when the package no longer makes the task's problem.
        """
        truth, origin = str(task.data["answer"]), task.data["origin"]
        name = str(origin["dataset"])
        answer = (episode.answer or "").strip()
        if wrong := _wrong(name, answer, truth):
            return Score(value=0.0, parts={"exact": 0.0, "partial": 0.0}, evidence=wrong)
        mark, problem = await _marked(origin, truth, answer)
        if problem and is_at_least((await _marked(origin, truth, truth))[0], 1.0):  # the scorer is sound, so the answer is not
            mark, problem = await _marked(origin, truth, answer)  # once more: the machine may have been slow
            if problem:
                return Score(value=0.0, parts={"exact": 0.0, "partial": 0.0}, evidence=f"at answer {answer[:SHOWN]!r} the scorer {problem}")
        if problem:
            return Score(value=None, reason=f"reasoning-gym's scorer of {name} {problem}")
        exact = float(is_at_least(mark, 1.0))
        return Score(
            value=exact,
            parts={"exact": exact, "partial": min(max(mark, 0.0), 1.0)},
            evidence=f"answer {answer[:SHOWN]!r}, truth {truth[:SHOWN]!r}, mark {mark:g}",
        )


async def _marked(origin: Any, truth: str, answer: str) -> tuple[float, str]:
    """The scorer's mark, from 0 to 1 but for rounding; or what was wrong instead."""
    try:
        mark = await asyncio.get_running_loop().run_in_executor(_asking, _scorers.mark, origin, truth, answer)
    except (CallFailed, CallTimeout) as error:
        return 0.0, str(error)
    if not -ROUNDING <= mark <= 1 + ROUNDING:  # NaN is not
        return 0.0, f"gave {mark}, which is no mark from 0 to 1"
    return mark, ""


def _wrong(name: str, answer: str, truth: str) -> str:
    """Why an answer is wrong without its scorer being asked; empty where it must be."""
    longest = max(LONGEST, 4 * len(truth))
    if not answer:
        return "no answer was given"
    if len(answer) > longest:
        return f"answer of {len(answer)} characters is longer than {longest}"
    return "" if speaks(name, answer) else f"answer {answer[:SHOWN]!r} is not in the language of {name}"


own_scorer = OwnScorer()
