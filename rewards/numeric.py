"""Numbers, with a tolerance and units.

rewards.numeric:numeric                              with task.data = {"answer": "3.6 km/h"} or {"answer": 1.0}
distance = Numeric(relative=1e-3, unit="m")          in rewards/mine.py, referenced as rewards.mine:distance
"""

from __future__ import annotations

import math
import re
from typing import ClassVar, NamedTuple

from pydantic import Field, field_validator

from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import SHOWN, Configured, answer_of, wrong
from rewards.units import ONE, Unit, unit

LONGEST = 200  # characters of an answer
ROUNDING = 1e-12  # of the truth: what converting units may cost
_NUMBER = re.compile(r"[+-]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_CURRENCY = ("$", "\u20ac", "\u00a3")


class Quantity(NamedTuple):
    """A number in SI base units, and the unit it was written in; None: it was written without one."""

    value: float
    unit: Unit | None


class Numeric(Configured):
    """1 when the answer is a number within the tolerance of the truth, else 0. Settings in `task.data["numeric"]`.

    A number is written in ASCII: decimal or scientific, commas between groups of three digits. It is right when it differs by at most
    max(absolute, relative * |truth|). With `unit`, truth and answer are converted to it, and a number without a unit is one in `unit`;
    without it, an answer has a unit of the truth's dimension, or none where the truth has none. Degrees Celsius and Fahrenheit, which have
    another zero, are no units here. Infinite and NaN are no numbers.
    """

    name: ClassVar[str] = "numeric"

    relative: float = Field(1e-6, ge=0, lt=1)
    absolute: float = Field(0.0, ge=0)
    """In `unit`, or in the truth's."""
    unit: str = ""
    """What a number without a unit is in, such as "m/s"."""
    must_name_unit: bool = False
    """Whether an answer without a unit is wrong."""
    after: str = ""
    """The number is what follows the last occurrence of this. Empty: all that was submitted."""

    @field_validator("unit")
    @classmethod
    def _known(cls, text: str) -> str:
        if unit(text) is None:
            raise ValueError(f"{text!r} is no known unit; rewards/units.py lists them")
        return text

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.of(task)
        truth = rules.wanted(task)
        wanted = quantity(str(truth)) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None
        if wanted is None:
            raise TaskError(f"task {task.id}: the truth {str(truth)[:SHOWN]!r} is no number with a known unit")
        written_in = unit(rules.unit) if rules.unit else wanted.unit or ONE
        assert written_in is not None, "checked on construction"
        if (wanted.unit or written_in).powers != written_in.powers:
            raise TaskError(f"task {task.id}: the truth {truth!r} is not in units of {rules.unit}")
        text, problem = answer_of(episode, after=rules.after, longest=LONGEST)
        if problem:
            return wrong(problem)
        given, told = quantity(text), f"answer {text[:SHOWN]!r}, truth {truth!r}"
        if given is None:
            return wrong(f"{told}: no number with a known unit")
        bare = given.unit is None
        if bare and rules.must_name_unit:
            return wrong(f"{told}: without a unit")
        if bare and not rules.unit and wanted.unit is not None and any(wanted.unit.powers):
            return wrong(f"{told}: without the unit that the truth has")
        if (given.unit or written_in).powers != written_in.powers:
            return wrong(f"{told}: of another dimension")
        values = [one.value if one.unit else one.value * written_in.factor for one in (given, wanted)]
        tolerance = max(rules.absolute * written_in.factor, rules.relative * abs(values[1]))
        right = abs(values[0] - values[1]) <= tolerance + ROUNDING * abs(values[1])
        return Score(value=float(right), evidence=told)


def quantity(text: str) -> Quantity | None:
    """A number with or without a unit behind it (a currency's sign may stand before it); None: it is neither."""
    text = text.strip().removesuffix(".").replace("\u2212", "-")  # the minus sign of typesetting
    before = next((sign for sign in _CURRENCY if text.startswith(sign)), "")
    text = text.removeprefix(before)
    match = _NUMBER.match(text)
    if match is None:
        return None
    digits = match[0]
    rest = (text[len(digits) :] + before).strip()
    value, found = float(digits.replace(",", "")), unit(rest)
    if found is None:
        return None
    value *= found.factor
    return Quantity(value, found if rest else None) if math.isfinite(value) else None


numeric = Numeric()
