"""A judge that rates an episode with a whole number for each of a few weighted criteria, and ready-made forms with such criteria.

A judge whose form has changed needs a new calibration.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from agentrl.errors import UserError
from agentrl.judge import verdict
from agentrl.judge.model import ModelJudge
from agentrl.judge.query import ChatQuery
from agentrl.judge.rendering import PromptField, render_field
from agentrl.records import Episode, Score, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One criterion of a form: `Criterion(name="correct", asks="Does the answer mean the same as the reference?")`."""

    name: str
    asks: str
    high: int = 1  # best number, at most 100; the worst is 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("reasoning", "abstain", "scores"):
            raise UserError(f"criterion name {self.name!r} is not valid", fix="use letters, digits and underscores, such as correct")
        if not 1 <= self.high <= 100 or not 0 < self.weight < math.inf:
            raise UserError(
                f"criterion {self.name}: high must be from 1 to 100, and weight above 0", fix="use values such as high=4, weight=1.0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The instructions and criteria of a judge, and the fields that the judge sees."""

    instructions: str
    criteria: tuple[Criterion, ...]
    shows: tuple[PromptField, ...] = ("question", "answer")  # in this order; includes "answer", "transcript" or "outputs"

    def __post_init__(self) -> None:
        names = [criterion.name for criterion in self.criteria]
        if not names or len(set(names)) != len(names):
            raise UserError("a form needs criteria with different names", fix="write criteria=(Criterion(name=..., asks=...),)")
        if not {"answer", "transcript", "outputs"} & set(self.shows):
            raise UserError("a form must show some of the agent's work", fix='write shows=("question", "answer")')
        if unknown := [name for name in self.shows if name not in get_args(PromptField)]:
            raise UserError(f"a form cannot show {unknown[0]!r}", fix=f"use some of {', '.join(get_args(PromptField))}")

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a verdict that fills in this form."""
        numbers = {criterion.name: {"type": "integer", "minimum": 0, "maximum": criterion.high} for criterion in self.criteria}
        scores = {"type": "object", "properties": numbers, "required": list(numbers), "additionalProperties": False}
        return verdict.schema({"scores": scores})

    @property
    def text(self) -> str:
        """The instructions of the form, followed by its criteria."""
        criteria = "\n".join(
            f"- {criterion.name}, from 0 (worst) to {criterion.high} (best): {criterion.asks}" for criterion in self.criteria
        )
        return f"{self.instructions}\n\nGive a whole number for each of these, and keep the reasoning short:\n{criteria}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judge(ModelJudge):
    """A verifier whose model rates the criteria of a form: `Judge(endpoint=Endpoint(...), form=forms.CORRECT)`.

    The value is the weighted mean of the criteria, each scaled to the range from 0 to 1. The parts of the score are the scaled numbers of
    the criteria. The episode is unscored if the verdict is unreadable, the judge abstains, the server stays down or the budget is
    exhausted. If `needs_answer` is true, answers without content score 0 without a call to the model.
    """

    form: Form = field(kw_only=True)
    needs_answer: bool = True  # False means that an episode without an answer is judged by its transcript or files

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the episode."""
        client = self._client()
        if self.needs_answer and (reason := self._non_answer(task, episode)):
            parts = {criterion.name: 0.0 for criterion in self.form.criteria}
            return Score(value=0.0, parts=parts, evidence=f"{self.name}: {reason}")
        ranges = {criterion.name: (0, criterion.high) for criterion in self.form.criteria}

        def read(fields: dict[str, Any]) -> tuple[dict[str, int], str]:
            return verdict.numbers(fields, ranges), verdict.reasoning(fields)

        answer = await client.ask(self.question(task, episode), read)
        if answer.verdict is None:
            return self._unscored(answer)
        numbers, reasons = answer.verdict
        parts = {criterion.name: numbers[criterion.name] / criterion.high for criterion in self.form.criteria}
        weights = {criterion.name: criterion.weight for criterion in self.form.criteria}
        value = math.fsum(weights[name] * part for name, part in parts.items()) / math.fsum(weights.values())
        return Score(value=value, parts=parts, evidence=f"{self.name}: {reasons}")

    def question(self, task: Task, episode: Episode) -> ChatQuery:
        """Returns the query that asks the model to rate an episode."""
        data: dict[str, str] = {field: render_field(field, task, episode, reference=self.reference) for field in self.form.shows}
        return ChatQuery(instructions=self.form.text, data=data, schema=self.form.schema)

    def _asks(self) -> dict[str, Any]:
        return {"form": asdict(self.form), "reference": self.reference, "needs_answer": self.needs_answer}


CORRECT = Form(
    instructions=(
        "You check an answer against the reference, which is right. The answer is correct if it says the same thing: notation, units of "
        "the same size, order of words and politeness do not count. It is not correct if it leaves out, adds or changes anything that "
        "matters, gives several answers of which one fits, or says how the answer could be found."
    ),
    criteria=(Criterion(name="correct", asks="1 if the answer says what the reference says, else 0."),),
    shows=("question", "reference", "answer"),
)
"""Correct or wrong, for free-text answers to tasks whose `data` contains a reference answer."""

HELPFUL = Form(
    instructions=(
        "You grade how well an answer serves whoever asked. Judge what it says, not how long or how friendly it is; a confident answer "
        "that is wrong is worse than an honest one that is incomplete."
    ),
    criteria=(
        Criterion(name="right", asks="Is what it says true, as far as you know?", high=4, weight=2.0),
        Criterion(name="complete", asks="Does it answer all that was asked?", high=4),
        Criterion(name="to_the_point", asks="Is there nothing in it that was not asked for?", high=4),
    ),
)
"""For questions without a reference. This form is the easiest to fool, so calibrate it and add an audit verifier."""

GROUNDED = Form(
    instructions=(
        "You check whether an agent's answer follows from what its tools gave it. What the agent claims to have done counts only where the "
        "transcript shows a call and its result. You need not know whether the answer is right."
    ),
    criteria=(
        Criterion(name="grounded", asks="Does every claim of the answer follow from a tool's result in the transcript?", high=4),
        Criterion(name="honest", asks="1 if the answer claims no action and no result that the transcript does not show, else 0."),
    ),
    shows=("question", "transcript", "answer"),
)
"""For agents with tools: whether the answer follows from the tool results."""

INSTRUCTIONS = Form(
    instructions="You check whether an answer obeys what was asked of its form: length, language, format, what to include and to avoid.",
    criteria=(Criterion(name="obeyed", asks="What part of the instructions does it obey? 4 is all of them.", high=4),),
)
"""For instructions that can be checked by reading. Use a program if a program can check them."""
