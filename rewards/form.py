"""Scores the length of an answer, and what the answer must and must not contain.

    short = Length(most=200, zero_at=400)                in rewards/mine.py
    form = Form(starts="Dear ", contains=("invoice",), never=("asap",))

The form of an answer does not show whether the answer is correct, so use these verifiers as parts of a rubric with a required criterion
(`agentrl.reward.rubric`). Without such a criterion, they reward answers without any work, which `agentrl check` reports.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import ConfiguredVerifier


class Length(ConfiguredVerifier):
    """Scores 1 if the length is from `least` to `most`, else 0. With `zero_at`, the score falls linearly from 1 at `most` to 0 at
    `zero_at`.

    Settings are in `task.data["length"]`. A length in tokens counts all completion tokens of the episode. In other units, a
    missing answer has length 0.
    """

    name: ClassVar[str] = "length"

    unit: Literal["characters", "words", "lines", "tokens"] = "words"
    least: int = Field(1, ge=0)
    most: int = Field(1000, ge=1)
    zero_at: int | None = None
    """None means that an answer longer than `most` scores 0."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most or (self.zero_at is not None and self.zero_at <= self.most):
            raise ValueError("least <= most < zero_at is required")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the length."""
        rules = self.for_task(task)
        text = episode.answer or ""
        lengths = {"characters": lambda: len(text), "words": lambda: len(text.split()), "lines": lambda: len(text.splitlines())}
        length = episode.completion_tokens if rules.unit == "tokens" else lengths[rules.unit]()
        value = float(rules.least <= length <= rules.most)
        if rules.zero_at is not None and length > rules.most:
            value = max(0.0, (rules.zero_at - length) / (rules.zero_at - rules.most))
        return Score(value=value, evidence=f"{length} {rules.unit}")


class Form(ConfiguredVerifier):
    """Scores 1 if every rule holds, else 0. Each rule is a part of the score, and the part `terms` is the share of rules that hold.
    Settings are in `task.data["form"]`.

    White space at both ends of the answer is ignored. An empty answer breaks the rule `not_empty`. For patterns, see `rewards.pattern`; for
    schemas, see `rewards.json_schema`.
    """

    name: ClassVar[str] = "form"

    starts: str = ""
    ends: str = ""
    contains: tuple[str, ...] = ()
    """The answer must contain each of these."""
    never: tuple[str, ...] = ()
    """The answer must contain none of these."""
    once: tuple[str, ...] = ()
    """The answer must contain each of these exactly once."""
    case: bool = True
    """Whether the comparison is case-sensitive."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if any(not term for term in (*self.contains, *self.never, *self.once)):
            raise ValueError("a term must be a non-empty string")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the form."""
        rules = self.for_task(task)
        text = rules._plain((episode.answer or "").strip())
        rules_hold = {"not_empty": bool(text)}
        if rules.starts:
            rules_hold["starts"] = text.startswith(rules._plain(rules.starts.strip()))
        if rules.ends:
            rules_hold["ends"] = text.endswith(rules._plain(rules.ends.strip()))
        for term in rules.contains:
            rules_hold[f"contains {term}"] = rules._plain(term) in text
        for term in rules.never:
            rules_hold[f"never {term}"] = rules._plain(term) not in text
        for term in rules.once:
            rules_hold[f"once {term}"] = text.count(rules._plain(term)) == 1
        parts = {name: float(holds) for name, holds in rules_hold.items()}
        missing = [name for name, holds in rules_hold.items() if not holds]
        evidence = f"broken rules: {'; '.join(missing)}"[:500] if missing else ""
        return Score(value=float(not missing), parts=parts | {"terms": sum(parts.values()) / len(parts)}, evidence=evidence)

    def _plain(self, text: str) -> str:
        return text if self.case else text.casefold()


length = Length()
form = Form()
