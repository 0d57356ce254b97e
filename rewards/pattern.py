"""Checks answers with regular expressions: the answer must match the task's pattern.

    rewards.pattern:pattern                              with task.data = {"answer": "INV-[0-9]{6}"}
    date = Pattern(pattern=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")     in rewards/mine.py, referenced as rewards.mine:date

Python's `re` can take hours to match an adversarial string, for example with the pattern (a+)+b, and a thread cannot be stopped. Matching
therefore runs in a subprocess with a deadline. An answer that exceeds the deadline twice counts as not matching.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, MAX_ANSWER_CHARS, ConfiguredVerifier, answer_of, zero_score
from agentrl.reward.worker import QUEUE_TIMEOUT_S, AnswerFault, SubprocessWorker

DEADLINE_S = 2.0


class Pattern(ConfiguredVerifier):
    """Scores 1 if the full answer matches, else 0. The pattern is `pattern` or, if `pattern` is empty, the truth. Settings are in
    `task.data["pattern"]`.

    White space at both ends of the answer is ignored, and an empty answer scores 0. Digits and word characters are ASCII, as with
    `re.ASCII`.
    """

    name: ClassVar[str] = "pattern"
    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S

    pattern: str = ""
    """Empty: the task's truth is the pattern."""
    anywhere: bool = False
    """Whether it is sufficient that a part of the answer matches."""
    case: bool = True
    """Whether matching is case-sensitive."""
    longest: int = Field(MAX_ANSWER_CHARS, gt=0)
    """Maximum length in characters; a longer answer is wrong."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, text: str) -> str:
        try:
            re.compile(text, re.ASCII)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{text[:EVIDENCE_CHARS]!r} is not a valid pattern: {error}") from None
        return text

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the answer. Raises `TaskError` if the truth or a setting is invalid."""
        rules = self.for_task(task)
        wanted = rules.pattern or rules.truth_of(task)
        try:
            if not isinstance(wanted, str) or not wanted:
                raise ValueError("a pattern must be a non-empty string")
            self._compiles(wanted)
        except ValueError as error:
            raise TaskError(f"task {task.id}: {error}") from None
        text, problem = answer_of(episode, longest=rules.longest)
        if problem:
            return zero_score(problem)
        evidence = f"answer {text[:EVIDENCE_CHARS]!r}, pattern {wanted[:EVIDENCE_CHARS]!r}"
        request = {"pattern": wanted, "text": text, "anywhere": rules.anywhere, "case": rules.case}
        try:
            matches = await _worker.evaluate(request, control=request | {"text": ""})
        except AnswerFault as error:
            return zero_score(f"{evidence}: matching {error}")
        return Score(value=float(matches), evidence=evidence)


def verdict(request: Mapping[str, Any]) -> bool:
    """Whether the text in the request matches the pattern in the request. Runs in the subprocess."""
    compiled = re.compile(request["pattern"], re.ASCII | (0 if request["case"] else re.IGNORECASE))
    match = compiled.search if request["anywhere"] else compiled.fullmatch
    return match(request["text"]) is not None


_worker = SubprocessWorker(verdict, deadline_s=DEADLINE_S, memory=1 << 30, processes=2)
pattern = Pattern()
