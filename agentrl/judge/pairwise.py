"""A judge that says which of two answers is better, asked twice with the answers in both places."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.judge import verdict
from agentrl.judge.model import ModelJudge, unscored
from agentrl.judge.non_answers import non_answer_reason
from agentrl.judge.query import ChatQuery, JudgeAnswer
from agentrl.judge.rendering import MAX_ANSWER, answer_text, question_text, reference_text, user_text
from agentrl.judge.untrusted import truncate_middle
from agentrl.records import Episode, Score, Task

Side = Literal["first", "second", "tie"]

_SIDES = ("A", "B", "tie")
_VALUES: Mapping[str, float] = {"first": 1.0, "tie": 0.5, "second": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a judge said of two answers in both orders. `better` None: it did not say, or said the two orders apart."""

    better: Side | None
    shown: tuple[str, str] = ("", "")  # what it said with the first answer in place A, and then in place B: "A", "B", "tie" or nothing
    answer: JudgeAnswer
    reasons: str = ""

    @property
    def consistent(self) -> bool:
        return self.better is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairwise(ModelJudge):
    """Compares two answers; as a verifier, the agent's with the reference: 1 better, 0.5 alike, 0 worse.

    Each comparison is two questions, with the places swapped. Only what is said in both orders counts; a judge that prefers a place
    abstains, and the episode is unscored.
    """

    criteria: str = "Prefer the answer that is right and does what the question asks; length and tone do not count."

    async def __call__(self, task: Task, episode: Episode) -> Score:
        reference = reference_text(task, self.reference)
        if reference is None:
            return Score(value=None, reason=f"{self.name}: the task has no reference in data[{self.reference!r}]")
        if why := non_answer_reason(episode.answer, question=user_text(task), reference=reference):
            return Score(value=0.0, evidence=f"{self.name}: {why}")
        found = await self.compare(question_text(task), answer_text(episode), reference)
        if found.better is None:
            return unscored(self.name, found.answer)
        return Score(value=_VALUES[found.better], evidence=f"{self.name}: {found.better}; {found.reasons}")

    async def compare(self, problem: str, first: str, second: str) -> Comparison:
        """Which of two answers to one question is better."""
        asker = self._asker()
        one, other = await asyncio.gather(
            asker.ask(self._question(problem, first, second), _read), asker.ask(self._question(problem, second, first), _read)
        )
        for heard in (one, other):
            if heard.verdict is None:
                sides = tuple("" if each.verdict is None else each.verdict[0] for each in (one, other))
                return Comparison(better=None, shown=(sides[0], sides[1]), answer=heard)
        (here, reasons), (there, _) = one.verdict, other.verdict
        better = _named(here, a="first", b="second")
        if better != _named(there, a="second", b="first"):
            heard = JudgeAnswer(reason=f"it says {here} in one order and {there} in the other", text=one.text)
            return Comparison(better=None, shown=(here, there), answer=heard)
        return Comparison(better=better, shown=(here, there), answer=one, reasons=reasons)

    def _question(self, problem: str, a: str, b: str) -> ChatQuery:
        data = {
            "question": truncate_middle(problem, MAX_ANSWER),
            "answer a": truncate_middle(a, MAX_ANSWER),
            "answer b": truncate_middle(b, MAX_ANSWER),
        }
        return ChatQuery(instructions=self._instructions(), data=data, schema=_SCHEMA)

    def _instructions(self) -> str:
        return (
            "You compare two answers, A and B, to one question. Say which is better: A, B, or tie where neither is. "
            f"{self.criteria} The place of an answer means nothing. Keep the reasoning short."
        )

    def _asks(self) -> dict[str, Any]:
        return {"instructions": self._instructions(), "reference": self.reference}


_SCHEMA = verdict.schema({"better": {"type": "string", "enum": list(_SIDES)}})


def _read(said: dict[str, Any]) -> tuple[str, str]:
    return verdict.choice(said, "better", _SIDES), verdict.reasoning(said)


def _named(said: str, *, a: Side, b: Side) -> Side:
    return a if said == "A" else b if said == "B" else "tie"
