"""A judge that fills in a form: whole numbers for a few criteria, each with a weight."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.errors import UserError
from agentrl.judge import verdict
from agentrl.judge.model import ModelJudge, unscored
from agentrl.judge.non_answers import non_answer_reason
from agentrl.judge.query import ChatQuery
from agentrl.judge.rendering import PromptField, reference_text, render_field, user_text
from agentrl.records import Episode, Score, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One thing to look at: `Criterion(name="correct", asks="Does the answer mean the same as the reference?")`."""

    name: str
    asks: str
    high: int = 1  # the best number, 0 being the worst: 1 for yes or no, at most 100
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("reasoning", "abstain", "scores"):
            raise UserError(f"a criterion's name is a word such as correct, got {self.name!r}", fix="letters, digits, underscores")
        if not 1 <= self.high <= 100 or not 0 < self.weight < math.inf:
            raise UserError(f"criterion {self.name}: high is from 1 to 100 and weight above 0", fix="such as high=4, weight=1.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a judge is asked, and what it is shown for it."""

    instructions: str
    criteria: tuple[Criterion, ...]
    shows: tuple[PromptField, ...] = ("question", "answer")  # in this order; "answer" or "transcript" or "outputs" is among them

    def __post_init__(self) -> None:
        names = [one.name for one in self.criteria]
        if not names or len(set(names)) != len(names):
            raise UserError("a form needs criteria, each with a name of its own", fix="criteria=(Criterion(name=..., asks=...),)")
        if not {"answer", "transcript", "outputs"} & set(self.shows):
            raise UserError("a form that shows nothing of the agent judges nothing", fix='shows=("question", "answer")')

    @property
    def schema(self) -> dict[str, Any]:
        numbers = {one.name: {"type": "integer", "minimum": 0, "maximum": one.high} for one in self.criteria}
        scores = {"type": "object", "properties": numbers, "required": list(numbers), "additionalProperties": False}
        return verdict.schema({"scores": scores})

    @property
    def text(self) -> str:
        asked = "\n".join(f"- {one.name}, from 0 (worst) to {one.high} (best): {one.asks}" for one in self.criteria)
        return f"{self.instructions}\n\nGive a whole number for each of these, and keep the reasoning short:\n{asked}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judge(ModelJudge):
    """A verifier that asks a model to fill in a form: `Judge(endpoint=Endpoint(...), form=forms.CORRECT)`.

    The value is the weighted mean of the criteria, each from 0 to 1, which are its parts. A verdict that cannot be read, an
    abstention, a server that stays down and a budget that is spent are unscored, never 0. Answers that say nothing are 0 without asking.
    """

    form: Form = field(kw_only=True)
    needs_answer: bool = True  # False: an agent that hands in nothing may still score, by its transcript or its files

    async def __call__(self, task: Task, episode: Episode) -> Score:
        asker = self._asker()
        if why := self._hollow(task, episode):
            return Score(value=0.0, parts=dict.fromkeys((one.name for one in self.form.criteria), 0.0), evidence=f"{self.name}: {why}")
        wanted = {one.name: (0, one.high) for one in self.form.criteria}

        def read(said: dict[str, Any]) -> tuple[dict[str, int], str]:
            return verdict.numbers(said, wanted), verdict.reasoning(said)

        heard = await asker.ask(self.question(task, episode), read)
        if heard.verdict is None:
            return unscored(self.name, heard)
        numbers, reasons = heard.verdict
        parts = {one.name: numbers[one.name] / one.high for one in self.form.criteria}
        weights = {one.name: one.weight for one in self.form.criteria}
        value = math.fsum(weights[name] * part for name, part in parts.items()) / math.fsum(weights.values())
        return Score(value=value, parts=parts, evidence=f"{self.name}: {reasons}")

    def question(self, task: Task, episode: Episode) -> ChatQuery:
        """What is asked about an episode."""
        data: dict[str, str] = {what: render_field(what, task, episode, reference=self.reference) for what in self.form.shows}
        return ChatQuery(instructions=self.form.text, data=data, schema=self.form.schema)

    def _hollow(self, task: Task, episode: Episode) -> str:
        if not self.needs_answer:
            return ""
        return non_answer_reason(episode.answer, question=user_text(task), reference=reference_text(task, self.reference))

    def _asks(self) -> dict[str, Any]:
        return {"form": asdict(self.form), "reference": self.reference, "needs_answer": self.needs_answer}
