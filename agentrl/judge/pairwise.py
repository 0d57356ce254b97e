"""A judge that compares two answers. The model sees the two answers in both orders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.judge import verdict
from agentrl.judge.model import ModelJudge
from agentrl.judge.query import ChatQuery, JudgeAnswer
from agentrl.judge.rendering import MAX_ANSWER, answer_text, question_text, reference_text
from agentrl.judge.untrusted import truncate_middle
from agentrl.records import Episode, Score, Task

Side = Literal["first", "second", "tie"]

_SIDES = ("A", "B", "tie")
_VALUES: Mapping[str, float] = {"first": 1.0, "tie": 0.5, "second": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A judge's comparison of two answers in both orders."""

    better: Side | None  # None if a verdict is missing or the two orders contradict each other
    shown: tuple[str, str] = ("", "")  # verdicts with the first answer shown as A, then as B: "A", "B", "tie" or ""
    answer: JudgeAnswer
    reasons: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairwise(ModelJudge):
    """Compares two answers. As a verifier, it compares the agent's answer with the reference answer: 1 means better, 0.5 equal, 0 worse.

    Each comparison consists of two queries, of which the second shows the answers in the reverse order. If the two verdicts contradict each
    other, for example because of position bias, the episode is unscored. Answers with the same text are equal without a query.
    """

    criteria: str = "Prefer the answer that is right and does what the question asks; length and tone do not count."

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Compares the episode's answer with the task's reference answer.

        Without a reference answer, the episode is unscored. An answer without content scores 0 without a call to the model.
        """
        reference = reference_text(task, self.reference)
        if reference is None:
            return Score(value=None, reason=f"{self.name}: the task has no reference in data[{self.reference!r}]")
        if reason := self._non_answer(task, episode):
            return Score(value=0.0, evidence=f"{self.name}: {reason}")
        comparison = await self.compare(question_text(task), answer_text(episode), reference)
        if comparison.better is None:
            return self._unscored(comparison.answer)
        return Score(value=_VALUES[comparison.better], evidence=f"{self.name}: {comparison.better}; {comparison.reasons}")

    async def compare(self, problem: str, first: str, second: str) -> Comparison:
        """Compares two answers to the question `problem`, and returns which answer is better."""
        client = self._client()
        if first.strip() == second.strip():  # a preference for a position would leave such a pair without a verdict
            return Comparison(better="tie", shown=("tie", "tie"), answer=JudgeAnswer(), reasons="the answers are the same")
        queries = self._query(problem, first, second), self._query(problem, second, first)
        answers = await asyncio.gather(*(client.ask(query, _read) for query in queries))
        sides: list[str] = ["" if answer.verdict is None else answer.verdict[0] for answer in answers]
        shown = (sides[0], sides[1])
        if (failed := next((answer for answer in answers if answer.verdict is None), None)) is not None:
            return Comparison(better=None, shown=shown, answer=failed)
        better = _side(sides[0], a="first", b="second")
        if better != _side(sides[1], a="second", b="first"):
            reason = f"it prefers {sides[0]} in one order and {sides[1]} in the other"
            return Comparison(better=None, shown=shown, answer=JudgeAnswer(reason=reason, text=answers[0].text))
        return Comparison(better=better, shown=shown, answer=answers[0], reasons=answers[0].verdict[1])

    def _query(self, problem: str, a: str, b: str) -> ChatQuery:
        texts = {"question": problem, "answer a": a, "answer b": b}
        data = {name: truncate_middle(text, MAX_ANSWER) for name, text in texts.items()}
        return ChatQuery(instructions=self._instructions(), data=data, schema=_SCHEMA)

    def _instructions(self) -> str:
        return (
            "You compare two answers, A and B, to one question. Say which is better: A, B, or tie where neither is. "
            f"{self.criteria} The place of an answer means nothing. Keep the reasoning short."
        )

    def _asks(self) -> dict[str, Any]:
        return {"instructions": self._instructions(), "reference": self.reference}


_SCHEMA = verdict.schema({"better": {"type": "string", "enum": list(_SIDES)}})


def _read(fields: dict[str, Any]) -> tuple[str, str]:
    return verdict.choice(fields, "better", _SIDES), verdict.reasoning(fields)


def _side(choice: str, *, a: Side, b: Side) -> Side:
    return a if choice == "A" else b if choice == "B" else "tie"
