"""Length and format: how long an answer is, and what must and must not stand in it.

    short = Length(most=200, zero_at=400)                in rewards/mine.py
    form = Form(starts="Dear ", contains=("invoice",), never=("asap",))

The form of an answer says nothing of whether it is right: these are parts of a rubric that has a gate (`agentrl.reward.rubric`). Alone they
pay for empty work, which `agentrl check` tells.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import ConfiguredVerifier


class Length(ConfiguredVerifier):
    """1 when the length is from `least` to `most`, else 0; with `zero_at`, it falls in a line from 1 at `most` to 0 at `zero_at`.

    Settings in `task.data["length"]`. No answer has length 0. Tokens are those that were sampled in the whole episode.
    """

    name: ClassVar[str] = "length"

    unit: Literal["characters", "words", "lines", "tokens"] = "words"
    least: int = Field(1, ge=0)
    most: int = Field(1000, ge=1)
    zero_at: int | None = None
    """None: what is longer than `most` gets 0."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most or (self.zero_at is not None and self.zero_at <= self.most):
            raise ValueError("least <= most < zero_at is wanted")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.for_task(task)
        text = episode.answer or ""
        lengths = {"characters": lambda: len(text), "words": lambda: len(text.split()), "lines": lambda: len(text.splitlines())}
        length = episode.completion_tokens if rules.unit == "tokens" else lengths[rules.unit]()
        value = float(rules.least <= length <= rules.most)
        if rules.zero_at is not None and length > rules.most:
            value = max(0.0, (rules.zero_at - length) / (rules.zero_at - rules.most))
        return Score(value=value, evidence=f"{length} {rules.unit}")


class Form(ConfiguredVerifier):
    """1 when every term holds, else 0; each term is a part, and `terms` the share that holds. Settings in `task.data["form"]`.

    White space at both ends of the answer plays no part. Patterns are in `rewards.pattern`, schemas in `rewards.json_schema`.
    """

    name: ClassVar[str] = "form"

    starts: str = ""
    ends: str = ""
    contains: tuple[str, ...] = ()
    """Every one must stand in the answer."""
    never: tuple[str, ...] = ()
    """None may stand in the answer."""
    once: tuple[str, ...] = ()
    """Each must stand in the answer exactly once."""
    case: bool = True
    """Whether capitals differ from small letters."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if any(not term for term in (*self.contains, *self.never, *self.once)):
            raise ValueError("an empty text is no term")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.for_task(task)
        text = rules._plain((episode.answer or "").strip())
        held = {"not_empty": bool(text)}
        if rules.starts:
            held["starts"] = text.startswith(rules._plain(rules.starts.strip()))
        if rules.ends:
            held["ends"] = text.endswith(rules._plain(rules.ends.strip()))
        for term in rules.contains:
            held[f"contains {term}"] = rules._plain(term) in text
        for term in rules.never:
            held[f"never {term}"] = rules._plain(term) not in text
        for term in rules.once:
            held[f"once {term}"] = text.count(rules._plain(term)) == 1
        parts = {name: float(holds) for name, holds in held.items()}
        missing = [name for name, holds in held.items() if not holds]
        evidence = f"does not hold: {'; '.join(missing)}"[:500] if missing else ""
        return Score(value=float(not missing), parts=parts | {"terms": sum(parts.values()) / len(parts)}, evidence=evidence)

    def _plain(self, text: str) -> str:
        return text if self.case else text.casefold()


length = Length()
form = Form()
